//! ternd may end at any moment and start again; it refuses to start where it must not.

use crate::cluster::{Cluster, Node, Sleeper, until};
use std::process::{Command, Output};
use tern_control::{Advice, Destination, Lock, Reply, Request};
use tern_ids::{HomePid, NodeId};

#[test]
fn restarted_ternd_finds_processes_and_shims() {
    let mut cluster = Cluster::of(2);
    let process = Sleeper::of(None);
    let request = Request::Migrate { pid: process.pid(), to: Destination::Node(NodeId(2)) };
    assert!(matches!(cluster.nodes[0].ask(&request), Reply::Migrated(_)));
    let register = Request::Register { lock: Lock::Locked, never: false, advice: Advice::default() };
    assert_eq!(cluster.nodes[0].ask(&register), Reply::Done);
    let known = |cluster: &Cluster| match cluster.nodes[0].ask(&Request::Processes) {
        // The ternds are children of this test as well.
        Reply::Processes(rows) => rows
            .into_iter()
            .filter(|row| [process.pid(), HomePid(std::process::id() as i32)].contains(&row.pid))
            .map(|row| (row.pid, row.reason))
            .collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    let before = known(&cluster);
    assert_eq!(before.len(), 2);
    // The socket that a killed shim leaves.
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
    // The shims have survived: the same home shim makes the next move.
    assert!(matches!(cluster.nodes[0].ask(&request), Reply::Migrated(_)));
    assert_eq!(known(&cluster).len(), 2);
}

#[test]
fn socket_of_a_killed_shim_is_removed_by_a_later_ternd() {
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
fn shims_have_sessions_of_their_own() {
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

/// The last line of the output of a ternd that fails to start.
fn start_error(node: &Node) -> String {
    let output = node.command().output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    text.lines().last().unwrap_or_default().to_owned()
}

#[test]
fn failed_start_prints_one_sentence() {
    let cluster = Cluster::found("");
    assert!(start_error(&cluster.nodes[0]).starts_with("ternd: another ternd runs with "));
    let lonely = Node::new(&cluster, "");
    let message = start_error(&lonely);
    assert!(message.contains("tern init founds a cluster, tern join enters one"), "{message}");
    // A second node on the port of the first.
    let second = Node::new(&cluster, &format!("port = {}", cluster.nodes[0].port));
    cluster.join(&second, &cluster.token(), None).unwrap();
    let message = start_error(&second);
    let taken = format!("ternd: TCP port {} is taken", cluster.nodes[0].port);
    assert!(message.starts_with(&taken), "{message}");
    // A map without this node.
    std::fs::write(second.dir.join("mosix.map"), "1 a 1\n").unwrap();
    let message = start_error(&second);
    assert!(message.contains("mosix.map is wrong") && message.contains("not in it"), "{message}");
}

#[test]
fn node_can_join_again_with_force() {
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
