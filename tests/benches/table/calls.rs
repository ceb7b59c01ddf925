//! A call performed at home, compared with the shortest exchange between two plain programs.

use crate::bench_lab::BenchLab;
use crate::table::{Aim, Series, Table};
use crate::tls;
use anyhow::{Context, Result};

/// Number of measurements of each, taken alternately.
const TURNS: u32 = 3;
/// Seconds of each measurement.
const SECONDS: f64 = 3.0;
const PORT: &str = "7001";

/// Adds its rows.
///
/// # Errors
/// If it could not be measured.
pub(crate) fn measure(table: &mut Table) -> Result<()> {
    for (link, delay) in [("switch", "0"), ("switch:0.2ms", "0.2")] {
        let lab = BenchLab::make(2, link)?;
        let (mut native, mut plain, mut sealed, mut forwarded) =
            <(Series, Series, Series, Series)>::default();
        for _ in 0..TURNS {
            let mut program = lab.program(1, &["getppid"])?;
            native.extend(program.numbers(1.0)?.iter().map(|ns| ns / 1e3));
            lab.migrate(program.pid, "2").context("getppid")?;
            forwarded.extend(program.numbers(SECONDS)?.iter().map(|ns| ns / 1e3));
            drop(program);
            plain.extend(ping_pong(&lab)?.iter().map(|ns| ns / 1e3));
            sealed.add(tls::ping_pong(&lab, SECONDS)? / 1e3);
        }
        let ratio = forwarded.median() / plain.median();
        let what = format!("forwarded getppid, link of {delay} ms");
        table.compare(
            &what,
            &forwarded.text(" µs"),
            "TCP ping-pong",
            &plain.text(" µs"),
            ratio,
            Aim::AtMost(2.5),
        )?;
        let rest = forwarded.median() - sealed.median();
        table.row(
            &format!("… of which TLS link, {delay} ms"),
            &sealed.text(" µs"),
            &format!(
                "64 bytes over tern-wire; left for shims, trap and deputy: {rest:.1} µs; native {:.2} µs",
                native.median()
            ),
        )?;
    }
    Ok(())
}

fn ping_pong(lab: &BenchLab) -> Result<Vec<f64>> {
    let _server = lab.program(2, &["pingpong", PORT])?;
    let address = lab.address(2);
    lab.program(1, &["pingpong", &address, PORT, &SECONDS.to_string()])?.all_numbers()
}
