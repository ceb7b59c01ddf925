//! Nodes, links and daemons of a balanced cluster fail and come back. The cluster continues with
//! the rest, and uses a returned node again. No process runs twice, and none is lost that was not
//! on the failed node.

use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{
    LOST_STATUS, TestProcess, await_nothing_left, pids, set_timeouts, wait_until,
};
use tern_tests::cluster::jobs::{EVENT_TIMEOUT, await_places, connected_cluster, finish, job};
use tern_tests::runs::running::Running;

/// Waits until one node considers another as up, or as down.
fn await_considered_up(cluster: &Cluster, by: u16, node: u16, up: bool) -> Result<()> {
    let what = format!("node {by} considers node {node} {}", if up { "up" } else { "down" });
    let so = || {
        let end = cluster.tool(by, "mosctl").args(["isup", &node.to_string()]).output();
        end.is_ok_and(|end| end.status.success() == up)
    };
    wait_until(&what, EVENT_TIMEOUT, so).map(drop)
}

/// Number of these processes that compute on the nodes: guests, and processes at home. A deputy
/// computes nothing.
fn computing(cluster: &Cluster, nodes: u16) -> usize {
    let count = |node| {
        let table = cluster.run(node, &["ps", "-e", "-o", "stat=,args="]).unwrap_or_default();
        let table = String::from_utf8_lossy(&table).into_owned();
        table.lines().filter(|line| line.starts_with('R') && line.contains("awk BEGIN")).count()
    };
    (1..=nodes).map(count).sum()
}

/// Whether no job runs in two places. Nodes are examined one after the other, so a process that
/// moves meanwhile may be seen twice; hence three attempts.
fn none_runs_twice(cluster: &Cluster, jobs: usize) -> bool {
    (0..3).any(|_| computing(cluster, 3) <= jobs)
}

/// Starts five jobs, more than one node would keep alone, and waits until all nodes have some.
fn spread(cluster: &Cluster) -> Result<Vec<Running>> {
    let jobs = (0..5).map(|_| job(cluster, "mosrun")).collect::<Result<Vec<_>>>()?;
    await_places(cluster, &jobs, "the jobs do not spread", |places| {
        [1, 2, 3].iter().all(|n| places.contains_key(n))
    });
    Ok(jobs)
}

#[test]
fn processes_elsewhere_survive_node_death() {
    let cluster = connected_cluster("died", 3).unwrap();
    set_timeouts(&cluster, 2, 8).unwrap();
    let jobs = spread(&cluster).unwrap();
    cluster.lab().kill(3).unwrap();
    // Read after the kill: before, a job could still have come or left.
    let on_three: Vec<i32> = {
        let rows = cluster.processes(1).unwrap();
        rows.iter().filter(|row| row.r#where.is_some_and(|node| node.0 == 3)).map(|row| row.pid.0).collect()
    };
    for node in [1, 2] {
        await_considered_up(&cluster, node, 3, false).unwrap();
    }
    let (mut lost, rest): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| on_three.contains(&job.pid));
    assert!(!lost.is_empty());
    for job in &mut lost {
        assert_eq!(
            job.finish(EVENT_TIMEOUT).unwrap().status,
            LOST_STATUS,
            "{}",
            cluster.diagnostics(job.pid)
        );
    }
    await_places(&cluster, &rest, "a job is sent to the dead node", |places| !places.contains_key(&3));
    // After its return the node gets work again.
    cluster.lab().restart(3).unwrap();
    for node in [1, 2] {
        await_considered_up(&cluster, node, 3, true).unwrap();
    }
    let more: Vec<_> = (0..3).map(|_| job(&cluster, "mosrun").unwrap()).collect();
    let all: Vec<_> = rest.into_iter().chain(more).collect();
    await_places(&cluster, &all, "no job goes to the returned node", |places| places.contains_key(&3));
    finish(&cluster, all).unwrap();
    await_nothing_left(&cluster, &[1, 2, 3], EVENT_TIMEOUT).unwrap();
}

