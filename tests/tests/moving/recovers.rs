//! Nodes, links and daemons of a cluster that balances fail and come back: it goes on with what is left, and takes up
//! again what returns. No process runs twice, and none is lost that was not where the failure was.

use anyhow::Result;
use std::time::{Duration, Instant};
use tern_lab::Cable;
use tern_tests::breaking::{LOST, nothing_left, pids, set_patience, until};
use tern_tests::cluster::Cluster;
use tern_tests::jobs::{PATIENCE, await_places, finish, job, known};
use tern_tests::running::Running;

/// Waits until one node takes another for up, or not.
fn await_seen(cluster: &Cluster, by: u16, node: u16, up: bool) -> Result<()> {
    let what = format!("node {by} takes {node} for {}", if up { "up" } else { "down" });
    let so = || {
        let end = cluster.tool(by, "mosctl").args(["isup", &node.to_string()]).output();
        end.is_ok_and(|end| end.status.success() == up)
    };
    until(&what, PATIENCE, so).map(drop)
}

/// How many processes of this kind compute on the nodes: guests, and those that are at home. A deputy computes nothing.
fn computing(cluster: &Cluster, nodes: u16) -> usize {
    let count = |node| {
        let table = cluster.run(node, &["ps", "-e", "-o", "stat=,args="]).unwrap_or_default();
        let table = String::from_utf8_lossy(&table).into_owned();
        table.lines().filter(|line| line.starts_with('R') && line.contains("awk BEGIN")).count()
    };
    (1..=nodes).map(count).sum()
}

/// Whether none of so many runs in two places. The nodes are looked at one after the other: who moves meanwhile may be seen on both.
fn none_is_double(cluster: &Cluster, jobs: usize) -> bool {
    (0..3).any(|_| computing(cluster, 3) <= jobs)
}

/// Five jobs, more than each of three nodes wants alone, when all nodes have some.
fn spread(cluster: &Cluster) -> Result<Vec<Running>> {
    let jobs = (0..5).map(|_| job(cluster, "mosrun")).collect::<Result<Vec<_>>>()?;
    await_places(cluster, &jobs, "they do not spread", |places| {
        [1, 2, 3].iter().all(|n| places.contains_key(n))
    });
    Ok(jobs)
}

#[test]
fn what_ran_elsewhere_survives_the_death_of_a_node() {
    let cluster = known("died", 3).unwrap();
    set_patience(&cluster, 2, 8).unwrap();
    let jobs = spread(&cluster).unwrap();
    cluster.lab().kill(3).unwrap();
    // Home remembers who was there; before, one more might have come or left.
    let on_three: Vec<i32> = {
        let rows = cluster.processes(1).unwrap();
        rows.iter().filter(|row| row.r#where.is_some_and(|node| node.0 == 3)).map(|row| row.pid.0).collect()
    };
    for node in [1, 2] {
        await_seen(&cluster, node, 3, false).unwrap();
    }
    let (mut lost, rest): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| on_three.contains(&job.pid));
    assert!(!lost.is_empty());
    for job in &mut lost {
        assert_eq!(job.finish(PATIENCE).unwrap().status, LOST, "{}", cluster.scene(job.pid));
    }
    await_places(&cluster, &rest, "it is sent to the dead", |places| !places.contains_key(&3));
    // Back again, it gets work again.
    cluster.lab().restart(3).unwrap();
    for node in [1, 2] {
        await_seen(&cluster, node, 3, true).unwrap();
    }
    let more: Vec<_> = (0..3).map(|_| job(&cluster, "mosrun").unwrap()).collect();
    let all: Vec<_> = rest.into_iter().chain(more).collect();
    await_places(&cluster, &all, "nobody goes to who is back", |places| places.contains_key(&3));
    finish(&cluster, all).unwrap();
    nothing_left(&cluster, &[1, 2, 3], PATIENCE).unwrap();
}

#[test]
fn a_daemon_that_stands_still_loses_nothing() {
    let cluster = known("paused", 3).unwrap();
    set_patience(&cluster, 2, 300).unwrap();
    let mut jobs = spread(&cluster).unwrap();
    let daemon = pids(&cluster, 2, "ternd").unwrap()[0].to_string();
    cluster.run(2, &["kill", "-STOP", &daemon]).unwrap();
    for node in [1, 3] {
        await_seen(&cluster, node, 2, false).unwrap();
    }
    // Those that are there compute on, and nobody starts them again.
    let there: Vec<_> = cluster.processes(1).unwrap();
    let there = there.iter().find(|row| row.r#where.is_some_and(|node| node.0 == 2)).unwrap();
    let used = |pid| {
        let rows = cluster.processes(1).unwrap_or_default();
        rows.iter().find(|row| row.pid == pid).map_or(0.0, |row| row.cpu_seconds)
    };
    until("it computes", PATIENCE, || used(there.pid) > there.cpu_seconds + 0.5).unwrap();
    let settled = Instant::now();
    while settled.elapsed() < Duration::from_secs(5) {
        assert!(none_is_double(&cluster, jobs.len()), "{}", cluster.scene(0));
        std::thread::sleep(Duration::from_millis(500));
    }
    assert!(jobs.iter_mut().all(|job| !job.ended()), "{}", cluster.scene(0));
    cluster.run(2, &["kill", "-CONT", &daemon]).unwrap();
    for node in [1, 3] {
        await_seen(&cluster, node, 2, true).unwrap();
    }
    cluster.run(2, &["mosctl", "expel", "--within", "60"]).unwrap();
    await_places(&cluster, &jobs, "they do not leave", |places| !places.contains_key(&2));
    finish(&cluster, jobs).unwrap();
    nothing_left(&cluster, &[1, 2, 3], PATIENCE).unwrap();
}

#[test]
fn nodes_that_cannot_reach_each_other_leave_each_other_alone() {
    let cluster = known("apart", 3).unwrap();
    set_patience(&cluster, 2, 300).unwrap();
    for cable in [Cable::OneWay(1, 2), Cable::OneWay(2, 1), Cable::between(1, 2)] {
        let mut jobs = spread(&cluster).unwrap();
        cluster.lab().cut(cable).unwrap();
        // The third hears both of them; and who was on node 2 waits there for its home.
        await_seen(&cluster, 3, 1, true).unwrap();
        await_seen(&cluster, 3, 2, true).unwrap();
        await_places(&cluster, &jobs, "it is given up", |places| {
            places.values().sum::<usize>() == jobs.len()
        });
        let suspended = || {
            let rows = cluster.processes(1).unwrap_or_default();
            rows.iter().any(|row| row.state == "suspended" && row.r#where.is_some_and(|node| node.0 == 2))
        };
        until("it waits", PATIENCE, suspended).unwrap();
        assert!(none_is_double(&cluster, jobs.len()), "{}", cluster.scene(0));
        cluster.lab().heal(cable).unwrap();
        until("it goes on", PATIENCE, || !suspended()).unwrap();
        assert!(jobs.iter_mut().all(|job| !job.ended()), "{}", cluster.scene(0));
        finish(&cluster, jobs).unwrap();
        nothing_left(&cluster, &[1, 2, 3], PATIENCE).unwrap();
    }
}
