//! Commands that wait for room: nobody for ever, and nobody for what another waits for.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

use std::process::{Child, Stdio};
use tern_tests::breaking;
use tern_tests::cluster::Cluster;
use tern_tests::jobs::{PATIENCE, ends_well};

fn until(what: &str, holds: impl FnMut() -> bool) {
    breaking::until(what, PATIENCE, holds).expect("it takes too long");
}

fn mexec(cluster: &Cluster, words: &[&str]) -> Child {
    cluster.command(1, "mexec").args(words).stdin(Stdio::null()).spawn().unwrap()
}

/// Takes all room that node 2 has.
fn fill(cluster: &Cluster) -> [Child; 2] {
    let full = [(); 2].map(|()| mexec(cluster, &["-n", "2", "sleep", "1009"]));
    until("node 2 is full", || cluster.count(2, "^sleep 1009") == 2);
    full
}

/// How many wait on node 1, as `mps -x` has it.
fn waiting(cluster: &Cluster) -> usize {
    let said = cluster.run(1, &["mps", "-x"]).unwrap();
    String::from_utf8_lossy(&said).matches("queued").count()
}

/// What else home does may go on for weeks: where no other node is open nobody waits for that, and who waits hears of a node that is.
#[test]
fn a_busy_home_is_enough_and_a_node_that_opens_is_seen() {
    let cluster = Cluster::with_nodes("mexecbusy", 2).unwrap();
    cluster.run(2, &["mosctl", "block"]).unwrap();
    let mut busy: Vec<_> = (0..3)
        .map(|_| cluster.command(1, "sh").args(["-c", "while :; do :; done"]).spawn().unwrap())
        .collect();
    // Of a node of the standard speed each thread is a load of 100.
    let of_home = |what: &str| {
        let said = cluster.run(1, &["cat", &format!("/run/mosix/nodes/1/{what}")]).unwrap();
        String::from_utf8_lossy(&said).trim().parse::<f32>().unwrap()
    };
    until("home is seen to be busy", || of_home("load") * of_home("speed") > 2.4e6);
    let sleep = || mexec(&cluster, &["sleep", "1008"]);
    let mut placed = [sleep(), sleep(), sleep()];
    until("there is room for two at home", || cluster.count(1, "^sleep 1008") == 2);
    cluster.run(2, &["mosctl", "noblock"]).unwrap();
    until("and for the third on the other node", || cluster.count(2, "^sleep 1008") == 1);
    assert_eq!(cluster.count(1, "^sleep 1008"), 2);
    for node in 1..=2 {
        cluster.run(node, &["pkill", "-f", "^sleep 1008"]).unwrap();
    }
    placed.iter_mut().for_each(|one| drop(one.wait()));
    cluster.run(1, &["pkill", "-f", "while :; do"]).unwrap();
    busy.iter_mut().for_each(|one| drop(one.wait()));
}

/// Enough of one user's wait for a node that none of them waits at the gate: what he wants elsewhere does not wait for these.
#[test]
fn who_waits_for_a_named_node_keeps_nobody_from_others() {
    let cluster = Cluster::with_nodes("mexecgate", 2).unwrap();
    let mut full = fill(&cluster);
    let mut late: Vec<_> = (0..10).map(|_| mexec(&cluster, &["-n", "2", "true"])).collect();
    until("they wait", || waiting(&cluster) == 10);
    assert!(ends_well(mexec(&cluster, &["-n", "1", "true"])), "what is to run here waits");
    assert!(ends_well(mexec(&cluster, &["true"])), "what may run anywhere waits");
    full.iter_mut().for_each(|one| one.kill().unwrap());
    assert!(late.drain(..).all(ends_well));
    full.iter_mut().for_each(|one| drop(one.wait()));
}

#[test]
fn who_waits_for_a_node_whose_server_begins_anew_has_room_there() {
    let cluster = Cluster::with_nodes("mexecanew", 2).unwrap();
    let mut full = fill(&cluster);
    let late = mexec(&cluster, &["-n", "2", "true"]);
    until("it waits", || waiting(&cluster) == 1);
    cluster.run(2, &["pkill", "-KILL", "-f", "tern-exec.* serve"]).unwrap();
    assert!(ends_well(late), "it does not run");
    full.iter_mut().for_each(|one| drop(one.wait()));
}
