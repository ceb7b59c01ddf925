//! Requests that change the node, and requests that are malformed.

use crate::cluster::{Cluster, is_root, until};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use tern_control::{
    Advice, Costs, Lock, MigrationCosts, NodeSettings, RefusalKind, Reply, Request, Switch, SymbolicNode,
};
use tern_ids::{Epoch, HomePid, MigrationId, NodeId, ShimId};

#[test]
fn plain_user_cannot_change_the_node() {
    if !is_root() {
        return eprintln!("only root can try this");
    }
    let cluster = Cluster::found("");
    let node = &cluster.nodes[0];
    let text = node.map();
    for request in [
        Request::Token { seconds: 60 },
        Request::SetMap { text },
        Request::MapOff,
        Request::Prepare {
            node: NodeId(2),
            migration: MigrationId([0; 16]),
            accepted_keys: Vec::new(),
            uid: 0,
            gid: 0,
            group: Vec::new(),
        },
        Request::Locate { node: NodeId(1), shim: ShimId([0; 16]) },
        Request::Tune { node: NodeId(2) },
        Request::KeepCosts(costs(2)),
        Request::IsGuestAwaited { node: NodeId(1), shim: ShimId([0; 16]), pid: HomePid(1), epoch: Epoch(1) },
        Request::For { uid: 0, gid: 0, request: Box::new(Request::Status) },
        Request::For { uid: 54_321, gid: 54_321, request: Box::new(Request::Status) },
        Request::Switch { switch: Switch::NoMfs, on: true },
        Request::SetSymbolicNode { pid: own(), name: SymbolicNode::Selected, node: None },
        Request::SetSymbolicNode { pid: own(), name: SymbolicNode::Magic, node: None },
        Request::FileTraffic(Vec::new()),
        Request::SetLock { pid: own(), lock: Lock::Unlocked },
        Request::Advise { pid: own(), advice: Advice::default() },
    ] {
        match node.ask_as(54_321, &request) {
            Reply::Refused(refusal) => assert_eq!(refusal.kind, RefusalKind::NotAllowed, "{request:?}"),
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(node.ask_as(54_321, &Request::Status), Reply::Status(_)));
    assert!(matches!(node.ask_as(54_321, &Request::GetMap), Reply::Map(_)));
    assert!(matches!(node.ask_as(54_321, &Request::Processes), Reply::Processes(_)));
}

/// This process, which belongs to root.
fn own() -> HomePid {
    HomePid(std::process::id() as i32)
}

#[test]
fn request_for_another_user_has_that_users_rights() {
    if !is_root() {
        return eprintln!("only root can try this");
    }
    let cluster = Cluster::found("");
    let node = &cluster.nodes[0];
    let ask_for =
        |uid, request: Request| node.ask(&Request::For { uid, gid: uid, request: Box::new(request) });
    let refused = |uid, request| match ask_for(uid, request) {
        Reply::Refused(refusal) => refusal.kind,
        other => panic!("{other:?}"),
    };
    let stay = || Request::Switch { switch: Switch::Stay, on: true };
    assert_eq!(refused(54_321, stay()), RefusalKind::NotAllowed);
    assert_eq!(refused(54_321, Request::SetLock { pid: own(), lock: Lock::Locked }), RefusalKind::NotAllowed);
    // A request for a user that contains a request for root does not give that user root's rights.
    let twice = Request::For { uid: 0, gid: 0, request: Box::new(stay()) };
    assert_eq!(refused(54_321, twice), RefusalKind::NotAllowed);
    assert_eq!(node.ask(&Request::Settings), Reply::Settings(NodeSettings::default()));
    assert_eq!(ask_for(0, stay()), Reply::Done);
    // A request on behalf of another user has no calling process.
    let register = Request::Register { lock: Lock::Locked, never: false, advice: Advice::default() };
    assert_eq!(refused(54_321, register.clone()), RefusalKind::Unsupported);
    assert_eq!(refused(0, register), RefusalKind::Unsupported);
}

#[test]
fn one_process_is_shown_and_configured() {
    let cluster = Cluster::found("");
    let node = &cluster.nodes[0];
    let row = || match node.ask(&Request::Process { pid: own() }) {
        Reply::Process(row) => row,
        other => panic!("{other:?}"),
    };
    let before = row();
    assert_eq!((before.r#where, before.migrations, &*before.state), (Some(NodeId(1)), 0, "home"));
    assert!(before.started.is_none() && before.command.contains("daemon"));
    assert_eq!(node.ask(&Request::SetLock { pid: own(), lock: Lock::Locked }), Reply::Done);
    assert!(row().started.is_some_and(|started| started.locked));
    assert_eq!(
        node.refusal(&Request::SetLock { pid: own(), lock: Lock::Keep }).kind,
        RefusalKind::BadRequest
    );
    for pid in [0, -1, 5_000_000].map(HomePid) {
        assert_eq!(node.refusal(&Request::Process { pid }).kind, RefusalKind::NotFound);
        assert_eq!(
            node.ask(&Request::ResolveNode { pid, name: SymbolicNode::Selected }),
            Reply::ResolvedNode(None)
        );
    }
    if is_root() {
        let hidden = match node.ask_as(54_321, &Request::Process { pid: own() }) {
            Reply::Process(row) => row.command,
            other => panic!("{other:?}"),
        };
        assert_eq!(hidden, "");
    }
    // The nodes that names below /mfs mean for it.
    let place = |of| node.ask(&Request::ResolveNode { pid: own(), name: of });
    for of in [SymbolicNode::Here, SymbolicNode::Selected, SymbolicNode::Magic, SymbolicNode::LastExec] {
        assert_eq!(place(of), Reply::ResolvedNode(None), "{of:?}");
    }
    let choose = |of, to: u16| Request::SetSymbolicNode { pid: own(), name: of, node: Some(NodeId(to)) };
    assert_eq!(node.ask(&choose(SymbolicNode::Selected, 1)), Reply::Done);
    assert_eq!(place(SymbolicNode::Selected), Reply::ResolvedNode(Some(NodeId(1))));
    assert_eq!(node.refusal(&choose(SymbolicNode::Selected, 9)).kind, RefusalKind::NotFound);
    assert_eq!(node.refusal(&choose(SymbolicNode::LastExec, 1)).kind, RefusalKind::BadRequest);
}

#[test]
fn invalid_map_changes_nothing() {
    let cluster = Cluster::of(2);
    let node = &cluster.nodes[0];
    let before = node.map();
    for (text, part) in [
        ("1 a 1\nx\n", "line 2: expected three words"),
        ("2 127.0.0.1 1\n", "this node, 1, is not in it"),
        ("", "this node, 1, is not in it"),
    ] {
        let refusal = node.refusal(&Request::SetMap { text: text.into() });
        assert!(refusal.kind == RefusalKind::BadRequest && refusal.message.contains(part), "{refusal:?}");
        assert_eq!(node.map(), before);
    }
    let more = format!("{before}7 127.0.0.9 2\n");
    assert_eq!(node.ask(&Request::SetMap { text: more }), Reply::Done);
    let after = node.map();
    assert!(after.contains("7 127.0.0.9 2\n") && after.starts_with("# version 3\n"), "{after}");
    until("the other node has it", || cluster.nodes[1].map() == after);
    assert_eq!(std::fs::read_to_string(node.dir.join("mosix.map")).unwrap(), after);
    assert_eq!(node.status().nodes.len(), 4);
}

#[test]
fn node_that_left_is_not_put_back_into_the_map() {
    let cluster = Cluster::of(2);
    assert_eq!(cluster.nodes[1].ask(&Request::MapOff), Reply::Done);
    assert_eq!(cluster.nodes[1].map(), "");
    // Node 1 still has the map, and sends it to node 2, which must not accept it.
    cluster.nodes[0].status();
    let status = cluster.nodes[1].status();
    assert_eq!((status.nodes.len(), &*cluster.nodes[1].map()), (1, ""));
}

#[test]
fn malformed_requests_are_refused_or_dropped() {
    let cluster = Cluster::found("");
    let control = cluster.nodes[0].run_dir().join("control");
    for (bytes, answered) in [
        (&b"\0\0\0\x02{}"[..], true),
        (b"\xff\xff\xff\xff", true),
        (b"\0\0\0\x09\"nothing\"", true),
        (b"", false),
        (b"\0\0", false),
        (b"\0\0\0\x05{", false),
    ] {
        let mut socket = UnixStream::connect(&control).unwrap();
        socket.write_all(bytes).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let mut reply = Vec::new();
        socket.read_to_end(&mut reply).unwrap();
        assert_eq!(!reply.is_empty(), answered, "{bytes:?}");
    }
    assert!(matches!(cluster.nodes[0].ask(&Request::Status), Reply::Status(_)));
    let refusal = cluster.nodes[0].refusal(&Request::Token { seconds: 59 });
    assert_eq!(refusal.kind, RefusalKind::BadRequest);
}

fn costs(node: u16) -> Costs {
    Costs {
        node: NodeId(node),
        rtt_us: 70,
        bytes_per_s: 1 << 30,
        back_bytes_per_s: 1 << 30,
        call_ns: None,
        // One MiB per second.
        migration: Some(MigrationCosts { fixed_us: 20_000, us_per_mib: 1_000_000 }),
        at: 1_800_000_000,
    }
}

#[test]
fn measured_link_costs_survive_a_restart() {
    let mut cluster = Cluster::of(2);
    let node = &cluster.nodes[0];
    for wrong in [Request::Tune { node: NodeId(1) }, Request::Tune { node: NodeId(9) }] {
        assert_eq!(node.refusal(&wrong).kind, RefusalKind::NotFound, "{wrong:?}");
    }
    for wrong in [costs(1), costs(9)] {
        assert_eq!(node.refusal(&Request::KeepCosts(wrong)).kind, RefusalKind::NotFound);
    }
    let links = |cluster: &Cluster| match cluster.nodes[0].ask(&Request::Links) {
        Reply::Links(rows) => rows,
        other => panic!("{other:?}"),
    };
    let Reply::Tuned(measured) = node.ask(&Request::Tune { node: NodeId(2) }) else {
        panic!("{}", node.log());
    };
    // Holds for the loopback of any machine.
    assert!((1..1_000_000).contains(&measured.rtt_us), "{measured:?}");
    assert!(measured.bytes_per_s > 1 << 20 && measured.back_bytes_per_s > 1 << 20, "{measured:?}");
    let [row] = links(&cluster)[..] else { panic!() };
    assert_eq!((row.node, row.bytes_per_s, row.tuned), (NodeId(2), measured.bytes_per_s, Some(measured)));
    // The throughput of migrations takes precedence.
    assert_eq!(cluster.nodes[0].ask(&Request::KeepCosts(costs(2))), Reply::Done);
    cluster.nodes[0].kill();
    cluster.nodes[0].start();
    let [row] = links(&cluster)[..] else { panic!() };
    assert_eq!((row.bytes_per_s, row.tuned), (1 << 20, Some(costs(2))));
}
