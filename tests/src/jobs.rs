//! Jobs that only compute, on clusters that move them by themselves.

use crate::breaking::until;
use crate::cluster::Cluster;
use crate::running::{ANNOUNCE, Running};
use anyhow::Result;
use std::collections::BTreeMap;
use std::process::Child;
use std::time::{Duration, Instant};
use tern_control::ProcessRow;

/// However busy the machine is, it has happened by then.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// A program on node 1 that computes, and does nothing else, until it is killed; started with `words` in front of it.
///
/// # Errors
/// If it does not start.
pub fn job(cluster: &Cluster, words: &str) -> Result<Running> {
    job_on(cluster, 1, words)
}

/// The same on another node.
///
/// # Errors
/// If it does not start.
pub fn job_on(cluster: &Cluster, node: u16, words: &str) -> Result<Running> {
    program(cluster, node, words, &["awk", "BEGIN { while (1) i++ }"])
}

/// Any program on any node, with `words` in front of it.
///
/// # Errors
/// If it does not start.
pub fn program(cluster: &Cluster, node: u16, words: &str, program: &[&str]) -> Result<Running> {
    let mut command = cluster.command(node, "sh");
    let script = format!("exec {words} sh -c \"$0\" sh \"$@\"");
    command.args(["-c", &script, ANNOUNCE]).args(program);
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    Ok(running)
}

/// Whether it ends well, within the time that tests have. It has ended then in any case.
pub fn ends_well(mut child: Child) -> bool {
    let ended = until("it ends", PATIENCE, || matches!(child.try_wait(), Ok(Some(_))));
    let _over = child.kill();
    ended.is_ok() && child.wait().is_ok_and(|status| status.success())
}

/// A cluster whose nodes have heard of each other.
///
/// # Errors
/// If the lab does not come up.
pub fn known(name: &str, nodes: u16) -> Result<Cluster> {
    acquainted(Cluster::with_nodes(name, nodes)?, nodes)
}

/// The same with nodes of so many bytes of memory.
///
/// # Errors
/// If the lab does not come up.
pub fn tight(name: &str, nodes: u16, memory: u64) -> Result<Cluster> {
    acquainted(Cluster::with_memory(name, nodes, memory)?, nodes)
}

fn acquainted(cluster: Cluster, nodes: u16) -> Result<Cluster> {
    let end = Instant::now() + PATIENCE;
    for (one, other) in (1..=nodes).flat_map(|one| (1..=nodes).map(move |other| (one, other))) {
        while cluster.run(one, &["mosctl", "getload", &other.to_string()]).is_err() {
            assert!(Instant::now() < end, "node {one} hears nothing of {other}\n{}", cluster.scene(0));
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    Ok(cluster)
}

/// How many of these run where, and the most moves that one of them has made.
pub fn places(cluster: &Cluster, jobs: &[Running]) -> (BTreeMap<u16, usize>, u32) {
    let rows = cluster.processes(1).unwrap_or_default();
    // Before they are awk they are a shell, and home for as long as their exec takes.
    let mine =
        |row: &&ProcessRow| row.command.starts_with("awk") && jobs.iter().any(|job| job.pid == row.pid.0);
    let mut places = BTreeMap::new();
    for row in rows.iter().filter(mine) {
        *places.entry(row.r#where.map_or(1, |node| node.0)).or_default() += 1;
    }
    // Those that have never left are not told of.
    let at_home = jobs.len() - places.values().sum::<usize>();
    if at_home > 0 {
        *places.entry(1).or_default() += at_home;
    }
    (places, rows.iter().filter(mine).map(|row| row.migrations).max().unwrap_or(0))
}

/// Waits until the places are so; `what` says what is wrong if they never are.
pub fn await_places(
    cluster: &Cluster,
    jobs: &[Running],
    what: &str,
    holds: impl Fn(&BTreeMap<u16, usize>) -> bool,
) {
    let end = Instant::now() + PATIENCE;
    loop {
        let (places, _) = places(cluster, jobs);
        if holds(&places) {
            return;
        }
        assert!(Instant::now() < end, "{what}: {places:?}\n{}", cluster.scene(0));
        // Each look is work that the node is measured by.
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Ends them: wherever they are, their signals find them.
///
/// # Errors
/// If one does not end within the patience.
pub fn finish(cluster: &Cluster, jobs: Vec<Running>) -> Result<()> {
    for mut job in jobs {
        cluster.run(1, &["kill", &job.pid.to_string()])?;
        let outcome = job.finish(PATIENCE)?;
        assert_eq!(outcome.status, 128 + 15, "{}", cluster.scene(job.pid));
    }
    Ok(())
}
