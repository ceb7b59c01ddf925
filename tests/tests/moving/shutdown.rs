//! Shutdown of ternd: together with its node, which leaves the cluster; and of ternd alone, for a
//! restart.

use anyhow::Result;
use std::collections::BTreeMap;
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{
    LOST_STATUS, await_nothing_left, await_up, configure, leftovers, pids, set_timeouts, start_daemon,
    wait_until,
};
use tern_tests::cluster::jobs::{EVENT_TIMEOUT, await_places, connected_cluster, finish, job, places};

/// Longer than a shim takes to end, and shorter than any configured timeout.
const SHIM_END_TIMEOUT: Duration = Duration::from_secs(20);

/// Sends a signal to a node's daemon, and waits until the daemon has ended.
fn end_daemon(cluster: &Cluster, node: u16, signal: &str) -> Result<()> {
    cluster.run(node, &["pkill", signal, "-x", "ternd"])?;
    let ended = || pids(cluster, node, "ternd").is_ok_and(|pids| pids.is_empty());
    wait_until("ternd has ended", EVENT_TIMEOUT, ended).map(drop)
}

#[test]
fn stopped_node_is_empty_and_nothing_is_lost() {
    let cluster = connected_cluster("stopped", 3).unwrap();
    let jobs: Vec<_> = ["2", "2", "3"].map(|node| job(&cluster, &format!("runon {node}")).unwrap()).into();
    let wanted = BTreeMap::from([(2, 2), (3, 1)]);
    await_places(&cluster, &jobs, "the jobs do not leave", |places| *places == wanted);
    end_daemon(&cluster, 2, "-TERM").unwrap();
    // The last shim may still be exiting.
    await_nothing_left(&cluster, &[2], SHIM_END_TIMEOUT).unwrap();
    let (left, _) = places(&cluster, &jobs);
    assert!(!left.contains_key(&2) && left.values().sum::<usize>() == 3, "{left:?}");
    // A restarted daemon has its normal settings, not those of its shutdown.
    start_daemon(&cluster, 2, &[]).unwrap();
    await_up(&cluster, 2).unwrap();
    cluster.migrate(jobs[0].pid, "2").unwrap();
    // The home node stops: its processes that are away come home, and continue.
    end_daemon(&cluster, 1, "-TERM").unwrap();
    await_nothing_left(&cluster, &[2, 3], SHIM_END_TIMEOUT).unwrap();
    start_daemon(&cluster, 1, &[]).unwrap();
    finish(&cluster, jobs).unwrap();
}

#[test]
fn daemon_restart_moves_nothing() {
    let cluster = connected_cluster("restarted", 2).unwrap();
    let jobs = vec![job(&cluster, "runon 2").unwrap()];
    let wanted = BTreeMap::from([(2, 1)]);
    await_places(&cluster, &jobs, "the job does not leave", |places| *places == wanted);
    let (_, moves) = places(&cluster, &jobs);
    for node in [2, 1] {
        end_daemon(&cluster, node, "-INT").unwrap();
        start_daemon(&cluster, node, &[]).unwrap();
    }
    assert_eq!(places(&cluster, &jobs), (wanted, moves));
    finish(&cluster, jobs).unwrap();
}

#[test]
fn guest_without_destination_is_killed_at_the_deadline() {
    let cluster = connected_cluster("nowhere", 2).unwrap();
    // Longer than the test: the guest must be ended by its node.
    set_timeouts(&cluster, 1, 300).unwrap();
    configure(&cluster, 2, "stop_within = 2").unwrap();
    let mut jobs = vec![job(&cluster, "runon 2").unwrap()];
    await_places(&cluster, &jobs, "the job does not leave", |places| places.contains_key(&2));
    cluster.lab().cut(Cable::Node(2)).unwrap();
    end_daemon(&cluster, 2, "-TERM").unwrap();
    let gone = || leftovers(&cluster, 2).is_ok_and(|left| left.is_empty());
    wait_until("the guest and its shim are gone", Duration::from_secs(20), gone).unwrap();
    cluster.lab().heal_all().unwrap();
    // Only a daemon can report that a shim is gone.
    start_daemon(&cluster, 2, &[]).unwrap();
    let lost = &mut jobs[0];
    let end =
        lost.finish(EVENT_TIMEOUT).unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.diagnostics(lost.pid)));
    assert_eq!(end.status, LOST_STATUS);
}
