//! Peers that are not authenticated, or that send garbage, must do no harm.

use crate::cluster::{Cluster, until};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tern_ids::{NodeId, ShimId};
use tern_wire::{Authority, Identity, Link, LinkError, Preamble};

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// The identity of a node, with the members that it knows.
fn identity_of(cluster: &Cluster, node: usize) -> Identity {
    let dir = &cluster.nodes[node].dir;
    let identity = Identity::load(dir).unwrap();
    tern_node::follow_map(&dir.join("mosix.map"), &identity).unwrap();
    identity
}

/// Asserts that the daemon still answers its peers.
fn assert_alive(cluster: &Cluster) {
    // The ping has a timeout of one second, which a busy machine may miss.
    until("it answers", || cluster.nodes[1].status().nodes.iter().all(|row| row.up));
}

#[test]
fn garbage_does_not_kill_the_daemon() {
    let cluster = Cluster::of(2);
    let address = ("127.0.0.1", cluster.nodes[0].port);
    let node = Preamble::Node.to_bytes();
    let garbage: [&[u8]; 8] = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"TERN",
        &[0xff; 100_000],
        &[&node[..], &[0x16, 3, 1, 0xff, 0xff]].concat(),
        &[&node[..], &[0; 70_000]].concat(),
        &[&Preamble::Join.to_bytes()[..], &[7; 3000]].concat(),
        &Preamble::Shim(ShimId([9; 16])).to_bytes(),
    ];
    for bytes in garbage {
        let mut socket = TcpStream::connect(address).unwrap();
        let _maybe_closed_already = socket.write_all(bytes);
        let _maybe_closed_already = socket.shutdown(Shutdown::Write);
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        // It closes the connection, perhaps after an alert and perhaps with a reset.
        let mut rest = Vec::new();
        let ended = socket.read_to_end(&mut rest);
        assert!(ended.is_ok() || ended.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset);
    }
    assert_alive(&cluster);
}

#[test]
fn silent_connections_are_closed_after_the_deadline() {
    let cluster = Cluster::of(2);
    let address = ("127.0.0.1", cluster.nodes[0].port);
    let silent: Vec<_> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
    // The daemon keeps as many of them as the limit of one address permits, and closes these after
    // the deadline.
    until("the daemon has thrown them out", || cluster.nodes[1].status().nodes.iter().all(|row| row.up));
    drop(silent);
    assert_alive(&cluster);
}

/// A connection from this address of the loopback interface.
fn connect_from(from: [u8; 4], port: u16) -> Option<TcpStream> {
    use rustix::net::{AddressFamily, SocketAddrV4, SocketType, bind, connect, socket};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).ok()?;
    bind(&socket, &SocketAddrV4::new(from.into(), 0)).ok()?;
    connect(&socket, &SocketAddrV4::new([127, 0, 0, 1].into(), port)).ok()?;
    Some(socket.into())
}

/// Machines outside the cluster connect as often as they can from six addresses, silent, or with each kind
/// of preamble. Members notice nothing, and the log stays short.
#[test]
fn strangers_take_no_connection_of_members() {
    let cluster = Cluster::of(2);
    let port = cluster.nodes[0].port;
    let kinds = [Preamble::Node, Preamble::Join, Preamble::Files, Preamble::Exec, Preamble::Net];
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for last in 2..8 {
            let over = &over;
            scope.spawn(move || {
                let mut idle = VecDeque::new();
                while !over.load(Ordering::Relaxed) {
                    let Some(mut socket) = connect_from([127, 0, 0, last], port) else { continue };
                    if last % 2 == 0 {
                        let preamble = kinds[idle.len() % kinds.len()].to_bytes();
                        let _maybe_closed_already = socket.write_all(&preamble);
                    }
                    idle.push_back(socket);
                    if idle.len() > 40 {
                        idle.pop_front();
                    }
                }
            });
        }
        let member = identity_of(&cluster, 1);
        let tls = member.cluster_client(NodeId(1)).unwrap();
        for _ in 0..20 {
            Link::connect(&format!("127.0.0.1:{port}"), Preamble::Node, &tls, deadline()).unwrap();
        }
        assert_alive(&cluster);
        over.store(true, Ordering::Relaxed);
    });
    let log = cluster.nodes[0].log();
    let lines = log.lines().filter(|line| line.contains("127.0.0.")).count();
    assert!((1..=10).contains(&lines), "{lines} lines: {log}");
    assert!(!cluster.nodes[0].run_dir().join("mfs.sock").exists(), "strangers start no program");
}

#[test]
fn certificate_of_another_cluster_is_refused() {
    let cluster = Cluster::of(2);
    let address = format!("127.0.0.1:{}", cluster.nodes[0].port);
    let imposter = Authority::create("alpha").unwrap();
    let own = Identity::issued_by_authority(&imposter, NodeId(2)).unwrap();
    // It does not trust the real node …
    let refused =
        Link::connect(&address, Preamble::Node, &own.cluster_client(NodeId(1)).unwrap(), deadline());
    assert!(matches!(refused, Err(LinkError::Tls(_))), "{refused:?}");
    // … and if it did, the real node would not trust it. A shim's certificate stands for any
    // foreign one.
    let member = identity_of(&cluster, 1);
    let real =
        Link::connect(&address, Preamble::Node, &member.cluster_client(NodeId(1)).unwrap(), deadline());
    let fingerprint = real.unwrap().peer_fingerprint().unwrap();
    let shim = tern_wire::Ephemeral::generate().unwrap();
    let tls = tern_wire::pinned_client(&shim, fingerprint).unwrap();
    let answer =
        Link::connect(&address, Preamble::Node, &tls, deadline()).and_then(|mut link| link.recv(deadline()));
    assert!(matches!(answer, Err(LinkError::Tls(_) | LinkError::Closed)), "{answer:?}");
    assert_alive(&cluster);
}

#[test]
fn member_that_sends_garbage_is_disconnected() {
    let cluster = Cluster::of(2);
    let address = format!("127.0.0.1:{}", cluster.nodes[0].port);
    let member = identity_of(&cluster, 1);
    let tls = member.cluster_client(NodeId(1)).unwrap();
    for (kind, payload) in [(1, &[0xff; 40][..]), (1, &[]), (9, b"x"), (1, &[0; 200_000])] {
        let mut link = Link::connect(&address, Preamble::Node, &tls, deadline()).unwrap();
        link.send(kind, 0, &[payload], deadline()).unwrap();
        assert!(matches!(link.recv(deadline()), Err(LinkError::Closed)));
    }
    assert_alive(&cluster);
}
