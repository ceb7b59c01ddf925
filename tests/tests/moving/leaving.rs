//! How ternd ends: with the node when it is told to leave the cluster, and alone when it is to be started again.

use anyhow::Result;
use std::collections::BTreeMap;
use std::time::Duration;
use tern_lab::Cable;
use tern_tests::breaking::{
    LOST, await_up, configure, leftovers, nothing_left, pids, set_patience, start_daemon, until,
};
use tern_tests::cluster::Cluster;
use tern_tests::jobs::{PATIENCE, await_places, finish, job, known, places};

/// Longer than a shim takes to end, and shorter than anybody's patience.
const SOON: Duration = Duration::from_secs(20);

/// Sends a signal to a node's daemon, and waits until that has ended.
fn end_daemon(cluster: &Cluster, node: u16, signal: &str) -> Result<()> {
    cluster.run(node, &["pkill", signal, "-x", "ternd"])?;
    let ended = || pids(cluster, node, "ternd").is_ok_and(|pids| pids.is_empty());
    until("ternd has ended", PATIENCE, ended).map(drop)
}

#[test]
fn a_node_that_is_stopped_is_empty_and_nothing_is_lost() {
    let cluster = known("stopped", 3).unwrap();
    let jobs: Vec<_> = ["2", "2", "3"].map(|node| job(&cluster, &format!("runon {node}")).unwrap()).into();
    let wanted = BTreeMap::from([(2, 2), (3, 1)]);
    await_places(&cluster, &jobs, "they do not leave", |places| *places == wanted);
    end_daemon(&cluster, 2, "-TERM").unwrap();
    // Its last shim may still be about to end.
    nothing_left(&cluster, &[2], SOON).unwrap();
    let (left, _) = places(&cluster, &jobs);
    assert!(!left.contains_key(&2) && left.values().sum::<usize>() == 3, "{left:?}");
    // The settings of its end are not those of its next start.
    start_daemon(&cluster, 2, &[]).unwrap();
    await_up(&cluster, 2).unwrap();
    cluster.migrate(jobs[0].pid, "2").unwrap();
    // Home itself stops: those that are away come, and go on.
    end_daemon(&cluster, 1, "-TERM").unwrap();
    nothing_left(&cluster, &[2, 3], SOON).unwrap();
    start_daemon(&cluster, 1, &[]).unwrap();
    finish(&cluster, jobs).unwrap();
}

#[test]
fn a_daemon_that_is_restarted_moves_nothing() {
    let cluster = known("restarted", 2).unwrap();
    let jobs = vec![job(&cluster, "runon 2").unwrap()];
    let wanted = BTreeMap::from([(2, 1)]);
    await_places(&cluster, &jobs, "it does not leave", |places| *places == wanted);
    let (_, moves) = places(&cluster, &jobs);
    for node in [2, 1] {
        end_daemon(&cluster, node, "-INT").unwrap();
        start_daemon(&cluster, node, &[]).unwrap();
    }
    assert_eq!(places(&cluster, &jobs), (wanted, moves));
    finish(&cluster, jobs).unwrap();
}

#[test]
fn a_guest_with_nowhere_to_go_is_ended_in_time() {
    let cluster = known("nowhere", 2).unwrap();
    // Longer than the test: what ends the guest is its node.
    set_patience(&cluster, 1, 300).unwrap();
    configure(&cluster, 2, "stop_within = 2").unwrap();
    let mut jobs = vec![job(&cluster, "runon 2").unwrap()];
    await_places(&cluster, &jobs, "it does not leave", |places| places.contains_key(&2));
    cluster.lab().cut(Cable::Node(2)).unwrap();
    end_daemon(&cluster, 2, "-TERM").unwrap();
    let gone = || leftovers(&cluster, 2).is_ok_and(|left| left.is_empty());
    until("the guest and its shim are gone", Duration::from_secs(20), gone).unwrap();
    cluster.lab().heal_all().unwrap();
    // Only a daemon can say that a shim is gone for good.
    start_daemon(&cluster, 2, &[]).unwrap();
    let lost = &mut jobs[0];
    let end = lost.finish(PATIENCE).unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.scene(lost.pid)));
    assert_eq!(end.status, LOST);
}
