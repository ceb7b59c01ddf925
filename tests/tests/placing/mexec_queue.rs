//! Queued commands: none waits for ever, and none for a resource that only others need.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection;
use tern_tests::cluster::jobs::{EVENT_TIMEOUT, exits_successfully};

fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    fault_injection::wait_until(what, EVENT_TIMEOUT, holds).expect("timed out");
}

fn mexec(cluster: &Cluster, words: &[&str]) -> Child {
    cluster.command(1, "mexec").args(words).stdin(Stdio::null()).spawn().unwrap()
}

/// Occupies all of node 2's slots.
fn fill(cluster: &Cluster) -> [Child; 2] {
    let full = [(); 2].map(|()| mexec(cluster, &["-n", "2", "sleep", "1009"]));
    wait_until("node 2 is full", || cluster.count(2, "^sleep 1009") == 2);
    full
}

/// Number of queued commands of node 1, according to `mps -x`.
fn waiting(cluster: &Cluster) -> usize {
    let said = cluster.run(1, &["mps", "-x"]).unwrap();
    String::from_utf8_lossy(&said).matches("queued").count()
}

/// Other load at home may last for weeks: if no other node is open, commands run at home
/// nevertheless, and queued commands are started on a node that opens.
#[test]
fn commands_run_on_a_busy_home_and_on_a_node_that_opens() {
    let cluster = Cluster::with_nodes("mexecbusy", 2).unwrap();
    cluster.run(2, &["mosctl", "block"]).unwrap();
    let mut busy: Vec<_> = (0..3)
        .map(|_| cluster.command(1, "sh").args(["-c", "while :; do :; done"]).spawn().unwrap())
        .collect();
    // On a node of the standard speed each thread is a load of 100.
    let of_home = |what: &str| {
        let said = cluster.run(1, &["cat", &format!("/run/mosix/nodes/1/{what}")]).unwrap();
        String::from_utf8_lossy(&said).trim().parse::<f32>().unwrap()
    };
    wait_until("home is seen to be busy", || of_home("load") * of_home("speed") > 2.4e6);
    let sleep = || mexec(&cluster, &["sleep", "1008"]);
    let mut placed = [sleep(), sleep(), sleep()];
    wait_until("two run at home", || cluster.count(1, "^sleep 1008") == 2);
    cluster.run(2, &["mosctl", "noblock"]).unwrap();
    wait_until("the third runs on the other node", || cluster.count(2, "^sleep 1008") == 1);
    assert_eq!(cluster.count(1, "^sleep 1008"), 2);
    for node in 1..=2 {
        cluster.run(node, &["pkill", "-f", "^sleep 1008"]).unwrap();
    }
    placed.iter_mut().for_each(|one| drop(one.wait()));
    cluster.run(1, &["pkill", "-f", "while :; do"]).unwrap();
    busy.iter_mut().for_each(|one| drop(one.wait()));
}

/// A user's commands queued for a full node do not use up the user's placement searches: its other
/// commands do not wait for them.
#[test]
fn queue_for_a_named_node_does_not_block_others() {
    let cluster = Cluster::with_nodes("mexecgate", 2).unwrap();
    let mut full = fill(&cluster);
    let mut queued: Vec<_> = (0..10).map(|_| mexec(&cluster, &["-n", "2", "true"])).collect();
    wait_until("they wait", || waiting(&cluster) == 10);
    assert!(exits_successfully(mexec(&cluster, &["-n", "1", "true"])), "a command for node 1 waits");
    assert!(exits_successfully(mexec(&cluster, &["true"])), "a command for any node waits");
    full.iter_mut().for_each(|one| one.kill().unwrap());
    assert!(queued.drain(..).all(exits_successfully));
    full.iter_mut().for_each(|one| drop(one.wait()));
}

#[test]
fn queued_command_survives_executor_restart() {
    let cluster = Cluster::with_nodes("mexecanew", 2).unwrap();
    let mut full = fill(&cluster);
    // The executor is killed only after mexec has reported that node 2 is full. Before that, the
    // command may already have been sent there, and would be lost with the executor.
    let mut queued = cluster.command(1, "script");
    let queued = queued.args(["-qec", "exec mexec -n 2 true", "/dev/null"]).env("SHELL", "/bin/sh");
    let mut queued = queued.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut terminal = BufReader::new(queued.stdout.take().unwrap());
    let mut said = String::new();
    while !said.contains("node 2 is full") {
        assert_ne!(terminal.read_line(&mut said).unwrap(), 0, "it does not wait: {said}");
    }
    cluster.run(2, &["pkill", "-KILL", "-f", "tern-exec.* serve"]).unwrap();
    assert!(exits_successfully(queued), "it does not run");
    full.iter_mut().for_each(|one| drop(one.wait()));
}
