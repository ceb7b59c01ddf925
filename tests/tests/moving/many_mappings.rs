//! A process of very many mappings is migrated out, onward and home. The time of each journey grows
//! no faster than the number of its mappings.

use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};
use tern_tests::cluster::Cluster;
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::Running;

/// Starts the given command as a child, prints its pid, and waits for it.
const RUN_AS_CHILD: &str = r#""$@" & echo $! >&2; wait $!"#;
/// The journeys, twice: the shortest of each counts, since a busy machine lengthens some.
const LEGS: [&str; 3] = ["2", "3", "home"];
const ROUNDS: u32 = 2;
/// Number of mappings of the small process and of the large one, and how many times longer a
/// journey of the large one may take: twice the ratio of these numbers. A cost that is quadratic in
/// the number makes it up to 64 times as long.
const FEW: u32 = 4_000;
const MANY: u32 = 32_000;
const MAX_RATIO: f64 = 2.0 * (MANY / FEW) as f64;
/// Number of mapped files: more than the descriptors that most systems allow a program by default.
const FILES: u32 = 2_500;
/// Number of files that are mapped shared and writable. Each journey sends their content anew.
const SHARED_FILES: u32 = 1_500;
/// Maximum time of a journey with these files.
const MAX_FILES_TIME: Duration = Duration::from_secs(8);

/// Migrates `manymaps` with these arguments, and returns the shortest time of each leg.
fn journeys(cluster: &Cluster, what: &str, count: u32) -> Result<[Duration; LEGS.len()]> {
    let program = named("manymaps", Flavour::Static)?;
    let until = format!("/tmp/until-{what}-{count}");
    let mut command = cluster.command(1, "sh");
    command.args(["-c", RUN_AS_CHILD, "sh"]).arg(&program).arg(what).arg(count.to_string());
    command.env("TERN_SECONDS", "0.5").env("TERN_UNTIL", &until);
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let pid = running.pid;
    running.await_output("mapped")?;
    let mut shortest = [Duration::MAX; LEGS.len()];
    for _ in 0..ROUNDS {
        for (to, shortest) in LEGS.iter().zip(&mut shortest) {
            let begun = Instant::now();
            let moved = cluster.migrate(pid, to);
            moved.with_context(|| format!("{count} {what} to {to}\n{}", cluster.diagnostics(pid)))?;
            *shortest = begun.elapsed().min(*shortest);
        }
    }
    cluster.touch(&until)?;
    let end = running.finish(Duration::from_secs(60)).with_context(|| cluster.diagnostics(pid))?;
    ensure!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}\n{}", cluster.diagnostics(pid));
    Ok(shortest)
}

#[test]
fn time_is_linear_in_the_number_of_mappings() -> Result<()> {
    let cluster = Cluster::up("many-mappings")?;
    let few = journeys(&cluster, "memory", FEW)?;
    let many = journeys(&cluster, "memory", MANY)?;
    let mut too_long = Vec::new();
    for (to, (few, many)) in LEGS.iter().zip(few.into_iter().zip(many)) {
        let row = format!("to {to}: {FEW} mappings in {few:.2?}, {MANY} in {many:.2?}");
        println!("{row}");
        if many > few.mul_f64(MAX_RATIO) {
            too_long.push(row);
        }
    }
    ensure!(too_long.is_empty(), "more than {MAX_RATIO} times as long:\n{}", too_long.join("\n"));
    Ok(())
}

#[test]
fn thousands_of_mapped_files_move() -> Result<()> {
    let cluster = Cluster::up("many-files")?;
    for (what, count) in [("files", FILES), ("shared", SHARED_FILES)] {
        let times = journeys(&cluster, what, count)?;
        let row = format!("{count} {what} to {LEGS:?}: {times:.2?}");
        println!("{row}");
        ensure!(times.iter().all(|time| *time < MAX_FILES_TIME), "{row}");
    }
    Ok(())
}
