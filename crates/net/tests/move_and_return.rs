//! Moves connections between two nodes, each a network namespace, while their client talks on.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use anyhow::Result;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use tern_ids::{ConnectionToken, NodeId};
use tern_net::guest::Guests;
use tern_net::home::Home;
use tern_net::link::Homes;
use tern_net::message::{NetReply, NetRequest};
use tern_net::packets::Packets;
use tern_redirect::NetworkNamespace;

const HOME: NodeId = NodeId(1);
const NODE: NodeId = NodeId(2);
const TOKEN: ConnectionToken = ConnectionToken([7; 16]);
const CLIENT_IP: [u8; 4] = [10, 9, 0, 3];
const LIMIT: Duration = Duration::from_secs(30);

/// Three machines on a bridge: a client, the home, and the guest's node.
struct Scene {
    client: NetworkNamespace,
    home: Arc<NetworkNamespace>,
    node: NetworkNamespace,
    _segment: NetworkNamespace,
}

fn address(machine: u8) -> IpAddr {
    [10, 9, 0, machine].into()
}

fn ip(place: &NetworkNamespace, arguments: &str) {
    let done = place.run(|| Command::new("ip").args(arguments.split(' ')).output().unwrap()).unwrap();
    assert!(done.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&done.stderr));
}

impl Scene {
    fn new() -> Self {
        let segment = NetworkNamespace::create().unwrap();
        ip(&segment, "link add bridge type bridge");
        ip(&segment, "link set bridge up");
        let machine = |number: u8| {
            let place = NetworkNamespace::create().unwrap();
            // The other end is moved by the pid and thread that has the namespace open.
            let path = format!(
                "/proc/{}/fd/{}",
                std::process::id(),
                std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&place))
            );
            ip(&segment, &format!("link add port{number} type veth peer name eth0 netns {path}"));
            ip(&segment, &format!("link set port{number} master bridge up"));
            ip(&place, "link set lo up");
            ip(&place, &format!("addr add 10.9.0.{number}/24 dev eth0"));
            ip(&place, "link set eth0 up");
            place
        };
        let (home, node, client) = (machine(1), machine(2), machine(3));
        // However slow this machine is, only a lost packet causes a timeout.
        ip(&client, "route change 10.9.0.0/24 dev eth0 rto_min 20s");
        let no_probes = || std::fs::write("/proc/sys/net/ipv4/tcp_early_retrans", "0").unwrap();
        client.run(no_probes).unwrap();
        Self { client, home: Arc::new(home), node, _segment: segment }
    }
}

/// Requests reach home without a link. Those of the kinds in `lost` are performed, and their reply is
/// lost, once for each.
struct Direct {
    place: Arc<NetworkNamespace>,
    home: Arc<Home>,
    lost: Arc<Mutex<Vec<&'static str>>>,
}

impl Homes for Direct {
    fn call(&self, home: NodeId, request: &NetRequest) -> Result<NetReply> {
        assert_eq!(home, HOME);
        let reply = self.place.run(|| self.home.handle(NODE, address(2), request.clone()))?;
        let mut lost = self.lost.lock().unwrap();
        let at = lost.iter().position(|kind| format!("{request:?}").contains(kind));
        anyhow::ensure!(at.map(|at| lost.remove(at)).is_none(), "the link broke");
        Ok(reply)
    }
}

struct Nodes {
    home: Arc<Home>,
    guests: Guests<Direct>,
    lost: Arc<Mutex<Vec<&'static str>>>,
}

impl Nodes {
    fn new(scene: &Scene) -> Self {
        let packets =
            |place: &NetworkNamespace| place.run(|| Arc::new(Packets::open("tern").unwrap())).unwrap();
        let home = Arc::new(Home::new(packets(&scene.home)));
        let lost = Arc::new(Mutex::default());
        let direct = Direct { place: scene.home.clone(), home: home.clone(), lost: lost.clone() };
        Self { home, guests: Guests::new(direct, packets(&scene.node)), lost }
    }

