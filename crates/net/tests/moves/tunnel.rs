//! Connections move between nodes whose network does not carry their packets directly.

use crate::scene::{LIMIT, NODE, Network, Nodes, Scene, TOKEN, connect, counter, echo, ip, talk};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

/// Moves a connection out and home while its client talks. No byte and no packet is lost.
fn moves(network: Network, tunnels: u64) {
    let scene = Scene::new(network);
    let nodes = Nodes::new(&scene);
    let (client, mut server) = connect(&scene);
    nodes.home.offer(TOKEN, NODE, server.try_clone().unwrap().into()).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let talker = scope.spawn(|| talk(client, &stop));
        for _ in 0..10 {
            assert!(echo(&mut server, 20));
            let mut away = nodes.take(&scene).unwrap();
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
    assert_eq!(nodes.tunnels.load(Ordering::Relaxed), tunnels, "links of tunnels");
}

#[test]
fn connection_moves_directly_on_one_segment() {
    moves(Network::Segment, 0);
}

#[test]
fn connection_moves_through_a_tunnel_behind_a_router() {
    moves(Network::Routed, 1);
}

#[test]
fn connection_moves_through_a_tunnel_if_the_segment_is_none() {
    moves(Network::ProxyArp, 1);
}

/// An administrator deletes the interface at one end. The next connection gets a new tunnel.
#[test]
fn deleted_interface_is_replaced() {
    let scene = Scene::new(Network::Routed);
    let nodes = Nodes::new(&scene);
    let (mut client, mut server) = connect(&scene);
    nodes.home.offer(TOKEN, NODE, server.try_clone().unwrap().into()).unwrap();
    let check = |client: &mut TcpStream, server: &mut TcpStream| {
        client.write_all(b"text").unwrap();
        assert!(echo(server, 1));
        client.read_exact(&mut [0; 4]).unwrap();
    };
    let mut away = nodes.take(&scene).unwrap();
    check(&mut client, &mut away);
    nodes.give_back(&scene, away).unwrap();
    for (place, interface) in [(&*scene.home, "ternh2"), (&scene.node, "terng1")] {
        let links = nodes.tunnels.load(Ordering::Relaxed);
        ip(place, &format!("link del {interface}"));
        let until = Instant::now() + LIMIT;
        // Until the deletion is noticed, a connection may still be taken.
        while nodes.tunnels.load(Ordering::Relaxed) == links {
            assert!(Instant::now() < until, "no new link");
            let away = nodes.take(&scene).unwrap();
            nodes.give_back(&scene, away).unwrap();
        }
        check(&mut client, &mut server);
        let mut away = nodes.take(&scene).unwrap();
        check(&mut client, &mut away);
        nodes.give_back(&scene, away).unwrap();
    }
}
