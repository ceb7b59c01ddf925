//! Guests are in a control group of their own on their node, which is removed with the last of
//! them.

use std::time::{Duration, Instant};
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::wait_until;
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::running::{ANNOUNCE, Running};

/// The output of a shell command on node 2, trimmed.
fn on_2(cluster: &Cluster, script: &str) -> String {
    let said = cluster.run(2, &["sh", "-c", script]).unwrap_or_default();
    String::from_utf8_lossy(&said).trim().to_owned()
}

#[test]
fn guests_share_a_control_group_that_is_removed_with_them() {
    let cluster = Cluster::with_nodes("grouped", 2).unwrap();
    let program = named("registers", Flavour::Static).unwrap();
    let start = |until: &str| {
        let mut command = cluster.command(1, "sh");
        command
            .args(["-c", ANNOUNCE, "sh"])
            .arg(&program)
            .env("TERN_SECONDS", "0.1")
            .env("TERN_UNTIL", until);
        let mut running = Running::start(&mut command, false).unwrap();
        running.close_input();
        running
    };
    let (first, second) = (start("/tmp/first"), start("/tmp/second"));
    // Other labs on this machine have groups of their own.
    let groups = &format!("find /sys/fs/cgroup -path '*/{}/node2/tern/guests' -type d", cluster.lab().name());
    assert_eq!(on_2(&cluster, groups), "", "there is a group without guests");
    for running in [&first, &second] {
        cluster.migrate(running.pid, "2").unwrap();
    }
    let made = on_2(&cluster, groups);
    let places: Vec<&str> = made.lines().collect();
    assert!(!places.is_empty(), "no control group, though the lab needs them");
    let members = |place: &str| {
        let pids = on_2(&cluster, &format!("cat {place}/cgroup.procs"));
        let title = |pid: &str| on_2(&cluster, &format!("tr '\\0' ' ' </proc/{pid}/cmdline"));
        pids.lines().map(title).filter(|title| title.starts_with("tern:1/")).count()
    };
    for place in &places {
        assert_eq!(members(place), 2, "{place}");
    }
    // A guest that goes home leaves the group, which stays while another guest is in it.
    cluster.migrate(first.pid, "home").unwrap();
    // The guest process ends only when home has confirmed the arrival.
    for place in &places {
        wait_until("it leaves", Duration::from_secs(20), || members(place) == 1).unwrap();
    }
    cluster.migrate(second.pid, "home").unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while !on_2(&cluster, groups).is_empty() {
        assert!(Instant::now() < end, "left behind:\n{}\n{}", on_2(&cluster, groups), cluster.diagnostics(0));
    }
    for (mut running, until) in [(first, "/tmp/first"), (second, "/tmp/second")] {
        cluster.touch(until).unwrap();
        let outcome = running.finish(Duration::from_secs(30)).unwrap();
        assert_eq!(outcome.status, 0);
    }
}
