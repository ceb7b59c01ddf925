//! Operations a second that a program away makes at home, compared with the same program at home.

use crate::bench_lab::{BenchLab, Running};
use crate::table::{Aim, Series, Table};
use anyhow::{Context, Result};

/// Number of measurements of each, taken alternately.
const TURNS: u32 = 5;

/// Rows: name, program, number of instances, and bytes for each operation.
const ROWS: [(&str, &[&str], usize, f64); 13] = [
    ("forwarded getppid", &["rates", "getppid"], 1, 0.0),
    ("… by 4 threads", &["rates", "getppid", "4"], 1, 0.0),
    ("… by 4 processes", &["rates", "getppid"], 4, 0.0),
    ("read of 4 KiB of a delegated file", &["rates", "read"], 1, 4096.0),
    ("… by 4 processes", &["rates", "read"], 4, 4096.0),
    ("write of 4 KiB to a delegated file", &["rates", "write"], 1, 4096.0),
    ("… by 4 processes", &["rates", "write"], 4, 4096.0),
    ("forwarded read of 4 KiB by 4 threads", &["rates", "read", "4"], 1, 4096.0),
    ("read cancelled by a signal, restarted", &["blocked", "read", "1"], 1, 0.0),
    ("… in 10 threads", &["blocked", "read", "10"], 1, 0.0),
    ("poll cancelled by a signal, made again", &["blocked", "poll", "1"], 1, 0.0),
    ("fork, _exit, wait", &["rates", "fork"], 1, 0.0),
    ("posix_spawn of true, wait", &["rates", "exec"], 1, 0.0),
];

/// Numbers of threads for which freezes are compared.
const THREADS: [&str; 2] = ["1", "10"];

/// Adds its rows.
///
/// # Errors
/// If it could not be measured.
pub(crate) fn measure(table: &mut Table) -> Result<()> {
    for (link, delay) in [("switch", "0"), ("switch:0.2ms", "0.2")] {
        let lab = BenchLab::make(2, link)?;
        for (what, words, count, bytes) in ROWS {
            let what = format!("{what}, link of {delay} ms");
            rate(table, &lab, (&what, words, count, bytes)).with_context(|| what.clone())?;
        }
    }
    freezes(table)
}

fn rate(
    table: &mut Table,
    lab: &BenchLab,
    (what, words, count, bytes): (&str, &[&str], usize, f64),
) -> Result<()> {
    // Locked, so that only this benchmark moves them.
    let mosrun: Vec<&str> = [&["mosrun", "-L"], words].concat();
    let start = |words: &[&str]| (0..count).map(|_i| lab.program(1, words)).collect::<Result<Vec<Running>>>();
    let (mut gone, mut stayed, mut native) = (start(&mosrun)?, start(&mosrun)?, start(words)?);
    for program in &gone {
        lab.migrate(program.pid, "2")?;
    }
    let (mut away, mut home, mut alone) = <(Series, Series, Series)>::default();
    for _ in 0..TURNS {
        away.add(total_rate(&mut gone)?);
        home.add(total_rate(&mut stayed)?);
        alone.add(total_rate(&mut native)?);
    }
    // In thousands if the rate at home is high.
    let (by, unit) = if home.median() < 10_000.0 { (1.0, " /s") } else { (1e-3, " k/s") };
    let [away, home, alone] = [&away, &home, &alone].map(|series| series.times(by));
    let mut against = format!("at home, mosrun; native {}", alone.text(unit));
    if bytes > 0.0 {
        against += &format!("; away {:.1} MB/s", away.median() / by * bytes / 1e6);
    }
    let ratio = away.median() / home.median();
    table.compare(what, &away.text(unit), &against, &home.text(unit), ratio, Aim::None)
}

/// The sum of the rates of all instances.
fn total_rate(programs: &mut [Running]) -> Result<f64> {
    for program in &mut *programs {
        program.send("go")?;
    }
    let mut sum = 0.0;
    for program in programs {
        let line = program.line()?;
        sum += line.parse::<f64>().with_context(|| format!("{line:?} is no number"))?;
    }
    Ok(sum)
}

/// Freeze times between nodes of a process whose threads wait in a call, and of one whose threads
/// compute. One process at a time, so that a computing one has its whole node.
fn freezes(table: &mut Table) -> Result<()> {
    let lab = BenchLab::make(3, "switch")?;
    for threads in THREADS {
        let what = format!("freeze onward, {threads} in read");
        let (mut waiting, mut computing) = <(Series, Series)>::default();
        for _ in 0..TURNS {
            for (how, series) in [("read", &mut waiting), ("compute", &mut computing)] {
                let mut program = lab.program(1, &["blocked", how, threads])?;
                lab.migrate(program.pid, "2")?;
                for node in ["3", "2", "3"] {
                    series.add(lab.migrate(program.pid, node).with_context(|| what.clone())?.freeze_ms);
                }
                if how == "read" {
                    // The pending calls must still work.
                    total_rate(std::slice::from_mut(&mut program)).with_context(|| what.clone())?;
                }
            }
        }
        let ratio = waiting.median() / computing.median();
        let against = format!("{threads} computing");
        table.compare(&what, &waiting.text(" ms"), &against, &computing.text(" ms"), ratio, Aim::None)?;
    }
    Ok(())
}
