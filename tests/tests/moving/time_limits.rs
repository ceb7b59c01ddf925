//! Calls that wait for a limited time end after that time, although their process moves meanwhile.

use anyhow::{Context, Result, ensure};
use std::thread;
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::{ANNOUNCE, Running};

fn move_while_it_waits(cluster: &Cluster, start: &str, places: &[&str]) -> Result<()> {
    let until = format!("/tmp/until-timelimits{start}-{}", places.join("-"));
    let mut command = cluster.command(1, "mosrun");
    command.args([start, "sh", "-c", ANNOUNCE, "sh"]).arg(named("timelimits", Flavour::Dynamic)?);
    let mut running = Running::start(command.env("TERN_UNTIL", &until).env("TERN_SECONDS", "1"), false)?;
    running.close_input();
    running.await_output("waiting\n")?;
    let pid = running.pid;
    let mut moved = Ok(());
    for to in places {
        let refused = |refused| anyhow::anyhow!("to {to}: {refused:?}\n{}", running.output_so_far());
        moved = moved.and_then(|()| cluster.migrate(pid, to).map(drop).map_err(refused));
    }
    cluster.touch(&until)?;
    let end = running.finish(Duration::from_secs(60)).with_context(|| cluster.diagnostics(pid))?;
    moved.with_context(|| cluster.diagnostics(pid))?;
    ensure!(end.status == 0 && end.out.ends_with(b"PASS\n"), "{end:?}\n{}", cluster.diagnostics(pid));
    Ok(())
}

/// Each process makes one wait of each kind, and says when more than half of their time is over.
#[test]
fn waits_end_after_their_time_although_the_process_moves() -> Result<()> {
    let cluster = &Cluster::with_nodes("timelimits", 3)?;
    let journeys: [(&str, &[&str]); 3] =
        [("-L", &["2", "3", "home"]), ("-L", &["2", "home", "2"]), ("-2", &["3", "home"])];
    thread::scope(|scope| {
        let sent =
            journeys.map(|(start, places)| scope.spawn(move || move_while_it_waits(cluster, start, places)));
        sent.into_iter().try_for_each(|one| one.join().map_err(|_panic| anyhow::anyhow!("a panic"))?)
    })
}
