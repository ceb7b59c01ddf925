//! How much longer a process of many threads stands still than the same program with one.

use crate::bed::Bed;
use crate::table::{Series, Table};
use anyhow::{Context, Result};

/// How many threads.
const MANY: &str = "100";
/// How often they go on the journey.
const TURNS: u32 = 7;
/// By how much (ms).
const AIM: f64 = 50.0;

/// Adds its rows.
///
/// # Errors
/// If it could not be measured.
pub(crate) fn measure(table: &mut Table) -> Result<()> {
    let bed = Bed::make(3, "switch")?;
    let mut many = bed.program(1, &["threads", MANY])?;
    let mut one = bed.program(1, &["threads", "1"])?;
    for program in [&mut many, &mut one] {
        program.line()?;
    }
    let journeys = [("2", "out"), ("3", "onward"), ("home", "home")];
    let mut freezes: [(Series, Series); 3] = Default::default();
    for _ in 0..TURNS {
        for ((to, how), (of_many, of_one)) in journeys.iter().zip(&mut freezes) {
            of_many
                .add(bed.migrate(many.pid, to).with_context(|| format!("{MANY} threads {how}"))?.freeze_ms);
            of_one.add(bed.migrate(one.pid, to).with_context(|| format!("one thread {how}"))?.freeze_ms);
        }
    }
    for ((_, how), (of_many, of_one)) in journeys.iter().zip(&freezes) {
        let name = format!("freeze, {MANY} threads, {how}");
        let more = of_many.median() - of_one.median();
        table.exceed(&name, &of_many.text(" ms"), "one thread", &of_one.text(" ms"), (more, " ms"), AIM)?;
    }
    Ok(())
}
