//! Moves connections between two nodes of one segment, while their client talks on.

use crate::scene::*;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use tern_ids::NodeId;

#[test]
fn connection_moves_out_and_home_while_its_client_talks() {
    let scene = Scene::new(Network::Segment);
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
    let scene = Scene::new(Network::Segment);
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
    let scene = Scene::new(Network::Segment);
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
    let scene = Scene::new(Network::Segment);
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
    let scene = Scene::new(Network::Segment);
    let nodes = Nodes::new(&scene);
    let (mut client, mut server) = connect(&scene);
    nodes.home.offer(TOKEN, NodeId(9), server.try_clone().unwrap().into()).unwrap();
    let error = nodes.take(&scene).unwrap_err().to_string();
    assert!(error.contains("does not offer"), "{error}");
    client.write_all(b"ping").unwrap();
    assert!(echo(&mut server, 1));
}
