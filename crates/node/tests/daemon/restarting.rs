//! ternd may end at any moment, and start again; and it does not start where it must not.

use crate::cluster::{Cluster, Node, Sleeper, until};
use std::process::{Command, Output};
use tern_control::{Advice, Destination, Lock, Reply, Request};
use tern_ids::{HomePid, NodeId};

#[test]
fn a_killed_ternd_finds_everything_again() {
    let mut cluster = Cluster::of(2);
    let process = Sleeper::of(None);
    let request = Request::Migrate { pid: process.pid(), to: Destination::Node(NodeId(2)) };
    assert!(matches!(cluster.nodes[0].ask(&request), Reply::Migrated(_)));
    let register = Request::Register { lock: Lock::Locked, never: false, advice: Advice::default() };
    assert_eq!(cluster.nodes[0].ask(&register), Reply::Done);
    let known = |cluster: &Cluster| match cluster.nodes[0].ask(&Request::Processes) {
        // This test's other children are the ternds.
        Reply::Processes(rows) => rows
            .into_iter()
            .filter(|row| [process.pid(), HomePid(std::process::id() as i32)].contains(&row.pid))
            .map(|row| (row.pid, row.reason))
            .collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    let before = known(&cluster);
    assert_eq!(before.len(), 2);
    // What a shim that was killed has left.
    let dead = cluster.nodes[0].run_dir().join(format!("shims/{}.sock", "ab".repeat(16)));
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    for node in &mut cluster.nodes {
        node.kill();
    }
    for node in &mut cluster.nodes {
        node.start();
    }
    assert_eq!(known(&cluster), before);
    assert!(!dead.exists());
    // The shims went on, and go on: the same home shim makes the next move.
    assert!(matches!(cluster.nodes[0].ask(&request), Reply::Migrated(_)));
    assert_eq!(known(&cluster).len(), 2);
}

#[test]
fn what_a_killed_shim_leaves_is_removed_also_by_a_ternd_that_did_not_start_it() {
    let mut cluster = Cluster::of(2);
    let process = Sleeper::of(None);
    let request = Request::Migrate { pid: process.pid(), to: Destination::Node(NodeId(2)) };
    assert!(matches!(cluster.nodes[0].ask(&request), Reply::Migrated(_)));
    cluster.nodes[1].kill();
    cluster.nodes[1].start();
    let sockets = || {
        let files = std::fs::read_dir(cluster.nodes[1].run_dir().join("shims")).unwrap().flatten();
        files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|e| e == "sock"))
    };
    let socket = sockets().next().unwrap();
    let shim = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    let shim = rustix::net::sockopt::socket_peercred(&shim).unwrap().pid;
    assert!(socket.exists());
    rustix::process::kill_process(shim, rustix::process::Signal::KILL).unwrap();
    until("its socket is gone", || sockets().next().is_none());
}

#[test]
fn shims_are_sessions_of_their_own() {
    let cluster = Cluster::of(2);
    let process = Sleeper::of(None);
    let request = Request::Migrate { pid: process.pid(), to: Destination::Node(NodeId(2)) };
    assert!(matches!(cluster.nodes[0].ask(&request), Reply::Migrated(_)));
    let ternd = cluster.nodes[0].ternd.as_ref().unwrap().id();
    let output = Command::new("ps").args(["-o", "pid=,sid=", "--ppid", &ternd.to_string()]).output();
    let Ok(Output { stdout, status, .. }) = output else { return eprintln!("no ps here") };
    assert!(status.success());
    let text = String::from_utf8(stdout).unwrap();
    let ids: Vec<_> = text.split_whitespace().collect();
    assert!(ids.len() == 2 && ids[0] == ids[1], "{text}");
}

/// What a ternd says that must not start.
fn complaint(node: &Node) -> String {
    let output = node.command().output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    text.lines().last().unwrap_or_default().to_owned()
}

#[test]
fn what_is_in_the_way_is_said_in_one_sentence() {
    let cluster = Cluster::found("");
    assert!(complaint(&cluster.nodes[0]).starts_with("ternd: another ternd runs with "));
    let lonely = Node::new(&cluster, "");
    let said = complaint(&lonely);
    assert!(said.contains("tern init founds a cluster, tern join enters one"), "{said}");
    // A second node on the first one's port.
    let second = Node::new(&cluster, &format!("port = {}", cluster.nodes[0].port));
    cluster.join(&second, &cluster.token(), None).unwrap();
    let said = complaint(&second);
    let taken = format!("ternd: TCP port {} is taken", cluster.nodes[0].port);
    assert!(said.starts_with(&taken), "{said}");
    // A map without this node.
    std::fs::write(second.dir.join("mosix.map"), "1 a 1\n").unwrap();
    let said = complaint(&second);
    assert!(said.contains("mosix.map is wrong") && said.contains("not in it"), "{said}");
}

#[test]
fn a_node_can_be_set_up_anew() {
    let mut cluster = Cluster::of(2);
    cluster.nodes[1].kill();
    let forced = tern_node::JoinOptions {
        host: format!("127.0.0.1:{}", cluster.nodes[0].port),
        token: cluster.token(),
        address: Some(format!("127.0.0.1:{}", cluster.nodes[1].port)),
        force: true,
        config_dir: Some(cluster.nodes[1].dir.clone()),
        ..tern_node::JoinOptions::default()
    };
    assert!(tern_node::join(&tern_node::JoinOptions { force: false, ..forced.clone() }).is_err());
    assert_eq!(tern_node::join(&forced).unwrap().node, NodeId(2));
    cluster.nodes[1].start();
    until("both are up", || cluster.nodes[0].status().nodes.iter().all(|row| row.up));
}
