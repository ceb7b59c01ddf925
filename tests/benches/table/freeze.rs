//! Freeze time of a migrated process.

use crate::bench_lab::BenchLab;
use crate::table::{Series, Table};
use anyhow::{Context, Result};

/// Number of round trips of each process.
const TURNS: u32 = 3;

/// Adds its rows.
///
/// # Errors
/// If it could not be measured.
pub(crate) fn measure(table: &mut Table) -> Result<()> {
    let lab = BenchLab::make(2, "switch")?;
    for (mib, criu) in [("1", "CRIU 4.2: 85 ms"), ("64", "CRIU 4.2: 149 ms"), ("1024", "CRIU 4.2: 1280 ms")] {
        for (dirty, how) in [("0", "idle"), ("100", "writing 100 MB/s")] {
            let name = format!("freeze, {mib} MiB, {how}");
            let mut program = lab.program(1, &["dirty", mib, dirty])?;
            program.line()?;
            let (mut out, mut home, mut total) = <(Series, Series, Series)>::default();
            for _ in 0..TURNS {
                let there = lab.migrate(program.pid, "2").with_context(|| name.clone())?;
                let back = lab.migrate(program.pid, "home").with_context(|| name.clone())?;
                out.add(there.freeze_ms);
                home.add(back.freeze_ms);
                total.add(there.total_ms);
            }
            let note =
                format!("home again {}; all of the way out {}; {criu}", home.text(" ms"), total.text(" ms"));
            table.row(&name, &out.text(" ms"), &note)?;
        }
    }
    Ok(())
}