    fn take(&self, scene: &Scene) -> Result<TcpStream> {
        scene.node.run(|| self.guests.take(HOME, address(1), TOKEN))?.map(|(socket, _)| socket.into())
    }

    fn give_back(&self, scene: &Scene, socket: TcpStream) -> Result<()> {
        let socket = OwnedFd::from(socket);
        scene.node.run(|| self.guests.give_back(HOME, TOKEN, &socket))?
    }
}

/// A connection from the client to home.
fn connect(scene: &Scene) -> (TcpStream, TcpStream) {
    let listener = scene.home.run(|| TcpListener::bind((address(1), 0)).unwrap()).unwrap();
    let to = listener.local_addr().unwrap();
    let client = scene.client.run(|| TcpStream::connect(to).unwrap()).unwrap();
    let (server, from) = listener.accept().unwrap();
    assert_eq!(from.ip(), IpAddr::from(CLIENT_IP));
    for socket in [&client, &server] {
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.set_write_timeout(Some(LIMIT)).unwrap();
    }
    (client, server)
}

/// The byte at a place of the stream.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Sends and receives the pattern until told to stop. Returns how much was received.
fn talk(mut socket: TcpStream, stop: &AtomicBool) -> u64 {
    let mut writer = socket.try_clone().unwrap();
    let sent = AtomicU64::new(0);
    let mut received = 0;
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut at = 0u64;
            while !stop.load(Ordering::Acquire) {
                let piece: Vec<u8> = (at..at + 4000).map(byte).collect();
                writer.write_all(&piece).unwrap();
                at += 4000;
                sent.store(at, Ordering::Release);
            }
            writer.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let mut piece = [0; 16384];
        loop {
            let count = socket.read(&mut piece).unwrap();
            if count == 0 {
                break;
            }
            for (at, found) in (received..).zip(&piece[..count]) {
                assert_eq!(*found, byte(at), "byte {at}");
            }
            received += count as u64;
        }
        sender.join().unwrap();
    });
    assert_eq!(received, sent.into_inner(), "all that was sent came back");
    received
}

/// Sends back what arrives, `count` times or until the end. Returns whether there is more.
fn echo(socket: &mut TcpStream, count: usize) -> bool {
    let mut piece = [0; 8192];
    for _ in 0..count {
        let count = socket.read(&mut piece).unwrap();
        if count == 0 {
            return false;
        }
        socket.write_all(&piece[..count]).unwrap();
    }
    true
}

/// A counter of a namespace's TCP (proc_net_netstat, or proc_net_snmp).
fn counter(place: &NetworkNamespace, name: &str) -> u64 {
    let read = || {
        ["/proc/thread-self/net/netstat", "/proc/thread-self/net/snmp"]
            .map(|table| std::fs::read_to_string(table).unwrap())
            .concat()
    };
    let text = place.run(read).unwrap();
    let lines: Vec<_> = text.lines().collect();
    let value = lines.chunks(2).find_map(|pair| {
        let at = pair[0].split(' ').position(|column| column == name)?;
        pair[1].split(' ').nth(at)?.parse().ok()
    });
    value.unwrap()
}

#[test]
fn connection_moves_out_and_home_while_its_client_talks() {
    let scene = Scene::new();
    let nodes = Nodes::new(&scene);
    let (client, mut server) = connect(&scene);
    nodes.home.offer(TOKEN, NODE, server.try_clone().unwrap().into()).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let talker = scope.spawn(|| talk(client, &stop));
        for _ in 0..20 {
            assert!(echo(&mut server, 20));
            let mut away = nodes.take(&scene).unwrap();
            assert_eq!(
                away.local_addr().unwrap(),
                SocketAddr::new(address(1), server.local_addr().unwrap().port())
            );
            assert!(echo(&mut away, 20));
            nodes.give_back(&scene, away).unwrap();
        }
        stop.store(true, Ordering::Release);
        while echo(&mut server, 1000) {}
        server.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(talker.join().unwrap() > 0);
    });
    assert_eq!(counter(&scene.client, "TCPTimeouts"), 0, "the client has waited for nothing");
    assert_eq!(counter(&scene.client, "EstabResets"), 0);
    assert_eq!(nodes.guests.count(), 0);
}

