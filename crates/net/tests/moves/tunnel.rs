//! Connections move between nodes whose network does not carry their packets directly.

use crate::scene::{NODE, Network, Nodes, Scene, TOKEN, connect, counter, echo, talk};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

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
