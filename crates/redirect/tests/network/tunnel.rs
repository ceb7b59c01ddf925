//! Both directions of a connection go through a tunnel between home and the guest's node.

use crate::direct::{BULK, CLIENT_PORT, PORT, exchange, listen};
use crate::scene::{self, CLIENT, HOME, Scene, connect, ip, received, received_bytes, wait_for};
use rustix::event::{PollFd, PollFlags, poll};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use tern_redirect::{
    Change, Ends, Injector, MAX_TUNNEL_FRAME_LEN, NetworkInterface, NetworkNamespace, PathProbe, Table,
    Tunnel, TunnelEnd, probe_frame,
};

fn tunnel(machine: &NetworkNamespace, table: &mut Table, end: TunnelEnd) -> Tunnel {
    let tunnel = machine.run(|| Tunnel::create(table, "tern-tunnel", end).unwrap()).unwrap();
    tunnel.permit_packets(1500);
    tunnel
}

/// Carries frames from one end to the other, until told to stop.
fn carry(from: &Tunnel, to: &Tunnel, stop: &AtomicBool) {
    let mut frame = vec![0; MAX_TUNNEL_FRAME_LEN];
    let second = rustix::event::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    while !stop.load(Ordering::Acquire) {
        poll(&mut [PollFd::new(from, PollFlags::IN)], Some(&second)).unwrap();
        while let Ok(length) = from.read(&mut frame) {
            to.write(&frame[..length]).unwrap();
        }
    }
}

fn bytes_arrive_through_a_tunnel(version: usize) {
    let scene = Scene::new(version);
    let mut home = scene.home_table();
    let (mut node, namespace) = scene.guest_node();
    let ends =
        [tunnel(&scene.home, &mut home, TunnelEnd::Home), tunnel(&scene.node, &mut node, TunnelEnd::Guest)];
    let listener = listen(namespace.inside(), &scene);
    let connection = scene.connection(CLIENT_PORT, PORT);
    let (client_ip, home_ip) = (connection.client().ip(), connection.home().ip());
    let from = ends[0].interface().index;
    home.apply(&[
        Change::Forward(connection, ends[0].way_to(home_ip)),
        Change::Answer { from, connection, way: scene.way(&scene.home, CLIENT) },
    ])
    .unwrap();
    let from = namespace.outer().index;
    node.apply(&[
        Change::Forward(connection, namespace.way_in(home_ip)),
        Change::Answer { from, connection, way: ends[1].way_to(client_ip) },
    ])
    .unwrap();
    let before = [received(&scene.home, version), received_bytes(&scene.node)];
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| carry(&ends[0], &ends[1], &stop));
        scope.spawn(|| carry(&ends[1], &ends[0], &stop));
        let server = scope.spawn(|| exchange(listener.accept().unwrap().0, BULK));
        exchange(connect(&scene.client, &connection), BULK);
        server.join().unwrap();
        stop.store(true, Ordering::Release);
    });
    // The rest is neighbour discovery.
    assert!(received(&scene.home, version) - before[0] < 100, "packets that home's IP stack received");
    assert!(received_bytes(&scene.node) - before[1] < 10_000, "bytes that arrived at the node's card");
    let [home_end, node_end] = ends;
    scene.home.run(|| home_end.remove(&mut home).unwrap()).unwrap();
    scene.node.run(|| node_end.remove(&mut node).unwrap()).unwrap();
    assert!(home.elements().forwarded.is_empty() && home.elements().answers.is_empty());
    assert!(!ip(&scene.home, "-o link").contains("tern-tunnel"));
}

#[test]
fn ipv4_bytes_arrive_through_a_tunnel() {
    bytes_arrive_through_a_tunnel(0);
}

#[test]
fn ipv6_bytes_arrive_through_a_tunnel() {
    bytes_arrive_through_a_tunnel(1);
}

/// A member that has a connection of this home may send nothing else through the tunnel.
#[test]
fn only_answers_of_moved_connections_enter_at_home() {
    let scene = Scene::new(0);
    let mut home = scene.home_table();
    let end = tunnel(&scene.home, &mut home, TunnelEnd::Home);
    let connection = scene.connection(CLIENT_PORT, PORT);
    let from = end.interface().index;
    home.apply(&[
        Change::Forward(connection, end.way_to(connection.home().ip())),
        Change::Answer { from, connection, way: scene.way(&scene.home, CLIENT) },
    ])
    .unwrap();
    let other_port = Ends::new(connection.client(), scene.end(HOME, PORT + 1)).unwrap();
    let to_home = Ends::new(scene.end(CLIENT, CLIENT_PORT + 1), connection.home()).unwrap();
    let before = (received(&scene.home, 0), received(&scene.client, 0));
    let write = |packet: &Ends| {
        let mut frame = probe_frame(packet, &[0; 16]);
        // Behind the virtio_net_hdr of 10 bytes: addressed to this machine.
        frame[10..16].copy_from_slice(&end.interface().address);
        end.write(&frame).unwrap();
    };
    [connection, other_port.reversed(), to_home, to_home.reversed()].iter().for_each(write);
    write(&connection.reversed());
    wait_for("the answer", || Some(received(&scene.client, 0) > before.1));
    assert_eq!(received(&scene.client, 0), before.1 + 1);
    assert_eq!(received(&scene.home, 0), before.0);
}

/// A switch that checks addresses drops a packet of home's that another machine sends.
#[test]
fn probe_arrives_unless_the_network_drops_it() {
    let scene = Scene::new(0);
    let mut node = scene.node.run(|| Table::open(scene::TABLE).unwrap()).unwrap();
    let mut home = scene.home_table();
    let injector = scene.node.run(|| Injector::create(&mut node).unwrap()).unwrap();
    let mut sends = |number| {
        let token = [number; 16];
        let packet = PathProbe::connection(scene.address(HOME), token).reversed();
        node.apply(&[Change::Forward(packet, scene.way(&scene.node, HOME))]).unwrap();
        home.apply(&[Change::Hold(packet)]).unwrap();
        let listen = |token| {
            let card = NetworkInterface::find(scene::PHYSICAL).unwrap();
            PathProbe::listen(&card, &packet, token).unwrap()
        };
        let [probe, other] = scene.home.run(|| [listen(token), listen([9; 16])]).unwrap();
        injector.send_probe(&packet, &token).unwrap();
        (probe, other)
    };
    let (probe, other) = sends(1);
    wait_for("the packet", || Some(probe.has_arrived()));
    assert!(!other.has_arrived(), "a packet with another content counts");

    let filtered = PathProbe::connection(scene.address(HOME), [2; 16]).reversed();
    let mut switch = scene.switch.run(|| Table::open(scene::TABLE).unwrap()).unwrap();
    scene.switch.run(|| switch.attach("p3").unwrap()).unwrap();
    switch.apply(&[Change::Hold(filtered)]).unwrap();
    let (dropped, _) = sends(2);
    let (later, _) = sends(3);
    wait_for("the packet after it", || Some(later.has_arrived()));
    assert!(!dropped.has_arrived());
    assert_eq!(received(&scene.home, 0), 0, "packets that home's IP stack received");
    scene.node.run(|| injector.remove(&mut node).unwrap()).unwrap();
}
