//! Connections of which one or both directions are closed.

use crate::router::{Net, wait_until};
use crate::traffic::{SIOCOUTQ, SIOCOUTQNSD, Stream, migrate, over_the_wire, queued, state};
use rustix::fd::OwnedFd;
use rustix::net::{Shutdown, shutdown};
use std::net::TcpStream;
use tern_tcp::{capture, discard, restore, restore_into};

const FIN_WAIT1: u32 = 4;
const FIN_WAIT2: u32 = 5;
const CLOSE: u32 = 7;
const CLOSE_WAIT: u32 = 8;
const LAST_ACK: u32 = 9;
const CLOSING: u32 = 11;

/// A connection before it moves, with the bytes that were sent.
struct Ends {
    net: Net,
    client: TcpStream,
    server: OwnedFd,
    to_server: Stream,
    at_server: Stream,
    to_client: Stream,
    at_client: Stream,
    client_shut: bool,
    server_shut: bool,
}

impl Ends {
    fn new() -> Self {
        let net = Net::new();
        // If the server repeated its FIN, its kernel would answer the second acknowledgement in LAST_ACK
        // with RST, also without a move.
        net.prevent_repetitions();
        let (client, server) = net.pair();
        let [to_server, at_server, to_client, at_client] = Default::default();
        let (client_shut, server_shut) = (false, false);
        Self { net, client, server, to_server, at_server, to_client, at_client, client_shut, server_shut }
    }

    fn client_finishes(&mut self) {
        assert_eq!(self.to_server.send_some(&self.client, 5000), 5000);
        shutdown(&self.client, Shutdown::Write).unwrap();
        self.client_shut = true;
    }

    fn server_finishes(&mut self) {
        assert_eq!(self.to_client.send_some(&self.server, 5000), 5000);
        shutdown(&self.server, Shutdown::Write).unwrap();
        self.server_shut = true;
    }

    /// The client's window is full, so that the server's FIN is not sent.
    fn server_finishes_blocked(&mut self) {
        wait_until("the client's window is full", || {
            let sent = self.to_client.send_some(&self.server, 1 << 16);
            sent == 0 && queued(&self.server, SIOCOUTQ) == queued(&self.server, SIOCOUTQNSD)
        });
        shutdown(&self.server, Shutdown::Write).unwrap();
        self.server_shut = true;
    }

    fn wait_for(&self, expected: u32) {
        wait_until("the state", || state(&self.server) == expected);
    }

    /// Moves away and home again before any packet of the client arrives, and ends the connection in
    /// both directions.
    fn move_and_finish(mut self, expected: u32) {
        self.wait_for(expected);
        self.net.hold_to_server();
        let away = {
            let connection = over_the_wire(&capture(&self.server).unwrap());
            discard(&self.server, &connection).unwrap();
            self.net.servers[1].run(|| restore(&connection).unwrap())
        };
        assert_eq!(state(&away), expected);
        let connection = over_the_wire(&capture(&away).unwrap());
        drop(away);
        self.net.servers[0].run(|| restore_into(&self.server, &connection).unwrap());
        assert_eq!(state(&self.server), expected);
        self.net.release_to(0);
        if !self.client_shut {
            self.client_finishes();
        }
        let server_shut = self.server_shut;
        if !server_shut {
            self.server_finishes();
        }
        let (mut client_end, mut server_end) = (false, false);
        wait_until("both directions end", || {
            client_end = client_end || self.at_client.receive_some(&self.client, 1 << 16).is_none();
            server_end = server_end || self.at_server.receive_some(&self.server, 1 << 16).is_none();
            client_end && server_end
        });
        assert_eq!((self.at_client.0, self.at_server.0), (self.to_client.0, self.to_server.0));
        wait_until("both sockets are closed", || {
            state(&self.client) == CLOSE && state(&self.server) == CLOSE
        });
        self.net.assert_no_reset();
    }
}

#[test]
fn the_peers_end_of_stream_is_received_behind_unread_bytes() {
    let mut ends = Ends::new();
    ends.client_finishes();
    ends.move_and_finish(CLOSE_WAIT);
}

#[test]
fn the_peers_end_of_stream_that_was_read_is_read_again() {
    let mut ends = Ends::new();
    ends.client_finishes();
    wait_until("the end of the stream", || ends.at_server.receive_some(&ends.server, 1 << 16).is_none());
    ends.move_and_finish(CLOSE_WAIT);
}

#[test]
fn an_acknowledged_fin_stays_acknowledged() {
    let mut ends = Ends::new();
    ends.server_finishes();
    ends.move_and_finish(FIN_WAIT2);
}

#[test]
fn a_fin_that_was_sent_is_acknowledged_after_a_move() {
    let mut ends = Ends::new();
    ends.net.hold_to_server();
    ends.server_finishes();
    ends.move_and_finish(FIN_WAIT1);
}

#[test]
fn a_fin_that_was_not_sent_follows_the_unsent_bytes() {
    let mut ends = Ends::new();
    ends.server_finishes_blocked();
    assert!(queued(&ends.server, SIOCOUTQNSD) > 0);
    ends.move_and_finish(FIN_WAIT1);
}

#[test]
fn a_fin_of_each_side_is_counted_in_last_ack() {
    for blocked in [false, true] {
        let mut ends = Ends::new();
        ends.client_finishes();
        ends.wait_for(CLOSE_WAIT);
        if blocked {
            ends.server_finishes_blocked();
        } else {
            ends.net.hold_to_server();
            ends.server_finishes();
        }
        ends.move_and_finish(LAST_ACK);
    }
}

#[test]
fn fins_that_crossed_are_counted() {
    let mut ends = Ends::new();
    ends.net.hold_to_client();
    ends.server_finishes();
    ends.client_finishes();
    ends.move_and_finish(CLOSING);
}

#[test]
fn a_receiving_side_that_was_shut_stays_shut() {
    let ends = Ends::new();
    shutdown(&ends.server, Shutdown::Read).unwrap();
    let (away, _placeholder) = migrate(&ends.net, ends.server, 1);
    assert_eq!(Stream::default().receive_some(&away, 1), None);
}
