//! The network between nodes: reachability, rate, delay and loss. Needs root.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::io::{Read, Write};
use std::time::{Duration, Instant};
use support::{lab, output_of, reaches, start_lab, tcp_connection, udp_socket};
use tern_lab::{Lab, LabOptions};

#[test]
fn every_node_reaches_every_other() {
    for link in ["switch", "switch:1ms", "hub", "hub:10mbit,1ms", "p2p", "p2p:100mbit", "p2p:1ms"] {
        let lab = lab(link, 3);
        for from in lab.nodes() {
            for to in lab.nodes().filter(|to| to.number() != from.number()) {
                assert!(reaches(&from, &to), "{link}: {} does not reach {}", from.number(), to.number());
            }
        }
    }
}

/// Mbit/s from node 1 to node 2, over at least this many bytes.
fn rate(lab: &Lab, bytes: usize) -> f64 {
    let (mut near, mut far) = tcp_connection(&lab.node(1), &lab.node(2), 5001);
    let sender = std::thread::spawn(move || near.write_all(&vec![7; bytes]).unwrap());
    let mut buffer = vec![0; 65_536];
    // The first tenth is not counted: it may be sent out of full buckets.
    let (mut got, mut start) = (0, None);
    loop {
        let n = far.read(&mut buffer).unwrap();
        if n == 0 {
            break;
        }
        got += n;
        if start.is_none() && got > bytes / 10 {
            start = Some((Instant::now(), got));
        }
    }
    sender.join().unwrap();
    let (start, before) = start.unwrap();
    (got - before) as f64 * 8.0 / 1e6 / start.elapsed().as_secs_f64()
}

#[test]
fn links_have_the_requested_rate() {
    for link in ["switch:20mbit", "p2p:20mbit", "hub:20mbit", "switch:20mbit,1ms"] {
        let rate = rate(&lab(link, 2), 3_000_000);
        assert!((10.0..24.0).contains(&rate), "{link} has {rate:.1} Mbit/s");
    }
    let free = rate(&lab("switch", 2), 30_000_000);
    assert!(free > 100.0, "an unlimited link has {free:.1} Mbit/s");
}

/// The median round trip of a datagram between nodes 1 and 2.
fn round_trip(lab: &Lab) -> Duration {
    let (near, far) = (udp_socket(&lab.node(1), 0), udp_socket(&lab.node(2), 7));
    far.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    near.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    near.connect((lab.node(2).address(), 7)).unwrap();
    let echo = std::thread::spawn(move || {
        let mut buffer = [0; 64];
        for _ in 0..31 {
            let (n, from) = far.recv_from(&mut buffer).unwrap();
            far.send_to(&buffer[..n], from).unwrap();
        }
    });
    let mut times: Vec<_> = (0..31)
        .map(|_| {
            let start = Instant::now();
            near.send(b"echo").unwrap();
            near.recv(&mut [0; 64]).unwrap();
            start.elapsed()
        })
        .collect();
    echo.join().unwrap();
    times.sort();
    times[times.len() / 2]
}

#[test]
fn delay_applies_in_both_directions() {
    let least = round_trip(&lab("switch", 2));
    assert!(least < Duration::from_millis(5), "{least:?} without delay");
    for link in ["switch:10ms", "p2p:10ms", "hub:,10ms"] {
        let time = round_trip(&lab(link, 2));
        assert!((Duration::from_millis(20)..Duration::from_millis(60)).contains(&time), "{link}: {time:?}");
    }
}

/// The numbers of the datagrams, of 300 from node 1, that arrive at node 2.
fn arrivals(seed: u64) -> Vec<usize> {
    let options = LabOptions { seed: Some(seed), ..support::options("switch:,20%", 2) };
    let lab = start_lab(&options);
    let (one, two) = (lab.node(1), lab.node(2));
    // With a static neighbour entry there is no ARP traffic, so the datagrams are the only frames.
    let mac = output_of(&two, "cat /sys/class/net/eth0/address");
    output_of(&one, &format!("ip neigh replace {} lladdr {mac} dev eth0 nud permanent", two.address()));
    let (near, far) = (udp_socket(&one, 0), udp_socket(&two, 9));
    let mut buffer = [0; 8];
    let mut arrived = Vec::new();
    for number in 0..300_usize {
        near.send_to(&number.to_be_bytes(), (two.address(), 9)).unwrap();
    }
    while far.recv(&mut buffer).is_ok() {
        arrived.push(usize::from_be_bytes(buffer));
    }
    arrived
}

#[test]
fn losses_have_the_requested_rate_and_follow_the_seed() {
    let first = arrivals(1);
    assert!((200..280).contains(&first.len()), "{} of 300 arrived", first.len());
    assert_eq!(first, arrivals(1));
    assert_ne!(first, arrivals(2));
}
