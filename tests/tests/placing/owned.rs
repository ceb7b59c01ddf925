//! Who owns a node comes before what others have placed on it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use tern_tests::breaking::{configure, until};
use tern_tests::cluster::Cluster;
use tern_tests::jobs::{PATIENCE, ends_well, job_on, known};

/// What a shell on a node says, without the line's end.
fn on(cluster: &Cluster, node: u16, script: &str) -> String {
    let said = cluster.run(node, &["sh", "-c", script]).unwrap_or_default();
    String::from_utf8_lossy(&said).trim().to_owned()
}

/// Has node 1 place something on node 2.
fn place(cluster: &Cluster, command: &[&str]) -> Child {
    let mut mexec = cluster.command(1, "mexec");
    mexec.args(["-n", "2", "--"]).args(command).stdin(Stdio::null()).spawn().unwrap()
}

/// Groups of node 2, one a line. Other labs on this machine have theirs.
fn groups(cluster: &Cluster) -> String {
    let find = format!("find /sys/fs/cgroup -path '*/{}/node2/tern/guests' -type d", cluster.lab().name());
    on(cluster, 2, &find)
}

/// Waits until node 2 begins no more commands, and says so; then one that waits there does not run.
fn closed(cluster: &Cluster, why: &str) -> Child {
    let says = || on(cluster, 2, "cat /run/tern/exec.log").contains(why);
    // It looks when it is asked.
    until(why, PATIENCE, || ends_soon(place(cluster, &["true"])).is_none() && says())
        .unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.scene(0)));
    let mut waits = place(cluster, &["true"]);
    std::thread::sleep(Duration::from_secs(3));
    assert!(waits.try_wait().unwrap().is_none(), "it did not wait");
    waits
}

/// How it has ended, if it has within a second; else it is ended.
fn ends_soon(mut child: Child) -> Option<bool> {
    let soon = Duration::from_secs(1);
    let ended = until("it ends", soon, || child.try_wait().unwrap().is_some()).is_ok();
    let _over = child.kill();
    let status = child.wait().unwrap();
    ended.then(|| status.success())
}

#[test]
fn the_owner_of_a_node_comes_before_what_is_placed_there() {
    let cluster = known("placedowned", 2).unwrap();
    configure(&cluster, 2, "owner_share = 50\nguest_cpus = 0.1").unwrap();
    let mut spins = place(&cluster, &["awk", "BEGIN { while (1) i++ }"]);
    let pid = || on(&cluster, 2, "pgrep -x awk");
    until("it runs", PATIENCE, || !pid().is_empty()).unwrap();
    let pid = pid();
    let tree = on(&cluster, 2, "pgrep -f 'tern-mfs.*--lasting'");
    assert!(!tree.is_empty());
    let made = groups(&cluster);
    assert!(!made.is_empty(), "this machine has control groups: the lab needs them");
    for group in made.lines() {
        let members = on(&cluster, 2, &format!("cat {group}/cgroup.procs"));
        assert!(members.lines().any(|member| member == pid), "{pid} is not in {group}: {members}");
        // What shows it its files is not held up.
        assert!(members.lines().all(|member| member != tree), "{tree} is in {group}");
    }
    assert_eq!(on(&cluster, 2, &format!("ps -o ni= -p {pid}")), "5");
    // A tenth of a CPU is all that it gets, though nobody else wants the rest.
    let used = || -> f64 {
        let ticks = on(&cluster, 2, &format!("awk '{{ print $14 + $15 }}' /proc/{pid}/stat"));
        ticks.parse::<f64>().unwrap() / 100.0
    };
    let (begun, before) = (Instant::now(), used());
    until("it computes", PATIENCE, || used() > before + 1.0).unwrap();
    let (used, seconds) = (used() - before, begun.elapsed().as_secs_f64());
    assert!(used < seconds * 0.1 + 0.3, "{used} s in {seconds} s");
    // The owner begins to work.
    let mut own = job_on(&cluster, 2, "").unwrap();
    let waits = closed(&cluster, "its own processes need it");
    assert!(spins.try_wait().unwrap().is_none(), "what runs goes on");
    cluster.run(2, &["kill", &own.pid.to_string()]).unwrap();
    own.finish(PATIENCE).unwrap();
    assert!(ends_well(waits), "others may come again");
    // Whatever ends, the groups go with it.
    cluster.run(2, &["pkill", "-KILL", "-f", "tern-exec.*serve"]).unwrap();
    assert!(!spins.wait().unwrap().success());
    until("nothing is left", PATIENCE, || groups(&cluster).is_empty())
        .unwrap_or_else(|e| panic!("{e:#}\n{}", groups(&cluster)));
    assert_eq!(on(&cluster, 2, "pgrep -x 'awk|tern-room'"), "");
    until("another runs", PATIENCE, || ends_well(place(&cluster, &["true"]))).unwrap();
}

#[test]
fn what_is_placed_has_no_more_memory_than_it_may_have() {
    let cluster = known("placedmemory", 2).unwrap();
    configure(&cluster, 2, "guest_memory = 100").unwrap();
    assert!(ends_well(place(&cluster, &["true"])));
    let holds = "held = b'x' * (150 << 20)\nwhile True: __import__('time').sleep(1)";
    let mut holds = place(&cluster, &["python3", "-c", holds]);
    let waits = closed(&cluster, "what they may have of its memory is in use");
    let mut elsewhere = cluster.command(1, "mexec");
    let host = elsewhere.args(["-n", "1,2", "--", "hostname"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&host.stdout).trim(), on(&cluster, 1, "hostname"));
    holds.kill().unwrap();
    holds.wait().unwrap();
    assert!(ends_well(waits));
}
