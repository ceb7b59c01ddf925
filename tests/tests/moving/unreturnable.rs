//! A process makes nothing away with which it could not come home.

use anyhow::{Context, Result, ensure};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::{ANNOUNCE, Running};

/// Starts `staying` on node 2, and requires that it comes home for its call, for this reason.
fn comes_home(cluster: &Cluster, what: &str, reason: &str) -> Result<()> {
    let until = format!("/tmp/until-{what}");
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh", "runon", "2"]).arg(named("staying", Flavour::Dynamic)?).arg(what);
    command.env("TERN_SECONDS", "0.1").env("TERN_UNTIL", &until);
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let pid = running.pid;
    running.await_output("held").with_context(|| cluster.diagnostics(pid))?;
    let (node, why) = cluster.location(pid)?.context("it is not listed")?;
    ensure!(node == 1 && why.contains(reason), "it is on node {node}: {why}\n{}", cluster.diagnostics(pid));
    cluster.touch(&until)?;
    let outcome = running.finish(Duration::from_secs(30)).with_context(|| cluster.diagnostics(pid))?;
    ensure!(outcome.status == 0 && outcome.out.ends_with(b"PASS\n"), "{outcome:?}");
    Ok(())
}

#[test]
fn process_comes_home_before_it_makes_what_cannot_move() -> Result<()> {
    let cluster = Cluster::with_nodes("unreturnable", 2)?;
    comes_home(&cluster, "huge", "huge pages")?;
    comes_home(&cluster, "sealed", "sealed memory")?;
    comes_home(&cluster, "large", "shared memory")
}
