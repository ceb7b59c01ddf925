//! A process of very many threads is migrated out, onward and home, and its freeze grows no faster
//! than the number of its threads.

use anyhow::{Context, Result, anyhow, ensure};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::Running;

/// Starts the given command as a child, prints its pid, and waits for it.
const RUN_AS_CHILD: &str = r#""$@" & echo $! >&2; wait $!"#;
/// Number of threads of the small process and of the large one, and how many times longer the large
/// one may be frozen: twice the ratio of these numbers. A cost that is quadratic in the number of
/// threads makes it a hundred times as long.
const FEW: u32 = 200;
const MANY: u32 = 2000;
const MAX_RATIO: f64 = 2.0 * (MANY / FEW) as f64;
/// Out, onward and home, twice: the shortest freeze of each leg counts, since a busy machine
/// lengthens some of them.
const LEGS: [&str; 3] = ["2", "3", "home"];
const ROUNDS: u32 = 2;

/// Migrates a process of this many threads, and returns its shortest freeze on each leg, in
/// milliseconds.
fn freezes(cluster: &Cluster, threads: u32) -> Result<[f64; LEGS.len()]> {
    let program = named("threadmany", Flavour::Static)?;
    let until = format!("/tmp/until-{threads}");
    let mut command = cluster.command(1, "sh");
    command.args(["-c", RUN_AS_CHILD, "sh"]).arg(&program).arg(threads.to_string());
    command.env("TERN_SECONDS", "0.5").env("TERN_UNTIL", &until);
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let pid = running.pid;
    let mut shortest = [f64::INFINITY; LEGS.len()];
    for _ in 0..ROUNDS {
        for (to, shortest) in LEGS.iter().zip(&mut shortest) {
            let moved = cluster.migrate(pid, to);
            let report = moved.map_err(|r| anyhow!("{to}: {}\n{}", r.message, cluster.diagnostics(pid)))?;
            *shortest = shortest.min(report.freeze_ms);
        }
    }
    cluster.touch(&until)?;
    let end = running.finish(Duration::from_secs(60)).with_context(|| cluster.diagnostics(pid))?;
    ensure!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}\n{}", cluster.diagnostics(pid));
    Ok(shortest)
}

#[test]
fn two_thousand_threads_move() -> Result<()> {
    let cluster = Cluster::up("many-threads")?;
    let few = freezes(&cluster, FEW)?;
    let many = freezes(&cluster, MANY)?;
    let mut too_long = Vec::new();
    for (to, (few, many)) in LEGS.iter().zip(few.into_iter().zip(many)) {
        let row = format!("to {to}: {FEW} threads frozen for {few:.1} ms, {MANY} for {many:.1} ms");
        println!("{row}");
        if many > MAX_RATIO * few {
            too_long.push(row);
        }
    }
    ensure!(too_long.is_empty(), "more than {MAX_RATIO} times as long:\n{}", too_long.join("\n"));
    Ok(())
}
