//! Moves: permissions, and how the shims find each other through their ternds.

use crate::cluster::{Cluster, Sleeper, is_root};
use tern_control::{Advice, Destination, Lock, ProcessRow, RefusalKind, Reply, Request, StartedAs};
use tern_ids::{Epoch, HomePid, MigrationId, NodeId, ShimId};

/// A user without processes on this machine.
const USER: u32 = 54_321;

fn to(pid: HomePid, node: u16) -> Request {
    Request::Migrate { pid, to: Destination::Node(NodeId(node)) }
}

fn rows(cluster: &Cluster, node: usize) -> Vec<ProcessRow> {
    match cluster.nodes[node].ask(&Request::Processes) {
        Reply::Processes(rows) => rows,
        other => panic!("{other:?}"),
    }
}

#[test]
fn shims_connect_through_their_ternds() {
    let cluster = Cluster::of(2);
    let process = Sleeper::of(None);
    for _ in 0..2 {
        match cluster.nodes[0].ask(&to(process.pid(), 2)) {
            Reply::Migrated(report) => {
                assert_eq!(report.command, "guest of node 1");
                assert_eq!((report.from, report.to), (NodeId(1), NodeId(2)));
            }
            other => panic!("{other:?}; {}", cluster.nodes[0].log()),
        }
    }
    assert_eq!(rows(&cluster, 0).len(), 1, "the second move found the shim of the first");
    let guests = rows(&cluster, 1);
    assert!(guests.len() == 2 && guests.iter().all(|row| row.from == Some(NodeId(1))), "{guests:?}");
    if is_root() {
        let out = Request::LeaveNode { pid: guests[0].pid, from: None };
        match cluster.nodes[1].ask_as(USER, &out) {
            Reply::Refused(refusal) => assert_eq!(refusal.kind, RefusalKind::NotAllowed, "{refusal:?}"),
            other => panic!("{other:?}"),
        }
    }
    let status = cluster.nodes[0].status();
    assert!(status.nodes[1].note.contains("2 guests"), "{status:?}");
    let refusal = cluster.nodes[1].refusal(&Request::MapOff);
    assert_eq!(refusal.message, "0 processes are away and 2 guests are here");
}

#[test]
fn impossible_moves_are_refused_by_name() {
    let cluster = Cluster::of(2);
    let process = Sleeper::of(None);
    let (pid, home) = (process.pid(), &cluster.nodes[0]);
    assert_eq!(home.refusal(&to(pid, 7)).message, "there is no node 7 in the map");
    assert_eq!(home.refusal(&to(pid, 1)).message, format!("process {pid} is at home already"));
    let balance = Request::Migrate { pid, to: Destination::Balance };
    assert!(home.refusal(&balance).message.contains("is not balanced"));
    for nobody in [0, -1, 1 << 30] {
        assert_eq!(home.refusal(&to(HomePid(nobody), 2)).kind, RefusalKind::NotFound);
    }
    drop(process);
    assert_eq!(home.refusal(&to(pid, 2)).kind, RefusalKind::NotFound);
}

#[test]
fn untrusted_and_unwilling_destinations_are_refused() {
    let mut cluster = Cluster::found("trust = [2]");
    cluster.add("guests = false");
    cluster.add("");
    let process = Sleeper::of(None);
    let refusal = cluster.nodes[0].refusal(&to(process.pid(), 3));
    assert_eq!(refusal.message, "node 3 is not trusted with this node's processes");
    let refusal = cluster.nodes[0].refusal(&to(process.pid(), 2));
    assert_eq!((refusal.kind, &*refusal.message), (RefusalKind::Unavailable, "node 2 takes no guests"));
    let accepted_keys = vec![tern_ids::Fingerprint([0; 32])];
    let migration = MigrationId([1; 16]);
    cluster.nodes[1].kill();
    let request =
        Request::Prepare { node: NodeId(2), migration, accepted_keys, uid: 0, gid: 0, group: vec![] };
    assert_eq!(cluster.nodes[0].refusal(&request).kind, RefusalKind::Unavailable);
}

