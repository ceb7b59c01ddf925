//! The owner of a node has priority over commands that others have placed on it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{configure, wait_until};
use tern_tests::cluster::jobs::{EVENT_TIMEOUT, connected_cluster, exits_successfully, job_on};

/// The output of a shell command on a node, trimmed.
fn on(cluster: &Cluster, node: u16, script: &str) -> String {
    let said = cluster.run(node, &["sh", "-c", script]).unwrap_or_default();
    String::from_utf8_lossy(&said).trim().to_owned()
}

/// Starts a command from node 1 on node 2.
fn place(cluster: &Cluster, command: &[&str]) -> Child {
    let mut mexec = cluster.command(1, "mexec");
    mexec.args(["-n", "2", "--"]).args(command).stdin(Stdio::null()).spawn().unwrap()
}

/// The control groups of node 2's guests, one a line. Other labs on this machine have groups of
/// their own.
fn groups(cluster: &Cluster) -> String {
    let find = format!("find /sys/fs/cgroup -path '*/{}/node2/tern/guests' -type d", cluster.lab().name());
    on(cluster, 2, &find)
}

/// Waits until node 2 starts no more commands and has logged why; returns a command that waits
/// there.
fn await_closed(cluster: &Cluster, why: &str) -> Child {
    let says = || on(cluster, 2, "cat /run/tern/exec.log").contains(why);
    // The node evaluates its rules when a command arrives.
    wait_until(why, EVENT_TIMEOUT, || ends_soon(place(cluster, &["true"])).is_none() && says())
        .unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.diagnostics(0)));
    let mut waits = place(cluster, &["true"]);
    std::thread::sleep(Duration::from_secs(3));
    assert!(waits.try_wait().unwrap().is_none(), "it did not wait");
    waits
}

/// Whether the command has succeeded; `None` if it does not end within a second, and is killed.
fn ends_soon(mut child: Child) -> Option<bool> {
    let timeout = Duration::from_secs(1);
    let ended = wait_until("it ends", timeout, || child.try_wait().unwrap().is_some()).is_ok();
    let _over = child.kill();
    let status = child.wait().unwrap();
    ended.then(|| status.success())
}

#[test]
fn owner_of_a_node_has_priority_over_placed_commands() {
    let cluster = connected_cluster("placedowned", 2).unwrap();
    configure(&cluster, 2, "owner_share = 50\nguest_cpus = 0.1").unwrap();
    let mut spins = place(&cluster, &["awk", "BEGIN { while (1) i++ }"]);
    let pid = || on(&cluster, 2, "pgrep -x awk");
    wait_until("it runs", EVENT_TIMEOUT, || !pid().is_empty()).unwrap();
    let pid = pid();
    let tree = on(&cluster, 2, "pgrep -f 'tern-mfs.*--renewable'");
    assert!(!tree.is_empty());
    let made = groups(&cluster);
    assert!(!made.is_empty(), "no control group, though the lab needs them");
    for group in made.lines() {
        let members = on(&cluster, 2, &format!("cat {group}/cgroup.procs"));
        assert!(members.lines().any(|member| member == pid), "{pid} is not in {group}: {members}");
        // The file system daemon of the container is not throttled.
        assert!(members.lines().all(|member| member != tree), "{tree} is in {group}");
    }
    assert_eq!(on(&cluster, 2, &format!("ps -o ni= -p {pid}")), "5");
    // It gets a tenth of a CPU and no more, though the rest is idle.
    let used = || -> f64 {
        let ticks = on(&cluster, 2, &format!("awk '{{ print $14 + $15 }}' /proc/{pid}/stat"));
        ticks.parse::<f64>().unwrap() / 100.0
    };
    let (begun, before) = (Instant::now(), used());
    wait_until("it computes", EVENT_TIMEOUT, || used() > before + 1.0).unwrap();
    let (used, seconds) = (used() - before, begun.elapsed().as_secs_f64());
    assert!(used < seconds * 0.1 + 0.3, "{used} s in {seconds} s");
    // The owner starts to work.
    let mut own = job_on(&cluster, 2, "").unwrap();
    let waits = await_closed(&cluster, "its own processes need it");
    assert!(spins.try_wait().unwrap().is_none(), "the running command continues");
    cluster.run(2, &["kill", &own.pid.to_string()]).unwrap();
    own.finish(EVENT_TIMEOUT).unwrap();
    assert!(exits_successfully(waits), "commands are started again");
    // When the executor ends, the groups are removed.
    cluster.run(2, &["pkill", "-KILL", "-f", "tern-exec.*serve"]).unwrap();
    assert!(!spins.wait().unwrap().success());
    wait_until("nothing is left", EVENT_TIMEOUT, || groups(&cluster).is_empty())
        .unwrap_or_else(|e| panic!("{e:#}\n{}", groups(&cluster)));
    assert_eq!(on(&cluster, 2, "pgrep -x 'awk|tern-container'"), "");
    wait_until("another runs", EVENT_TIMEOUT, || exits_successfully(place(&cluster, &["true"]))).unwrap();
}

#[test]
fn memory_limit_for_placed_commands_is_enforced() {
    let cluster = connected_cluster("placedmemory", 2).unwrap();
    configure(&cluster, 2, "guest_memory = 100").unwrap();
    assert!(exits_successfully(place(&cluster, &["true"])));
    let holds = "held = b'x' * (150 << 20)\nwhile True: __import__('time').sleep(1)";
    let mut holds = place(&cluster, &["python3", "-c", holds]);
    let waits = await_closed(&cluster, "the memory limit of guests is reached");
    let mut elsewhere = cluster.command(1, "mexec");
    let host = elsewhere.args(["-n", "1,2", "--", "hostname"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&host.stdout).trim(), on(&cluster, 1, "hostname"));
    holds.kill().unwrap();
    holds.wait().unwrap();
    assert!(exits_successfully(waits));
}
