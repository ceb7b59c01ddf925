//! Compute-bound jobs on clusters with load balancing.

use crate::cluster::Cluster;
use crate::cluster::fault_injection::wait_until;
use crate::runs::running::{ANNOUNCE, Running};
use anyhow::Result;
use std::collections::BTreeMap;
use std::process::Child;
use std::time::{Duration, Instant};
use tern_control::ProcessRow;

/// Timeout for anything that a busy machine may delay.
pub const EVENT_TIMEOUT: Duration = Duration::from_secs(90);

/// Starts a compute-bound program on node 1 that runs until it is killed, with `words` in front of
/// its command.
///
/// # Errors
/// If it does not start.
pub fn job(cluster: &Cluster, words: &str) -> Result<Running> {
    job_on(cluster, 1, words)
}

/// As `job`, on another node.
///
/// # Errors
/// If it does not start.
pub fn job_on(cluster: &Cluster, node: u16, words: &str) -> Result<Running> {
    program(cluster, node, words, &["awk", "BEGIN { while (1) i++ }"])
}

/// Starts any program on any node, with `words` in front of its command.
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

/// Whether a child exits successfully within the timeout. It is killed otherwise.
pub fn exits_successfully(mut child: Child) -> bool {
    let ended = wait_until("it ends", EVENT_TIMEOUT, || matches!(child.try_wait(), Ok(Some(_))));
    let _over = child.kill();
    ended.is_ok() && child.wait().is_ok_and(|status| status.success())
}

/// A cluster whose nodes have all received each other's load.
///
/// # Errors
/// If the lab does not come up.
pub fn connected_cluster(name: &str, nodes: u16) -> Result<Cluster> {
    await_gossip(Cluster::with_nodes(name, nodes)?, nodes)
}

/// As `connected_cluster`, with this many bytes of memory in each node.
///
/// # Errors
/// If the lab does not come up.
pub fn connected_cluster_with_memory(name: &str, nodes: u16, memory: u64) -> Result<Cluster> {
    await_gossip(Cluster::with_memory(name, nodes, memory)?, nodes)
}

fn await_gossip(cluster: Cluster, nodes: u16) -> Result<Cluster> {
    let end = Instant::now() + EVENT_TIMEOUT;
    for (one, other) in (1..=nodes).flat_map(|one| (1..=nodes).map(move |other| (one, other))) {
        while cluster.run(one, &["mosctl", "getload", &other.to_string()]).is_err() {
            assert!(
                Instant::now() < end,
                "node {one} receives nothing from node {other}\n{}",
                cluster.diagnostics(0)
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    Ok(cluster)
}

/// How many of the jobs run on each node, and the largest number of moves of one job.
pub fn places(cluster: &Cluster, jobs: &[Running]) -> (BTreeMap<u16, usize>, u32) {
    let rows = cluster.processes(1).unwrap_or_default();
    // Before the exec of awk a job is a shell, and it stays home until the exec has finished.
    let mine =
        |row: &&ProcessRow| row.command.starts_with("awk") && jobs.iter().any(|job| job.pid == row.pid.0);
    let mut places = BTreeMap::new();
    for row in rows.iter().filter(mine) {
        *places.entry(row.r#where.map_or(1, |node| node.0)).or_default() += 1;
    }
    // mps does not list jobs that have never left home.
    let at_home = jobs.len() - places.values().sum::<usize>();
    if at_home > 0 {
        *places.entry(1).or_default() += at_home;
    }
    (places, rows.iter().filter(mine).map(|row| row.migrations).max().unwrap_or(0))
}

/// Waits until `holds` accepts the places; fails with `what` if it never does.
pub fn await_places(
    cluster: &Cluster,
    jobs: &[Running],
    what: &str,
    holds: impl Fn(&BTreeMap<u16, usize>) -> bool,
) {
    let end = Instant::now() + EVENT_TIMEOUT;
    loop {
        let (places, _) = places(cluster, jobs);
        if holds(&places) {
            return;
        }
        assert!(Instant::now() < end, "{what}: {places:?}\n{}", cluster.diagnostics(0));
        // Each mps adds to the load that the balancer measures.
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Ends the jobs, wherever they run, by a signal to their home.
///
/// # Errors
/// If one does not end within the timeout.
pub fn finish(cluster: &Cluster, jobs: Vec<Running>) -> Result<()> {
    for mut job in jobs {
        cluster.run(1, &["kill", &job.pid.to_string()])?;
        let outcome = job.finish(EVENT_TIMEOUT)?;
        assert_eq!(outcome.status, 128 + 15, "{}", cluster.diagnostics(job.pid));
    }
    Ok(())
}
