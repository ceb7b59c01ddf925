//! Packets that arrive while their connection moves are kept, and given to where it then is.

use crate::scene::{self, NODE, PHYSICAL, Scene, connect, counters, received_bytes, tcp_segments, wait_for};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::{self, JoinHandle};
use tern_redirect::{Change, Ends, Hold, Injector, NetworkInterface, NetworkNamespace, Released, Table};

const PORT: u16 = 7000;
const CLIENT_PORT: u16 = 40_000;
const MAX_HELD_BYTES: usize = 8 << 20;

/// Bytes that a client's TCP sends before the first acknowledgement: at least nine full segments
/// (RFC 6928).
const INITIAL_WINDOW: u64 = 9 * 1400;

/// More than the initial window, and odd: a checksum then covers an odd number of bytes.
const STREAM_LEN: u32 = 1_000_001;

/// A connection whose packets are being held at home.
struct HeldConnection {
    scene: Scene,
    connection: Ends,
    home: Table,
    injector: Injector,
    hold: Option<Hold>,
    served: TcpStream,
    client: Option<TcpStream>,
}

impl HeldConnection {
    /// `listener_in` is the namespace of the socket, and `forward` the way to it.
    fn new(
        scene: Scene,
        mut home: Table,
        listener_in: &NetworkNamespace,
        forward: Option<Change>,
        max_bytes: usize,
        timeout: &str,
    ) -> Self {
        let connection = scene.connection(CLIENT_PORT, PORT);
        let injector = scene.injector(&mut home);
        home.apply(forward.as_slice()).unwrap();
        set_retransmission_timeout(&scene, timeout);
        let listener = listener_in.run(|| TcpListener::bind(connection.home()).unwrap()).unwrap();
        let client = connect(&scene.client, &connection);
        let served = listener.accept().unwrap().0;
        client.set_nodelay(true).unwrap();
        let open =
            || Hold::open(&[NetworkInterface::find(PHYSICAL).unwrap()], &[connection], max_bytes).unwrap();
        let hold = scene.home.run(open).unwrap();
        home.apply(&[Change::Hold(connection)]).unwrap();
        Self { scene, connection, home, injector, hold: Some(hold), served, client: Some(client) }
    }

    /// Sends a stream; returns when the client has used up its window.
    fn send_stream(&mut self) -> (Vec<u8>, JoinHandle<TcpStream>) {
        let bytes: Vec<u8> = (0..STREAM_LEN).map(|n| (n ^ n >> 8 ^ n >> 16) as u8).collect();
        let expected = bytes.clone();
        let mut client = self.client.take().unwrap();
        let before = received_bytes(&self.scene.home);
        let writer = thread::spawn(move || {
            client.write_all(&bytes).unwrap();
            client
        });
        let home = &self.scene.home;
        wait_for("held segments", || Some(received_bytes(home) >= before + INITIAL_WINDOW));
        (expected, writer)
    }

    fn release(&mut self, change: Change) -> Released {
        let hold = self.hold.take().unwrap();
        let (injector, home) = (&self.injector, &mut self.home);
        self.scene.home.run(|| hold.release(injector, home, &[change]).unwrap()).unwrap()
    }

    /// All bytes arrived, and the client did not wait for a timeout.
    fn check_stream(&mut self, (expected, writer): (Vec<u8>, JoinHandle<TcpStream>)) {
        let mut got = vec![0; expected.len()];
        self.served.read_exact(&mut got).unwrap();
        assert!(got == expected, "the client's bytes arrived unchanged");
        writer.join().unwrap();
        // A segment that overtook held ones may cause a fast retransmission, which delays nothing.
        assert_eq!(counters(&self.scene.client)["TcpExt:TCPTimeouts"], 0, "retransmission timeouts");
    }
}

/// A retransmission timeout that no test reaches, also on a slow machine.
const SLOW: &str = "20s";

/// Sets the client's least retransmission timeout, and switches the earlier probe of RFC 8985 off.
/// Frames that are not given back then cost one timeout.
fn set_retransmission_timeout(scene: &Scene, timeout: &str) {
    // BBR puts one segment into a frame if the first round trip was slow, and Reno at least two.
    for (setting, value) in [("tcp_early_retrans", "0"), ("tcp_congestion_control", "reno")] {
        let set = || std::fs::write(format!("/proc/sys/net/ipv4/{setting}"), value);
        scene.client.run(set).unwrap().unwrap();
    }
    let subnet = ["10.9.0.0/24", "fd09::/64"][scene.version];
    let version = ["-4", "-6"][scene.version];
    // The route that the kernel made with the address has another protocol number.
    scene::ip(&scene.client, &format!("{version} route del {subnet} dev eth0"));
    scene::ip(&scene.client, &format!("{version} route add {subnet} dev eth0 rto_min {timeout}"));
}

