//! The cost of mosrun for a program that stays at home.

use crate::bench_lab::BenchLab;
use crate::table::{Aim, Series, Table};
use anyhow::Result;

/// Pairs of batches.
const PAIRS: usize = 60;

/// Adds its rows.
///
/// # Errors
/// If it could not be measured.
pub(crate) fn measure(table: &mut Table) -> Result<()> {
    let lab = BenchLab::make(1, "switch")?;
    // Both programs exist all the time, and each batch of one is paired with a batch of the other:
    // the machine's speed changes from second to second by more than the difference to be measured.
    let mut both = [lab.program(1, &["mosrun", "calls"])?, lab.program(1, &["calls"])?];
    let (mut under, mut alone, mut ratios) = <(Series, Series, Series)>::default();
    for pair in 0..PAIRS {
        let mut speeds = [0.0; 2];
        for turn in 0..2 {
            // The order alternates, since the first of a pair affects the second.
            let at = (pair + turn) % 2;
            both[at].send("go")?;
            speeds[at] = 1e6 / both[at].line()?.parse::<f64>()?;
        }
        under.add(speeds[0]);
        alone.add(speeds[1]);
        ratios.add(speeds[0] / speeds[1]);
    }
    let unit = " k/s";
    table.compare(
        "5 short calls at home, mosrun",
        &under.text(unit),
        "alone, in pairs",
        &alone.text(unit),
        ratios.median(),
        Aim::AtLeast(0.99),
    )?;

    let own = lab.own()?;
    let out = String::from_utf8(lab.run(1, &[&own, "start", "100"])?)?;
    let (mut mosrun, mut plain) = <(Series, Series)>::default();
    for line in out.lines() {
        if let Some((a, b)) = line.split_once(' ') {
            mosrun.add(a.parse()?);
            plain.add(b.parse()?);
        }
    }
    let more = mosrun.median() - plain.median();
    table.compare_difference(
        "start of `mosrun true`",
        &mosrun.text(" ms"),
        "`true`",
        &plain.text(" ms"),
        (more, " ms"),
        3.0,
    )
}
