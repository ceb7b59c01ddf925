//! Tables and namespaces over restarts of their process, and their removal.

use crate::scene::{self, CLIENT, NODE, OUTER, Scene, TABLE, connect, ip, wait_for};
use std::io::{Read, Write};
use std::net::TcpListener;
use tern_redirect::{Change, Elements, Namespace, NetworkNamespace, RedirectError, Table, Way};

const PORT: u16 = 7000;
const CLIENT_PORT: u16 = 40_000;

/// Opens the table as a restarted process does. The earlier owner's socket is open for a moment longer
/// if another test starts a program just then: the new process has a copy of it until it executes.
fn reopen(machine: &NetworkNamespace) -> Table {
    let mut table = None;
    wait_for("table without an owner", || {
        table = machine.run(|| Table::open(TABLE)).unwrap().ok();
        Some(table.is_some())
    });
    table.unwrap()
}

#[test]
fn table_is_found_again_and_removal_leaves_nothing() {
    let scene = Scene::new(0);
    let mut home = scene.home_table();
    let injector = scene.injector(&mut home);
    let (mut node, namespace) = scene.guest_node();
    let way = scene.way(&scene.home, NODE);
    let connections = [scene.connection(1, 80), scene.connection(2, 80), scene.connection(3, 80)];
    let ipv6 = Scene { version: 1, ..scene };
    let connection6 = ipv6.connection(1, 80);
    let way6 = ipv6.way(&ipv6.home, NODE);
    let scene = ipv6;
    home.apply(&[
        Change::Hold(connections[0]),
        Change::Forward(connections[1], way),
        Change::Hold(connections[2]),
        Change::Forward(connections[2], way),
        Change::Forward(connection6, way6),
    ])
    .unwrap();
    let expected = Elements {
        held: [connections[0]].into(),
        forwarded: [(connections[1], way), (connections[2], way), (connection6, way6)].into(),
        answers: [].into(),
    };
    assert_eq!(*home.elements(), expected);

    // A second owner is refused while the first one runs.
    let second = scene.home.run(|| Table::open(TABLE)).unwrap();
    if home.is_protected() {
        assert!(second.unwrap_err().to_string().contains("another process owns"));
    }
    drop(home);
    let mut home = reopen(&scene.home);
    assert_eq!(*home.elements(), expected, "after a restart");

    // A repeated change is no error; a new way replaces the old one.
    let other_way = Way { next_hop: scene.address(CLIENT), ..way6 };
    home.apply(&[Change::Hold(connections[0]), Change::Forward(connection6, other_way)]).unwrap();
    home.apply(&[Change::Forget(connections[1]), Change::Forget(connections[1])]).unwrap();
    assert!(home.apply(&[Change::Forward(connection6, way)]).is_err(), "an IPv4 way of an IPv6 connection");
    drop(home);
    let mut home = reopen(&scene.home);
    assert_eq!(home.elements().forwarded, [(connections[2], way), (connection6, other_way)].into());

    node.apply(&scene.node_changes(&namespace, connection6)).unwrap();
    assert_eq!(node.elements().answers.len(), 1);
    scene.node.run(|| namespace.remove(&mut node).unwrap()).unwrap();
    assert_eq!(*node.elements(), Elements::default(), "connections of a removed namespace");
    scene.home.run(|| injector.remove(&mut home).unwrap()).unwrap();
    home.remove().unwrap();
    node.remove().unwrap();
    for machine in [&scene.home, &scene.node] {
        let links = ip(machine, "-o link");
        assert!(!links.contains("tern"), "{links}");
        let table = reopen(machine);
        assert_eq!(*table.elements(), Elements::default(), "a new table");
        table.remove().unwrap();
    }
}

/// A daemon that ends without removing anything is followed by one that adopts the namespace through
/// a socket in it.
#[test]
fn namespace_is_adopted_after_a_restart() {
    let scene = Scene::new(0);
    let connection = scene.connection(CLIENT_PORT, PORT);
    let mut home = scene.home_table();
    let (mut node, namespace) = scene.guest_node();
    node.apply(&scene.node_changes(&namespace, connection)).unwrap();
    home.apply(&[Change::Forward(connection, scene.way(&scene.home, NODE))]).unwrap();
    let listener = namespace.inside().run(|| TcpListener::bind(connection.home()).unwrap()).unwrap();
    let mut client = connect(&scene.client, &connection);
    let mut served = listener.accept().unwrap().0;
    drop(node);
    namespace.keep();

    let mut node = reopen(&scene.node);
    let inside = NetworkNamespace::of_socket(&served).unwrap();
    let namespace = scene.node.run(|| Namespace::adopt(&mut node, OUTER, inside).unwrap()).unwrap();
    let mut got = [0; 4];
    client.write_all(b"ping").unwrap();
    served.read_exact(&mut got).unwrap();
    served.write_all(&got).unwrap();
    client.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"ping");
    scene.node.run(|| namespace.remove(&mut node).unwrap()).unwrap();
    assert!(!ip(&scene.node, "-o link").contains(OUTER));
}

#[test]
fn dropped_namespace_leaves_no_link_and_no_namespace() {
    let scene = Scene::new(0);
    let (mut node, namespace) = scene.guest_node();
    // The kernel numbers the namespaces in which peers of this one's links are: the switch's too.
    assert_eq!(ip(&scene.node, "netns list-id").lines().count(), 2);
    let twice = scene.node.run(|| Namespace::create(&mut node, OUTER, &[], 1500)).unwrap();
    assert!(matches!(twice, Err(RedirectError::Refused { .. })), "a second namespace with this name");
    assert!(ip(&scene.node, "-o link").contains(OUTER), "the first one stays");
    drop(namespace);
    assert!(!ip(&scene.node, "-o link").contains(OUTER));
    wait_for("end of the namespace", || Some(ip(&scene.node, "netns list-id").lines().count() == 1));
    // The name can be used again, whether or not the kernel has kept the old chain.
    let addresses = [scene.address(scene::HOME)];
    let again = scene.node.run(|| Namespace::create(&mut node, OUTER, &addresses, 1500).unwrap()).unwrap();
    assert_eq!(again.outer().mtu, 1500);
}

#[test]
fn failed_namespace_leaves_nothing() {
    let scene = Scene::new(0);
    let mut node = reopen(&scene.node);
    // The second one of two equal addresses is refused.
    let addresses = [scene.address(scene::HOME); 2];
    let refused = scene.node.run(|| Namespace::create(&mut node, OUTER, &addresses, 1500)).unwrap();
    assert!(refused.unwrap_err().to_string().contains("name each of home's addresses once"));
    assert!(!ip(&scene.node, "-o link").contains(OUTER));
    wait_for("end of the namespace", || Some(ip(&scene.node, "netns list-id").lines().count() == 1));
}
