//! Cut, heal, kill, restart. Needs root.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::io::{Read, Write};
use std::time::Duration;
use support::{lab, output_of, reaches, sh, tcp_connection, timed_out, wait_until};
use tern_lab::{Cable, Lab, LabError};

fn reach(lab: &Lab, from: u16, to: u16) -> bool {
    reaches(&lab.node(from), &lab.node(to))
}

#[test]
fn a_cut_is_silent_and_heals() {
    for link in ["switch", "p2p", "switch:1ms"] {
        let lab = lab(link, 2);
        let (mut near, mut far) = tcp_connection(&lab.node(1), &lab.node(2), 5001);
        far.write_all(b"hello").unwrap();
        let mut buffer = [0; 16];
        assert_eq!(near.read(&mut buffer).unwrap(), 5);
        lab.cut(Cable::Node(2)).unwrap();
        // Data and the end of the connection, sent during the cut.
        far.write_all(b"bye").unwrap();
        drop(far);
        near.set_read_timeout(Some(Duration::from_millis(700))).unwrap();
        let received = near.read(&mut buffer);
        assert!(received.as_ref().is_err_and(timed_out), "{link}: {received:?}");
        assert!(!reach(&lab, 1, 2), "{link}");
        lab.heal(Cable::Node(2)).unwrap();
        near.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut rest = Vec::new();
        near.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"bye", "{link}");
        wait_until("it is healed", || reach(&lab, 1, 2) && reach(&lab, 2, 1));
    }
}

#[test]
fn two_nodes_can_be_cut_from_each_other_only() {
    for link in ["switch", "p2p", "hub", "switch:1ms"] {
        let lab = lab(link, 3);
        lab.cut(Cable::between(2, 1)).unwrap();
        lab.cut(Cable::between(1, 2)).unwrap();
        assert!(!reach(&lab, 1, 2) && !reach(&lab, 2, 1), "{link}");
        for (a, b) in [(1, 3), (3, 1), (2, 3), (3, 2)] {
            assert!(reach(&lab, a, b), "{link}: {a} does not reach {b}");
        }
        lab.heal(Cable::between(1, 2)).unwrap();
        wait_until("they are healed", || reach(&lab, 1, 2) && reach(&lab, 2, 1));
        lab.cut(Cable::between(1, 3)).unwrap();
        lab.cut(Cable::Node(2)).unwrap();
        assert!(!reach(&lab, 1, 3) && !reach(&lab, 3, 2), "{link}");
        lab.heal_all().unwrap();
        wait_until("all is healed", || reach(&lab, 1, 3) && reach(&lab, 2, 3));
    }
}

#[test]
fn one_direction_can_be_cut_alone() {
    for link in ["switch", "hub"] {
        let lab = lab(link, 3);
        // Fills both nodes' ARP caches: an ARP exchange needs both directions.
        assert!(reach(&lab, 1, 2) && reach(&lab, 2, 1), "{link}");
        lab.cut(Cable::OneWay(1, 2)).unwrap();
        assert!(!reach(&lab, 1, 2) && reach(&lab, 2, 1), "{link}");
        assert!(reach(&lab, 1, 3) && reach(&lab, 3, 2), "{link}");
        lab.heal(Cable::OneWay(1, 2)).unwrap();
        wait_until("it is healed", || reach(&lab, 1, 2) && reach(&lab, 2, 1));
    }
    let lab = lab("p2p", 2);
    assert!(matches!(lab.cut(Cable::OneWay(1, 2)), Err(LabError::BadOption(_))));
}

#[test]
fn invalid_cables_are_rejected() {
    let lab = lab("switch", 2);
    assert!(matches!(lab.cut(Cable::Node(3)), Err(LabError::NoNode { node: 3, nodes: 2 })));
    assert!(matches!(lab.cut(Cable::Node(0)), Err(LabError::NoNode { .. })));
    assert!(matches!(lab.cut(Cable::between(1, 1)), Err(LabError::BadOption(_))));
}

#[test]
fn killed_node_sends_nothing_and_restarts_with_its_files() {
    for link in ["switch", "p2p:100mbit", "switch:1ms"] {
        let lab = lab(link, 3);
        let two = lab.node(2);
        output_of(&two, "echo kept > /etc/kept");
        two.start_daemon("sleep", &["1000"], "sleep").unwrap();
        let boot = output_of(&two, "cat /proc/sys/kernel/random/boot_id");
        let (mut near, far) = tcp_connection(&lab.node(1), &two, 5001);
        lab.kill(2).unwrap();
        drop(far);
        assert!(two.processes().unwrap().is_empty(), "{link}");
        assert!(matches!(two.init_pid(), Err(LabError::NodeDown(2))));
        assert_eq!(sh(&two, "true").status.code(), Some(125));
        near.set_read_timeout(Some(Duration::from_millis(700))).unwrap();
        let received = near.read(&mut [0; 16]);
        assert!(received.as_ref().is_err_and(timed_out), "{link}: {received:?}");
        assert!(reach(&lab, 1, 3), "{link}");
        lab.kill(2).unwrap();
        lab.restart(2).unwrap();
        assert_eq!(output_of(&two, "cat /etc/kept"), "kept");
        assert_ne!(output_of(&two, "cat /proc/sys/kernel/random/boot_id"), boot);
        wait_until("it is back", || reach(&lab, 1, 2) && reach(&lab, 2, 3));
    }
}

#[test]
fn restart_keeps_cuts() {
    for link in ["switch", "p2p"] {
        let lab = lab(link, 3);
        lab.cut(Cable::between(1, 2)).unwrap();
        lab.restart(2).unwrap();
        assert!(!reach(&lab, 1, 2) && !reach(&lab, 2, 1), "{link}");
        assert!(reach(&lab, 2, 3), "{link}");
        lab.heal(Cable::Node(1)).unwrap();
        wait_until("it is healed", || reach(&lab, 1, 2) && reach(&lab, 2, 1));
    }
}