#[test]
fn failed_start_of_a_shim_is_reported() {
    let cluster = Cluster::of(2);
    let process = Sleeper::of(None);
    for (script, part) in [
        ("#!/bin/sh\nread x\necho failed for a reason\n", "for a reason"),
        ("#!/bin/sh\nexit 1\n", "did not start"),
        ("#!/bin/sh\nread x\necho ready zz\n", "malformed"),
        ("#!/nonexistent\n", "No such file"),
    ] {
        let (shim, fresh) = (cluster.nodes[0].dir.join("shim"), cluster.nodes[0].dir.join("fresh"));
        std::fs::copy(&shim, &fresh).unwrap();
        std::fs::write(&fresh, script).unwrap();
        std::fs::rename(&fresh, &shim).unwrap();
        let refusal = cluster.nodes[0].refusal(&to(process.pid(), 2));
        assert!(refusal.message.contains(part), "{refusal:?}");
    }
    let left: Vec<_> = std::fs::read_dir(cluster.nodes[0].run_dir().join("shims")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn users_may_move_only_their_own_processes() {
    if !is_root() {
        return eprintln!("only root can try this");
    }
    let cluster = Cluster::of(2);
    let home = &cluster.nodes[0];
    let (own, roots, others) = (Sleeper::of(Some(USER)), Sleeper::of(None), Sleeper::of(Some(USER + 1)));
    let moved = home.ask_as(USER, &to(own.pid(), 2));
    assert!(matches!(moved, Reply::Migrated(_)), "{moved:?}");
    for (process, part) in [(&roots, "is root's"), (&others, "not yours")] {
        match home.ask_as(USER, &to(process.pid(), 2)) {
            Reply::Refused(refusal) => {
                assert_eq!(refusal.kind, RefusalKind::NotAllowed);
                assert!(refusal.message.contains(part), "{refusal:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(home.ask(&to(others.pid(), 2)), Reply::Migrated(_)), "root may move any process");
}

#[test]
fn process_started_with_nomig_is_not_moved() {
    let cluster = Cluster::of(2);
    let child = Sleeper::of(None);
    // This test program is the parent of the sleeper.
    assert_eq!(
        cluster.nodes[0].ask(&Request::Register { lock: Lock::Keep, never: true, advice: Advice::default() }),
        Reply::Done
    );
    let refusal = cluster.nodes[0].refusal(&to(child.pid(), 2));
    assert_eq!(refusal.kind, RefusalKind::CannotMove);
    let at_exec =
        Request::AtExec { candidates: vec![NodeId(2)], lock: Lock::Keep, advice: Advice::default() };
    assert_eq!(cluster.nodes[0].refusal(&at_exec).kind, RefusalKind::CannotMove);
}

#[test]
fn start_on_another_node_is_prepared() {
    let cluster = Cluster::of(2);
    let at_exec = |candidates: &[u16]| {
        let candidates = candidates.iter().copied().map(NodeId).collect();
        cluster.nodes[0].ask(&Request::AtExec { candidates, lock: Lock::Unlocked, advice: Advice::default() })
    };
    // The rows of this test program only: its children, the ternds, are listed as well.
    let own = || -> Vec<ProcessRow> {
        let own = HomePid(std::process::id() as i32);
        rows(&cluster, 0).into_iter().filter(|row| row.pid == own).collect()
    };
    assert_eq!(at_exec(&[1, 2]), Reply::Ready);
    assert!(matches!(own()[..], [ProcessRow { ref state, .. }] if state == "home"));
    assert_eq!(at_exec(&[2]), Reply::Ready);
    assert!(
        matches!(own()[..], [ProcessRow { ref state, .. }] if state == "running"),
        "the shim's row instead"
    );
    for candidates in [&[][..], &[9]] {
        assert!(matches!(at_exec(candidates), Reply::Refused(_)));
    }
}

#[test]
fn lost_peer_is_located() {
    let mut cluster = Cluster::of(2);
    let process = Sleeper::of(None);
    assert!(matches!(cluster.nodes[0].ask(&to(process.pid(), 2)), Reply::Migrated(_)));
    let guest = std::fs::read_dir(cluster.nodes[1].run_dir().join("shims"))
        .unwrap()
        .find_map(|entry| entry.unwrap().file_name().to_str()?.strip_suffix(".sock")?.parse::<ShimId>().ok());
    let locate =
        |cluster: &Cluster, shim| match cluster.nodes[0].ask(&Request::Locate { node: NodeId(2), shim }) {
            Reply::Located { address, alive } => (address, alive),
            other => panic!("{other:?}"),
        };
    let address = Some(format!("127.0.0.1:{}", cluster.nodes[1].port));
    let home = std::fs::read_dir(cluster.nodes[0].run_dir().join("shims"))
        .unwrap()
        .find_map(|entry| entry.unwrap().file_name().to_str()?.strip_suffix(".sock")?.parse::<ShimId>().ok());
    let awaited = |shim, pid, epoch| {
        let request = Request::IsGuestAwaited { node: NodeId(1), shim, pid, epoch: Epoch(epoch) };
        match cluster.nodes[1].ask(&request) {
            Reply::Located { alive, .. } => alive,
            other => panic!("{other:?}"),
        }
    };
    let pid = process.pid();
    assert_eq!(awaited(home.unwrap(), pid, 2), Some(true));
    assert_eq!(awaited(home.unwrap(), pid, 1), Some(false), "an epoch that is over");
    assert_eq!(awaited(home.unwrap(), HomePid(pid.0 + 1), 2), Some(false), "another process");
    assert_eq!(awaited(ShimId([1; 16]), pid, 2), Some(false), "a shim that is gone");
    assert_eq!(locate(&cluster, guest.unwrap()), (address.clone(), Some(true)));
    assert_eq!(locate(&cluster, ShimId([1; 16])), (address, Some(false)));
    cluster.nodes[1].kill();
    assert_eq!(locate(&cluster, guest.unwrap()), (None, None), "no proof of death");
}

#[test]
fn children_belong_to_the_job_of_their_parent() {
    let cluster = Cluster::of(1);
    let child = Sleeper::of(None);
    let child = || {
        let found = rows(&cluster, 0).into_iter().find(|row| row.pid == child.pid());
        found.map(|row| row.started)
    };
    assert_eq!(child(), None, "it is not registered");
    // This test program is the parent of the sleeper.
    let advice = Advice { job: Some(7), ..Advice::default() };
    let request = Request::Register { lock: Lock::Unlocked, never: false, advice };
    assert_eq!(cluster.nodes[0].ask(&request), Reply::Done);
    assert_eq!(child(), Some(Some(StartedAs { job: Some(7), ..StartedAs::default() })));
}
