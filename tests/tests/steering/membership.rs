//! A removed node can do nothing to the others. Its root keeps its key, its certificate and its programs,
//! and another machine gets its number.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Stdio;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{TestProcess, wait_until};
use tern_tests::cluster::jobs::{EVENT_TIMEOUT, program};

/// Whether a shell command succeeds on a node.
fn succeeds(cluster: &Cluster, node: u16, line: &str) -> bool {
    cluster.run(node, &["timeout", "20", "sh", "-ec", line]).is_ok()
}

#[test]
fn no_way_in_for_a_removed_node() {
    let cluster = Cluster::with_nodes("removal", 3).unwrap();
    cluster.run(3, &["sh", "-ec", "mkdir -p /mfs; mount.mfs mymfs /mfs"]).unwrap();
    // Connections of every kind: a file that is open for writing, placed commands, a guest there and one
    // from there, and gossip.
    let mut writer = cluster.command(3, "sh");
    let line = "exec 3> /mfs/1/tmp/written; echo open; while echo more >&3 && sync /mfs/1/tmp/written; do sleep 0.05; done";
    let mut writer = writer.args(["-c", line]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let written = || cluster.run(1, &["stat", "-c", "%s", "/tmp/written"]).unwrap_or_default();
    wait_until("the file grows", EVENT_TIMEOUT, || written().len() > 3).unwrap();
    assert!(succeeds(&cluster, 3, "mexec -n 1 true"));
    let mut placed = cluster.command(3, "mexec");
    let mut placed = placed.args(["-n", "1", "sleep", "1000"]).spawn().unwrap();
    let mut there = TestProcess::start(&cluster, "heap").unwrap();
    there.migrate("3").unwrap();
    let from_there = program(&cluster, 3, "runon 2", &["sleep", "1000"]).unwrap();
    wait_until("its guest is here", EVENT_TIMEOUT, || cluster.count(2, "tern:3/") > 0).unwrap();

    let token = String::from_utf8(cluster.run(1, &["tern", "token"]).unwrap()).unwrap();
    assert!(!succeeds(&cluster, 2, "tern remove 3"), "only the founder removes nodes");
    assert!(!succeeds(&cluster, 2, "setpe -r -f /tmp/map; grep -v '^3' /tmp/map | setpe -w"));
    cluster.run(1, &["tern", "remove", "3"]).unwrap();

    there.await_loss(EVENT_TIMEOUT).unwrap();
    wait_until("its guest is gone", EVENT_TIMEOUT, || cluster.count(2, "tern:3/") == 0).unwrap();
    wait_until("it writes no more", EVENT_TIMEOUT, || matches!(writer.try_wait(), Ok(Some(_)))).unwrap();
    wait_until("its command ends", EVENT_TIMEOUT, || matches!(placed.try_wait(), Ok(Some(_)))).unwrap();
    wait_until("no process of it is left", EVENT_TIMEOUT, || cluster.count(1, "sleep 1000") == 0).unwrap();
    let after = written();

    // Nothing that it tries succeeds, and no token that it knew is worth anything.
    let attempts = |of: &str| {
        let lines = [
            "mexec -n 1 true",
            "mexec -n 2 true",
            "cat /mfs/1/etc/hostname",
            "echo x > /mfs/2/tmp/x",
            "runon 1 true",
            "echo '1 10.0.0.1 9' | setpe -w; mexec -n 1 true",
        ];
        // All at once: some try for seconds.
        let cluster = &cluster;
        std::thread::scope(|scope| {
            for line in lines {
                scope.spawn(move || assert!(!succeeds(cluster, 3, line), "{of}: {line}"));
            }
        });
    };
    attempts("removed");
    let join = |node: u16, token: &str| {
        let node1 = "$(sed -n 's/^1[[:space:]]*\\([^[:space:]]*\\).*/\\1/p' /etc/mosix.map)";
        let line = format!("tern join --config-dir /tmp/other --address 10.9.9.9 {node1} {}", token.trim());
        let config = "mkdir -p /tmp/other; echo 'map = \"/tmp/other/map\"' > /tmp/other/ternd.toml";
        succeeds(&cluster, node, &format!("{config}; {line}"))
    };
    assert!(!join(2, &token), "tokens that it may know are invalid");

    // Another machine joins, and gets its number: the first is still not node 3 again.
    let token = String::from_utf8(cluster.run(1, &["tern", "token"]).unwrap()).unwrap();
    assert!(join(2, &token));
    let map = String::from_utf8(cluster.run(1, &["setpe", "-r"]).unwrap()).unwrap();
    assert!(map.contains("\n3\t"), "{map}");
    attempts("replaced");
    assert_eq!(written(), after);
    assert!(succeeds(&cluster, 2, "mexec -n 1 true"), "the others go on");
    drop(from_there);
}
