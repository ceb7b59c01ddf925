//! How much longer the freeze of a process with many threads is than that of one with a single
//! thread.

use crate::bench_lab::BenchLab;
use crate::table::{Series, Table};
use anyhow::{Context, Result};

/// Number of threads.
const THREADS: &str = "100";
/// Number of journeys.
const TURNS: u32 = 7;
/// Target for the difference in ms.
const MAX_DIFFERENCE_MS: f64 = 50.0;

/// Adds its rows.
///
/// # Errors
/// If it could not be measured.
pub(crate) fn measure(table: &mut Table) -> Result<()> {
    let lab = BenchLab::make(3, "switch")?;
    let mut many = lab.program(1, &["threads", THREADS])?;
    let mut one = lab.program(1, &["threads", "1"])?;
    for program in [&mut many, &mut one] {
        program.line()?;
    }
    let journeys = [("2", "out"), ("3", "onward"), ("home", "home")];
    let mut freezes: [(Series, Series); 3] = Default::default();
    for _ in 0..TURNS {
        for ((to, how), (of_many, of_one)) in journeys.iter().zip(&mut freezes) {
            of_many.add(
                lab.migrate(many.pid, to).with_context(|| format!("{THREADS} threads {how}"))?.freeze_ms,
            );
            of_one.add(lab.migrate(one.pid, to).with_context(|| format!("one thread {how}"))?.freeze_ms);
        }
    }
    for ((_, how), (of_many, of_one)) in journeys.iter().zip(&freezes) {
        let name = format!("freeze, {THREADS} threads, {how}");
        let more = of_many.median() - of_one.median();
        table.compare_difference(
            &name,
            &of_many.text(" ms"),
            "one thread",
            &of_one.text(" ms"),
            (more, " ms"),
            MAX_DIFFERENCE_MS,
        )?;
    }
    Ok(())
}
