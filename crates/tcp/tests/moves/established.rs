//! Connections that are open in both directions.

use crate::host::counter;
use crate::router::{Net, wait_until};
use crate::traffic::{
    SIOCINQ, SIOCOUTQ, SIOCOUTQNSD, Stream, info, migrate, migrate_into, over_the_wire, queued, set_option,
    state,
};
use libc::SOL_SOCKET;
use rustix::fd::{AsFd, OwnedFd};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};
use tern_tcp::{capture, discard, restore, resume};

/// Sends and checks some bytes in both directions.
pub(crate) fn exchange(client: &impl AsFd, server: &impl AsFd, streams: &mut [Stream; 4]) {
    let [to_server, at_server, to_client, at_client] = streams;
    to_server.send_some(client, 3000);
    to_client.send_some(server, 3000);
    wait_until("bytes arrive in both directions", || {
        at_server.receive_some(server, 1 << 16).unwrap();
        at_client.receive_some(client, 1 << 16).unwrap();
        at_server.0 == to_server.0 && at_client.0 == to_client.0
    });
}

#[test]
fn an_idle_connection_goes_on_on_the_other_node_and_at_home_again() {
    let net = Net::new();
    for (listen, to) in [("10.0.0.2:0", "10.0.0.2"), ("[fd00::2]:0", "fd00::2"), ("[::]:0", "10.0.0.2")] {
        let (client, home) = net.connect(listen, to);
        let mut streams: [Stream; 4] = Default::default();
        exchange(&client, &home, &mut streams);
        let before = info(&home);
        let (away, placeholder) = migrate(&net, home, 1);
        let after = info(&away);
        assert_eq!(before[1], after[1], "{to}: options and window scales");
        assert_eq!(before[4], after[4], "{to}: size of segments");
        assert_eq!(before[16], after[16], "{to}: rcv_ssthresh");
        exchange(&client, &away, &mut streams);
        migrate_into(&net, away, 0, &placeholder);
        assert_eq!(info(&placeholder)[1], before[1]);
        exchange(&client, &placeholder, &mut streams);
        net.assert_no_reset();
    }
}

#[test]
fn options_that_were_not_negotiated_are_not_used_after_a_move() {
    for off in [
        &["tcp_timestamps"][..],
        &["tcp_sack"],
        &["tcp_window_scaling"],
        &["tcp_timestamps", "tcp_sack", "tcp_window_scaling"],
    ] {
        let net = Net::new();
        for name in off {
            net.client.set(name, "0");
        }
        let (client, home) = net.pair();
        let mut streams: [Stream; 4] = Default::default();
        exchange(&client, &home, &mut streams);
        let before = info(&home);
        let (away, _placeholder) = migrate(&net, home, 1);
        assert_eq!(before[1], info(&away)[1], "{off:?}: options and window scales");
        exchange(&client, &away, &mut streams);
        load(&net, client, away, 2, streams);
    }
}

/// Fills both queues of both sockets: neither can send.
fn fill(client: &TcpStream, server: &OwnedFd, to_server: &mut Stream, to_client: &mut Stream) {
    wait_until("both directions are blocked", || {
        let sent = to_server.send_some(client, 1 << 16) + to_client.send_some(server, 1 << 16);
        let blocked =
            |from: &dyn Fn(libc::c_ulong) -> i32| from(SIOCOUTQ) > 0 && from(SIOCOUTQ) == from(SIOCOUTQNSD);
        sent == 0
            && blocked(&|request| queued(client, request))
            && blocked(&|request| queued(server, request))
            && queued(server, SIOCINQ) > 0
    });
}

/// Moves a connection back and forth with full queues. After each move, more than the queues had
/// passes in both directions.
fn load(net: &Net, client: TcpStream, mut server: OwnedFd, moves: usize, streams: [Stream; 4]) {
    let [mut to_server, mut at_server, mut to_client, mut at_client] = streams;
    let mut at = 1;
    let mut longest = Duration::ZERO;
    for _ in 0..moves {
        fill(&client, &server, &mut to_server, &mut to_client);
        at = 1 - at;
        let new = (at_server.0, at_client.0, queued(&server, SIOCINQ), queued(&client, SIOCINQ));
        let new = (new.0 + new.2 as u64, new.1 + new.3 as u64);
        (server, _) = migrate(net, server, at);
        let begin = Instant::now();
        let mut first = None;
        // All that was queued, and as much again, so that closed windows must open.
        let until = (to_server.0 + (1 << 20), to_client.0 + (1 << 20));
        wait_until("more than the queues had arrives", || {
            to_server.send_some(&client, 1 << 16);
            to_client.send_some(&server, 1 << 16);
            at_server.receive_some(&server, 1 << 17).unwrap();
            at_client.receive_some(&client, 1 << 17).unwrap();
            if at_server.0 > new.0 && at_client.0 > new.1 {
                first.get_or_insert_with(|| begin.elapsed());
            }
            at_server.0 >= until.0 && at_client.0 >= until.1
        });
        longest = longest.max(first.unwrap());
    }
    let counts = |name: &str| {
        let hosts = [&net.servers[0], &net.servers[1], &net.client];
        hosts.map(|host| host.run(|| counter(name)))
    };
    let timeouts = counts("TCPTimeouts");
    println!("{moves} moves: longest time until new bytes arrive {longest:?}, timeouts {timeouts:?}");
    // Segments with old timestamps, or acknowledgements of data that was never sent.
    assert_eq!(counts("PAWSEstab"), [0; 3]);
    assert_eq!(counts("TCPChallengeACK"), [0; 3]);
    net.assert_no_reset();
}