#[test]
fn home_sees_no_packet_of_a_connection_that_is_away() {
    let scene = Scene::new();
    let nodes = Nodes::new(&scene);
    let (client, server) = connect(&scene);
    nodes.home.offer(TOKEN, NODE, server.try_clone().unwrap().into()).unwrap();
    let mut away = nodes.take(&scene).unwrap();
    let stop = AtomicBool::new(false);
    let before = counter(&scene.home, "InSegs");
    thread::scope(|scope| {
        let talker = scope.spawn(|| talk(client, &stop));
        assert!(echo(&mut away, 500));
        stop.store(true, Ordering::Release);
        while echo(&mut away, 1000) {}
        away.shutdown(std::net::Shutdown::Write).unwrap();
        talker.join().unwrap();
    });
    assert_eq!(counter(&scene.home, "InSegs"), before);
}

#[test]
fn lost_replies_change_nothing() {
    let scene = Scene::new();
    let nodes = Nodes::new(&scene);
    let (mut client, mut server) = connect(&scene);
    nodes.home.offer(TOKEN, NODE, server.try_clone().unwrap().into()).unwrap();
    let check = |client: &mut TcpStream, server: &mut TcpStream, text: &[u8; 4]| {
        client.write_all(text).unwrap();
        assert!(echo(server, 1));
        let mut got = [0; 4];
        client.read_exact(&mut got).unwrap();
        assert_eq!(&got, text);
    };
    *nodes.lost.lock().unwrap() = vec!["Take"];
    assert!(nodes.take(&scene).is_err());
    check(&mut client, &mut server, b"home");
    *nodes.lost.lock().unwrap() = vec!["Commit", "Commit"];
    let mut away = nodes.take(&scene).unwrap();
    check(&mut client, &mut away, b"away");
    *nodes.lost.lock().unwrap() = vec!["Recall", "Return"];
    nodes.give_back(&scene, away).unwrap();
    check(&mut client, &mut server, b"back");
    assert!(nodes.lost.lock().unwrap().is_empty());
}

#[test]
fn connection_that_ends_away_is_closed_for_its_client() {
    let scene = Scene::new();
    let nodes = Nodes::new(&scene);
    let (mut client, server) = connect(&scene);
    nodes.home.offer(TOKEN, NODE, server.try_clone().unwrap().into()).unwrap();
    let mut away = nodes.take(&scene).unwrap();
    away.write_all(b"last").unwrap();
    // This node's kernel then has no reason to wait (TIME-WAIT) when the connection is closed.
    client.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(away.read(&mut [0]).unwrap(), 0);
    // Its process is killed at home, and then its guest.
    nodes.home.withdraw(TOKEN);
    drop(server);
    drop(away);
    let mut all = Vec::new();
    client.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"last");
    drop(client);
    scene.node.run(|| nodes.guests.release(HOME, TOKEN, 1)).unwrap();
    assert_eq!((nodes.home.count(), nodes.guests.count()), (0, 0));
    let links = scene.node.run(|| Command::new("ip").args(["-o", "link"]).output().unwrap()).unwrap();
    let links = String::from_utf8_lossy(&links.stdout).into_owned();
    assert!(!links.contains("tern1."), "the namespace of home is gone: {links}");
}

#[test]
fn only_the_named_node_can_take_a_connection() {
    let scene = Scene::new();
    let nodes = Nodes::new(&scene);
    let (mut client, mut server) = connect(&scene);
    nodes.home.offer(TOKEN, NodeId(9), server.try_clone().unwrap().into()).unwrap();
    let error = nodes.take(&scene).unwrap_err().to_string();
    assert!(error.contains("does not offer"), "{error}");
    client.write_all(b"ping").unwrap();
    assert!(echo(&mut server, 1));
}