/// The move is cancelled: the socket is still at home, and the held frames reach home's own stack.
fn cancelled_move_costs_no_timeout(version: usize) {
    let scene = Scene::new(version);
    // The strictest setting that an owner of a machine may have.
    let strict = || std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1");
    scene.home.run(strict).unwrap().unwrap();
    let (table, inside) = (scene.home_table(), scene.home.try_clone().unwrap());
    let mut held = HeldConnection::new(scene, table, &inside, None, MAX_HELD_BYTES, SLOW);
    let segments = tcp_segments(&held.scene.home);
    let stream = held.send_stream();
    assert_eq!(tcp_segments(&held.scene.home), segments, "segments while the connection is held");
    let released = held.release(Change::Forget(held.connection));
    assert!(released.frames > 0 && released.lost == 0, "{released:?}");
    held.check_stream(stream);
    assert_eq!(counters(&held.scene.home)["Tcp:InErrs"], 0);
}

#[test]
fn ipv4_cancelled_move_costs_no_timeout() {
    cancelled_move_costs_no_timeout(0);
}

#[test]
fn ipv6_cancelled_move_costs_no_timeout() {
    cancelled_move_costs_no_timeout(1);
}

/// The connection is served on the node from the start. Its packets are held at home for a while, as
/// during a move, and then given to the node. `large`: the client's frames carry several segments.
fn held_frames_reach_the_node(version: usize, large: bool) {
    let scene = Scene::new(version);
    if !large {
        scene::ip(&scene.client, "link set eth0 gso_max_segs 1");
    }
    let connection = scene.connection(CLIENT_PORT, PORT);
    let (mut node, namespace) = scene.guest_node();
    node.apply(&scene.node_changes(&namespace, connection)).unwrap();
    let forward = Change::Forward(connection, scene.way(&scene.home, NODE));
    let table = scene.home_table();
    let mut held = HeldConnection::new(scene, table, namespace.inside(), Some(forward), MAX_HELD_BYTES, SLOW);
    let before = tcp_segments(namespace.inside());
    let stream = held.send_stream();
    assert_eq!(tcp_segments(namespace.inside()), before, "segments while the connection is held");
    let released = held.release(forward);
    assert_eq!(released.lost, 0, "{released:?}");
    assert_eq!(released.bytes > released.frames * 1514, large, "{released:?}");
    held.check_stream(stream);
    assert_eq!(counters(namespace.inside())["Tcp:InErrs"], 0);
    assert!(held.home.elements().held.is_empty());
}

#[test]
fn ipv4_held_segments_reach_the_node() {
    held_frames_reach_the_node(0, false);
}

#[test]
fn ipv4_held_frames_of_several_segments_reach_the_node() {
    held_frames_reach_the_node(0, true);
}

#[test]
fn ipv6_held_segments_reach_the_node() {
    held_frames_reach_the_node(1, false);
}

#[test]
fn ipv6_held_frames_of_several_segments_reach_the_node() {
    held_frames_reach_the_node(1, true);
}

/// Frames beyond the limit are dropped and counted, and the others arrive.
#[test]
fn held_frames_are_limited() {
    let scene = Scene::new(0);
    scene::ip(&scene.client, "link set eth0 gso_max_segs 1");
    let (table, inside) = (scene.home_table(), scene.home.try_clone().unwrap());
    let mut held = HeldConnection::new(scene, table, &inside, None, 4096, SLOW);
    let (expected, _writer) = held.send_stream();
    let released = held.release(Change::Forget(held.connection));
    assert!(released.frames > 0 && released.lost > 0, "{released:?}");
    let mut got = vec![0; 1000];
    held.served.read_exact(&mut got).unwrap();
    assert!(got == expected[..1000]);
}

/// Without a hold the dropped segments cost a timeout: the tests above can fail.
#[test]
fn dropped_frames_cost_a_timeout() {
    let scene = Scene::new(0);
    let (table, inside) = (scene.home_table(), scene.home.try_clone().unwrap());
    let mut held = HeldConnection::new(scene, table, &inside, None, MAX_HELD_BYTES, "50ms");
    let _stream = held.send_stream();
    drop(held.hold.take());
    held.home.apply(&[Change::Forget(held.connection)]).unwrap();
    let client = &held.scene.client;
    wait_for("timeout", || Some(counters(client)["TcpExt:TCPTimeouts"] > 0));
}
