//! A client's connection to home's address is served by a socket in home's namespace on another node.

use crate::scene::{self, HOME, Scene, connect, counters, received, received_bytes, tcp_segments};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use tern_redirect::{Change, Ends, Injector, NetworkNamespace};

pub(crate) const PORT: u16 = 7000;
pub(crate) const CLIENT_PORT: u16 = 40_000;

/// Bytes in each direction; above the size of all socket buffers.
pub(crate) const BULK: usize = 24 << 20;

/// Byte number `at` of a stream.
fn byte(at: usize) -> u8 {
    (at ^ at >> 8 ^ at >> 16) as u8
}

/// Sends and checks a stream in both directions at once.
pub(crate) fn exchange(mut socket: TcpStream, len: usize) {
    let mut reader = socket.try_clone().unwrap();
    let received = thread::spawn(move || {
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let bytes: Vec<u8> = (0..len).map(byte).collect();
    socket.write_all(&bytes).unwrap();
    socket.shutdown(Shutdown::Write).unwrap();
    assert!(received.join().unwrap() == bytes, "the peer's bytes arrived unchanged");
}

pub(crate) fn listen(inside: &NetworkNamespace, scene: &Scene) -> TcpListener {
    let at = scene.end(HOME, PORT);
    inside.run(|| TcpListener::bind(at).unwrap()).unwrap()
}

fn bytes_arrive_and_home_sees_no_packet(version: usize) {
    let scene = Scene::new(version);
    let connection = scene.connection(CLIENT_PORT, PORT);
    let mut home = scene.home_table();
    let (mut node, namespace) = scene.guest_node();
    let listener = listen(namespace.inside(), &scene);
    node.apply(&scene.node_changes(&namespace, connection)).unwrap();
    home.apply(&[Change::Forward(connection, scene.way(&scene.home, scene::NODE))]).unwrap();

    let home_before = tcp_segments(&scene.home);
    let node_before = tcp_segments(&scene.node);
    let server = thread::spawn(move || listener.accept().unwrap().0);
    let mut client = connect(&scene.client, &connection);
    let mut served = server.join().unwrap();
    client.set_nodelay(true).unwrap();
    served.set_nodelay(true).unwrap();
    for small in 0..=255 {
        let mut got = [0];
        client.write_all(&[small]).unwrap();
        served.read_exact(&mut got).unwrap();
        served.write_all(&[!got[0]]).unwrap();
        client.read_exact(&mut got).unwrap();
        assert_eq!(got, [!small]);
    }
    let bytes_before = received_bytes(&scene.home);
    let server = thread::spawn(move || exchange(served, BULK));
    exchange(client, BULK);
    server.join().unwrap();

    // The client's bytes pass home's interface, the answers do not.
    let passed = received_bytes(&scene.home) - bytes_before;
    assert!((BULK as u64..BULK as u64 * 3 / 2).contains(&passed), "{passed} bytes passed home");
    assert_eq!(tcp_segments(&scene.home), home_before, "segments that home's TCP received");
    assert_eq!(tcp_segments(&scene.node), node_before, "segments that the node's own TCP received");
    let inside = counters(namespace.inside());
    assert_eq!((inside["Tcp:InErrs"], inside["TcpExt:TCPTimeouts"]), (0, 0));
    assert!(inside["Tcp:InSegs"] > 300, "{inside:?}");
    assert_eq!(counters(&scene.client)["Tcp:InErrs"], 0);
    // All that home's stack received is neighbour discovery, and that only with IPv6.
    assert!(received(&scene.home, version) < 100, "{}", received(&scene.home, version));
}

#[test]
fn ipv4_bytes_arrive_and_home_sees_no_packet() {
    bytes_arrive_and_home_sees_no_packet(0);
}

#[test]
fn ipv6_bytes_arrive_and_home_sees_no_packet() {
    bytes_arrive_and_home_sees_no_packet(1);
}

/// A process on the guest's node itself is the client.
#[test]
fn client_on_the_guests_node_is_served() {
    let scene = Scene::new(0);
    let mut home = scene.home_table();
    let (mut node, namespace) = scene.guest_node();
    let injector = scene.node.run(|| Injector::create(&mut node).unwrap()).unwrap();
    let listener = listen(namespace.inside(), &scene);
    let client_end = scene.end(scene::NODE, CLIENT_PORT);
    let connection = Ends::new(client_end, scene.end(HOME, PORT)).unwrap();
    node.apply(&[
        Change::Forward(connection, namespace.way_in(connection.home().ip())),
        Change::Answer {
            from: namespace.outer().index,
            connection,
            way: injector.way_to_local(client_end.ip()),
        },
    ])
    .unwrap();
    home.apply(&[Change::Forward(connection, scene.way(&scene.home, scene::NODE))]).unwrap();
    let server = thread::spawn(move || exchange(listener.accept().unwrap().0, BULK));
    exchange(connect(&scene.node, &connection), BULK);
    server.join().unwrap();
    scene.node.run(|| injector.remove(&mut node).unwrap()).unwrap();
}
