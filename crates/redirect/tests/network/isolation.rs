//! Only packets of the given connections leave a home's namespace.

use crate::scene::{self, NODE, OUTER, Scene, ip, received, wait_for};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use tern_redirect::{Change, NetworkNamespace, probe};

const PORT: u16 = 7000;
const CLIENT_PORT: u16 = 40_000;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// A packet with this source, destination and protocol, and 20 bytes that begin with two ports.
fn packet(protocol: u8, source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let mut packet = match (source.ip(), destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            // The kernel fills in length, identification and checksum: raw(7).
            let mut header = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, protocol, 0, 0];
            header.extend(source.octets());
            header.extend(destination.octets());
            header
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut header = vec![0x60, 0, 0, 0, 0, 20, protocol, 64];
            header.extend(source.octets());
            header.extend(destination.octets());
            header
        }
        _ => panic!("addresses of two versions"),
    };
    packet.extend(source.port().to_be_bytes());
    packet.extend(destination.port().to_be_bytes());
    packet.extend([0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x10, 0, 0, 0, 0, 0, 0]);
    packet
}

fn send(inside: &NetworkNamespace, packet: &[u8], destination: SocketAddr) {
    let family = if destination.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    inside
        .run(|| {
            let socket =
                socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, Some(ipproto::RAW)).unwrap();
            let to = SocketAddr::new(destination.ip(), 0);
            sendto(&socket, packet, SendFlags::empty(), &to).unwrap();
        })
        .unwrap();
}

/// Numbers of packets that an interface received and sent.
fn packets(namespace: &NetworkNamespace, interface: &str) -> (u64, u64) {
    let text = scene::read(namespace, "/proc/thread-self/net/dev").unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix(interface)?.strip_prefix(':')).unwrap();
    let numbers: Vec<u64> = line.split_whitespace().map(|n| n.parse().unwrap()).collect();
    (numbers[1], numbers[9])
}

fn only_given_connections_leave(version: usize) {
    let scene = Scene::new(version);
    let connection = scene.connection(CLIENT_PORT, PORT);
    let (mut node, namespace) = scene.guest_node();
    node.apply(&scene.node_changes(&namespace, connection)).unwrap();
    let inside = namespace.inside();
    // A second home's connection, on the same node.
    let other_home: [IpAddr; 2] = ["10.9.0.9".parse().unwrap(), "fd09::9".parse().unwrap()];
    let (client, home) = (connection.client(), connection.home());
    let at = SocketAddr::new;
    let stray = [
        (TCP, at(home.ip(), PORT + 1), client),
        (TCP, home, at(client.ip(), CLIENT_PORT + 1)),
        (TCP, home, at(scene.address(NODE), CLIENT_PORT)),
        (TCP, at(other_home[version], PORT), client),
        (TCP, at(scene.address(NODE), PORT), client),
        (TCP, at(client.ip(), CLIENT_PORT), home),
        (UDP, home, client),
        ([ICMP, ICMPV6][version], home, client),
    ];
    // Neighbours are found before, so that the node sends nothing of its own.
    send(inside, &packet(TCP, home, client), client);
    wait_for("packet of the connection", || Some(scene::tcp_segments(&scene.client) > 0));

    let (arrived, _) = packets(&scene.node, OUTER);
    let node_received = from_outer(&scene);
    let tcp_before = scene::tcp_segments(&scene.client);
    let mut number = 0;
    for (protocol, source, destination) in stray {
        // A packet for home's own address stays inside, on loopback.
        send(inside, &packet(protocol, source, destination), destination);
        number += u64::from(destination.ip() != home.ip());
    }
    // Broadcast and ARP, which the namespace does not use by itself.
    if version == 0 {
        ip(inside, "link set home arp on");
        let broadcast = SocketAddr::from((Ipv4Addr::new(10, 9, 0, 77), 9));
        send(inside, &packet(UDP, home, broadcast), broadcast);
        number += 1;
        ip(inside, "link set home arp off");
    }
    wait_for("packets at the outer end", || Some(packets(&scene.node, OUTER).0 >= arrived + number));
    // A packet of the connection comes after them, and the interface keeps the order.
    send(inside, &packet(TCP, home, client), client);
    wait_for("packet of the connection", || Some(scene::tcp_segments(&scene.client) > tcp_before));
    assert_eq!(scene::tcp_segments(&scene.client), tcp_before + 1, "TCP segments at the client");
    let stack = scene::counters(&scene.client);
    let udp = ["Udp:NoPorts", "Udp6NoPorts"][version];
    assert_eq!(stack[udp], 0, "datagrams at the client");
    assert_eq!(stack["Icmp:InMsgs"], 0, "ICMP at the client");
    assert_eq!(from_outer(&scene), node_received, "packets in the node's IP stack");

    // After the connection is forgotten, nothing of it leaves either.
    node.apply(&[Change::ForgetAnswer { from: namespace.outer().index, connection }]).unwrap();
    let (arrived, _) = packets(&scene.node, OUTER);
    send(inside, &packet(TCP, home, client), client);
    wait_for("packet at the outer end", || Some(packets(&scene.node, OUTER).0 > arrived));
    assert_eq!(scene::tcp_segments(&scene.client), tcp_before + 1, "TCP segments at the client");
}

/// Number of packets that the node's IP stack received: with IPv6 from the outer end, with IPv4 from
/// all interfaces.
fn from_outer(scene: &Scene) -> u64 {
    if scene.version == 0 {
        return received(&scene.node, 0);
    }
    let text = scene::read(&scene.node, &format!("/proc/thread-self/net/dev_snmp6/{OUTER}")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Ip6InReceives")).unwrap();
    line.trim().parse().unwrap()
}

#[test]
fn ipv4_only_given_connections_leave() {
    only_given_connections_leave(0);
}

#[test]
fn ipv6_only_given_connections_leave() {
    only_given_connections_leave(1);
}

#[test]
fn probe_finds_all_means_as_root() {
    let findings = probe();
    for finding in &findings {
        println!("{}: {} {}", finding.name, finding.possible, finding.explanation);
        assert!(finding.possible || finding.optional, "{finding:?}");
    }
    assert_eq!(findings.len(), 8);
}