#[test]
fn no_byte_is_lost_in_twenty_moves_with_full_queues() {
    let net = Net::new();
    let (client, server) = net.pair();
    load(&net, client, server, 20, Default::default());
}

/// A timer of pacing sends the next segments, without an acknowledgement of the peer.
#[test]
fn captured_and_restored_sockets_send_no_new_data() {
    /// include/uapi/asm-generic/socket.h, in bytes per second: a segment in 7 ms.
    const SO_MAX_PACING_RATE: i32 = 47;
    const RATE: i32 = 200_000;
    const LENGTH: usize = 8 << 10;
    /// The first ten segments are not paced.
    const NOT_PACED: usize = 16 << 10;
    let net = Net::new();
    let one_at_a_time = ["link", "set", "t0", "gso_max_segs", "1"];
    assert!(net.servers[0].run(|| Command::new("ip").args(one_at_a_time).status().unwrap().success()));
    let begin = || {
        let (client, server) = net.pair();
        set_option(&server, SOL_SOCKET, SO_MAX_PACING_RATE, RATE).unwrap();
        let [mut to_client, mut at_client]: [Stream; 2] = Default::default();
        wait_until("the first segments arrive", || {
            to_client.send_some(&server, NOT_PACED - to_client.0 as usize);
            at_client.receive_some(&client, NOT_PACED).unwrap();
            at_client.0 == NOT_PACED as u64 && queued(&server, SIOCOUTQ) == 0
        });
        (client, server, to_client, at_client)
    };
    let (other_client, other, mut to_other, _) = begin();
    let (client, server, mut to_client, mut at_client) = begin();
    net.hold_to_server();
    assert_eq!(to_client.send_some(&server, LENGTH), LENGTH);
    let connection = capture(&server).unwrap();
    let sent = LENGTH - connection.send.unsent.len();
    assert!(sent < LENGTH, "pacing has delayed a part");
    // As long as the timer needs for all the rest.
    assert_eq!(to_other.send_some(&other, LENGTH), LENGTH);
    wait_until("the other socket sends all", || queued(&other_client, SIOCINQ) == LENGTH as i32);
    assert_eq!(queued(&client, SIOCINQ), sent as i32);
    discard(&server, &connection).unwrap();
    discard(&other, &capture(&other).unwrap()).unwrap();
    let away = net.servers[1].run(|| restore(&over_the_wire(&connection)).unwrap());
    assert_eq!(queued(&away, SIOCOUTQNSD), connection.send.unsent.len() as i32);
    assert!(net.seen().iter().all(|seen| seen.from != 1), "the node sends nothing");
    // Those of the other connection would be answered with a reset.
    net.drop_held(1);
    net.servers[1].run(|| resume(&away, &connection).unwrap());
    let until = to_client.0 + LENGTH as u64;
    wait_until("all arrives, and more", || {
        to_client.send_some(&away, 1 << 10);
        at_client.receive_some(&client, 1 << 16).unwrap();
        at_client.0 > until
    });
    for name in ["TCPChallengeACK", "TCPTimeouts"] {
        assert_eq!(net.servers[1].run(|| counter(name)), 0, "{name}");
    }
    net.assert_no_reset();
}

#[test]
fn a_cancelled_move_goes_on_with_full_queues() {
    let net = Net::new();
    let (client, server) = net.pair();
    let [mut to_server, mut at_server, mut to_client, mut at_client]: [Stream; 4] = Default::default();
    for round in 0..10 {
        fill(&client, &server, &mut to_server, &mut to_client);
        net.hold_to_server();
        let connection = capture(&server).unwrap();
        assert!(!connection.receive.bytes.is_empty() && !connection.send.unsent.is_empty());
        net.servers[0].run(|| resume(&server, &connection).unwrap());
        // In every second round the packets are lost that the client sent meanwhile.
        if round % 2 == 0 {
            net.release_to(0);
        } else {
            net.drop_held(0);
        }
        let until = (to_server.0 + (1 << 20), to_client.0 + (1 << 20));
        wait_until("more than the queues had arrives", || {
            to_server.send_some(&client, 1 << 16);
            to_client.send_some(&server, 1 << 16);
            at_server.receive_some(&server, 1 << 17).unwrap();
            at_client.receive_some(&client, 1 << 17).unwrap();
            at_server.0 >= until.0 && at_client.0 >= until.1
        });
    }
    assert_eq!(state(&server), 1);
    net.assert_no_reset();
}