#[test]
fn paused_daemon_loses_nothing() {
    let cluster = connected_cluster("paused", 3).unwrap();
    cluster.expect_blocked_loops();
    set_timeouts(&cluster, 2, 300).unwrap();
    let mut jobs = spread(&cluster).unwrap();
    let daemon = pids(&cluster, 2, "ternd").unwrap()[0].to_string();
    cluster.run(2, &["kill", "-STOP", &daemon]).unwrap();
    for node in [1, 3] {
        await_considered_up(&cluster, node, 2, false).unwrap();
    }
    // The guests there continue to compute, and are not started elsewhere.
    let there: Vec<_> = cluster.processes(1).unwrap();
    let there = there.iter().find(|row| row.r#where.is_some_and(|node| node.0 == 2)).unwrap();
    let used = |pid| {
        let rows = cluster.processes(1).unwrap_or_default();
        rows.iter().find(|row| row.pid == pid).map_or(0.0, |row| row.cpu_seconds)
    };
    wait_until("it computes", EVENT_TIMEOUT, || used(there.pid) > there.cpu_seconds + 0.5).unwrap();
    let settled = Instant::now();
    while settled.elapsed() < Duration::from_secs(5) {
        assert!(none_runs_twice(&cluster, jobs.len()), "{}", cluster.diagnostics(0));
        std::thread::sleep(Duration::from_millis(500));
    }
    assert!(jobs.iter_mut().all(|job| !job.has_ended()), "{}", cluster.diagnostics(0));
    cluster.run(2, &["kill", "-CONT", &daemon]).unwrap();
    for node in [1, 3] {
        await_considered_up(&cluster, node, 2, true).unwrap();
    }
    cluster.run(2, &["mosctl", "expel", "--within", "60"]).unwrap();
    await_places(&cluster, &jobs, "the jobs do not leave", |places| !places.contains_key(&2));
    finish(&cluster, jobs).unwrap();
    await_nothing_left(&cluster, &[1, 2, 3], EVENT_TIMEOUT).unwrap();
}

#[test]
fn partitioned_nodes_lose_no_guests() {
    let cluster = connected_cluster("apart", 3).unwrap();
    set_timeouts(&cluster, 2, 300).unwrap();
    for cable in [Cable::OneWay(1, 2), Cable::OneWay(2, 1), Cable::between(1, 2)] {
        let mut jobs = spread(&cluster).unwrap();
        cluster.lab().cut(cable).unwrap();
        // Node 3 reaches both; the guest on node 2 waits there for its home.
        await_considered_up(&cluster, 3, 1, true).unwrap();
        await_considered_up(&cluster, 3, 2, true).unwrap();
        await_places(&cluster, &jobs, "a job is lost", |places| places.values().sum::<usize>() == jobs.len());
        let suspended = || {
            let rows = cluster.processes(1).unwrap_or_default();
            rows.iter().any(|row| row.state == "suspended" && row.r#where.is_some_and(|node| node.0 == 2))
        };
        wait_until("it waits", EVENT_TIMEOUT, suspended).unwrap();
        assert!(none_runs_twice(&cluster, jobs.len()), "{}", cluster.diagnostics(0));
        cluster.lab().heal(cable).unwrap();
        wait_until("it goes on", EVENT_TIMEOUT, || !suspended()).unwrap();
        assert!(jobs.iter_mut().all(|job| !job.has_ended()), "{}", cluster.diagnostics(0));
        finish(&cluster, jobs).unwrap();
        await_nothing_left(&cluster, &[1, 2, 3], EVENT_TIMEOUT).unwrap();
    }
}

/// While home cannot reach a program's node, the program is not moved. When the link is back, it
/// can be moved.
#[test]
fn suspended_program_is_refused_at_once_and_moves_later() -> Result<()> {
    let cluster = Cluster::with_nodes("suspended", 3)?;
    set_timeouts(&cluster, 2, 300)?;
    let mut process = TestProcess::start(&cluster, "arith")?;
    process.migrate("2")?;
    cluster.lab().cut(Cable::between(1, 2))?;
    let is_suspended =
        || cluster.processes(1).is_ok_and(|rows| rows.iter().any(|row| row.state == "suspended"));
    wait_until("it is suspended", EVENT_TIMEOUT, is_suspended)?;
    for to in ["3", "home"] {
        let refused = cluster.migrate(process.pid(), to).err().context("it was moved")?;
        ensure!(refused.code == 4 && refused.message.contains("suspended"), "to {to}: {refused:?}");
    }
    cluster.lab().heal(Cable::between(1, 2))?;
    wait_until("it moves on", EVENT_TIMEOUT, || process.migrate("3").is_ok())?;
    process.finish_correctly(EVENT_TIMEOUT)?;
    await_nothing_left(&cluster, &[1, 2, 3], EVENT_TIMEOUT)
}

/// A stopped shim, on either side, is slow and not dead: its machine still acknowledges data that
/// is sent to it. Nothing is lost, though the shim is stopped for twice as long as a link may be
/// cut.
#[test]
fn stopped_shim_is_not_dead() -> Result<()> {
    const SUSPEND_AFTER: u32 = 1;
    const GIVE_UP_AFTER: u32 = 3;
    let cluster = Cluster::without_quotas("stopped-shim", 2)?;
    cluster.expect_blocked_loops();
    set_timeouts(&cluster, SUSPEND_AFTER, GIVE_UP_AFTER)?;
    let mut process = TestProcess::start(&cluster, "file")?;
    process.migrate("2")?;
    for node in [1, 2] {
        let shims: Vec<String> = pids(&cluster, node, "tern-shim")?.iter().map(i32::to_string).collect();
        ensure!(!shims.is_empty(), "node {node} has no shim");
        let signal = |name: &str| {
            let words: Vec<&str> =
                ["kill", name].into_iter().chain(shims.iter().map(String::as_str)).collect();
            cluster.run(node, &words).map(drop)
        };
        signal("-STOP")?;
        std::thread::sleep(2 * Duration::from_secs(u64::from(SUSPEND_AFTER + GIVE_UP_AFTER)));
        signal("-CONT")?;
        ensure!(!process.has_ended(), "it is lost: {}", process.output_so_far());
    }
    process.migrate("home")?;
    process.finish_correctly(EVENT_TIMEOUT)
}
