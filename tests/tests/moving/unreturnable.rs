//! A process makes nothing away with which it could not come home.

use anyhow::{Context, Result, bail, ensure};
use std::time::Duration;
use tern_tests::cluster::Cluster;
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::{ANNOUNCE, Running};

/// Starts `staying` by this command, and waits until it has made its call.
fn start(cluster: &Cluster, by: &[&str], what: &str) -> Result<Running> {
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh"]).args(by).arg(named("staying", Flavour::Dynamic)?).arg(what);
    command.env("TERN_SECONDS", "0.1").env("TERN_UNTIL", format!("/tmp/until-{what}"));
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    running.await_output("held").with_context(|| cluster.diagnostics(running.pid))?;
    Ok(running)
}

fn finish(cluster: &Cluster, mut running: Running, what: &str) -> Result<()> {
    cluster.touch(&format!("/tmp/until-{what}"))?;
    let outcome =
        running.finish(Duration::from_secs(30)).with_context(|| cluster.diagnostics(running.pid))?;
    ensure!(outcome.status == 0 && outcome.out.ends_with(b"PASS\n"), "{outcome:?}");
    Ok(())
}

/// Starts `staying` on node 2, and requires that it comes home for its call, for this reason.
fn comes_home(cluster: &Cluster, what: &str, reason: &str) -> Result<()> {
    let running = start(cluster, &["runon", "2"], what)?;
    let pid = running.pid;
    let (node, why) = cluster.location(pid)?.context("it is not listed")?;
    ensure!(node == 1 && why.contains(reason), "it is on node {node}: {why}\n{}", cluster.diagnostics(pid));
    finish(cluster, running, what)
}

#[test]
fn process_comes_home_before_it_makes_what_cannot_move() -> Result<()> {
    let cluster = Cluster::with_nodes("unreturnable", 2)?;
    comes_home(&cluster, "huge", "huge pages")?;
    comes_home(&cluster, "sealed", "sealed memory")?;
    comes_home(&cluster, "large", "shared memory")
}

#[test]
fn process_with_settings_of_its_own_is_not_moved() -> Result<()> {
    let cluster = Cluster::with_nodes("own-settings", 2)?;
    for what in ["tsc", "mdwe", "dispatch"] {
        let running = start(&cluster, &["mosrun", "-L"], what)?;
        let Err(refused) = cluster.migrate(running.pid, "2") else { bail!("{what}: it was moved") };
        ensure!(refused.message.contains("CPU mode:"), "{what}: {refused}");
        finish(&cluster, running, what)?;
    }
    Ok(())
}
