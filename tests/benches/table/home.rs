//! What mosrun costs a program that stays at home.

use crate::bed::Bed;
use crate::table::{Aim, Series, Table};
use anyhow::Result;

/// How often each is measured, in turns.
const TURNS: u32 = 6;

/// Adds its rows.
///
/// # Errors
/// If it could not be measured.
pub(crate) fn measure(table: &mut Table) -> Result<()> {
    let bed = Bed::make(1, "switch")?;
    let (mut under, mut alone) = <(Series, Series)>::default();
    for turn in 0..TURNS {
        let both: [(&mut Series, &[&str]); 2] =
            [(&mut under, &["mosrun", "calls", "2"]), (&mut alone, &["calls", "2"])];
        // Whoever comes second finds the machine as the first has left it: they take turns at that, too.
        let order = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
        let mut both = both.map(Some);
        for at in order {
            if let Some((series, words)) = both[at].take() {
                series.extend(bed.program(1, words)?.all_numbers()?.iter().map(|ns| 1e6 / ns));
            }
        }
    }
    let ratio = under.median() / alone.median();
    let unit = " k/s";
    table.compare(
        "5 short calls at home, mosrun",
        &under.text(unit),
        "alone",
        &alone.text(unit),
        ratio,
        Aim::AtLeast(0.99),
    )?;

    let own = bed.own()?;
    let out = String::from_utf8(bed.run(1, &[&own, "start", "100"])?)?;
    let (mut mosrun, mut plain) = <(Series, Series)>::default();
    for line in out.lines() {
        if let Some((a, b)) = line.split_once(' ') {
            mosrun.add(a.parse()?);
            plain.add(b.parse()?);
        }
    }
    let more = mosrun.median() - plain.median();
    table.exceed(
        "start of `mosrun true`",
        &mosrun.text(" ms"),
        "`true`",
        &plain.text(" ms"),
        (more, " ms"),
        3.0,
    )
}
