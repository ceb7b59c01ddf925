//! Placeholders keep the port, send nothing, and take the connection back.

use crate::established::exchange;
use crate::router::Net;
use crate::traffic::{Stream, option, over_the_wire, set_option, state};
use libc::{SO_ERROR, SO_REUSEADDR, SOL_SOCKET};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketType, bind, connect, getpeername, getsockname, socket};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use tern_tcp::{Connection, RestoreError, capture, discard, restore, restore_into, resume};

/// A connection that server 0 makes to the client, with or without a bind(2).
fn outgoing(net: &Net, bound: bool) -> (TcpStream, OwnedFd) {
    let listener = net.client.run(|| TcpListener::bind("10.0.0.1:0").unwrap());
    let to = listener.local_addr().unwrap();
    let make = || {
        let made = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        if bound {
            bind(&made, &"0.0.0.0:4000".parse::<SocketAddr>().unwrap()).unwrap();
        }
        connect(&made, &to).unwrap();
        made
    };
    let server = net.servers[0].run(make);
    (listener.accept().unwrap().0, server)
}

/// Captures a connection and makes its socket a placeholder.
fn leave(net: &Net, home: &OwnedFd) -> Connection {
    net.hold_to_server();
    let connection = over_the_wire(&capture(home).unwrap());
    discard(home, &connection).unwrap();
    connection
}

#[test]
fn a_placeholder_keeps_its_port_sends_nothing_and_takes_the_connection_back() {
    let net = Net::new();
    for (client, home) in [net.pair(), outgoing(&net, false), outgoing(&net, true)] {
        let mut streams: [Stream; 4] = Default::default();
        exchange(&client, &home, &mut streams);
        let local = SocketAddr::try_from(getsockname(&home).unwrap()).unwrap();
        let connection = leave(&net, &home);
        let sent = || net.seen().iter().filter(|seen| seen.from == 0).count();
        let before = sent();
        assert_eq!(state(&home), 7);
        assert_eq!(SocketAddr::try_from(getsockname(&home).unwrap()).unwrap().port(), local.port());
        assert!(getpeername(&home).is_err());
        assert_eq!(option(&home, SOL_SOCKET, SO_ERROR).unwrap(), 0);
        let other = net.servers[0].run(|| {
            let other = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            bind(&other, &SocketAddr::new([10, 0, 0, 2].into(), local.port()))
        });
        assert_eq!(other, Err(rustix::io::Errno::ADDRINUSE), "the port is taken");
        let away = net.servers[1].run(|| restore(&connection).unwrap());
        net.release_to(1);
        net.servers[1].run(|| resume(&away, &connection).unwrap());
        exchange(&client, &away, &mut streams);
        net.hold_to_server();
        let connection = capture(&away).unwrap();
        drop(away);
        assert_eq!(sent(), before, "the placeholder sends nothing");
        net.servers[0].run(|| restore_into(&home, &connection).unwrap());
        net.release_to(0);
        exchange(&client, &home, &mut streams);
        net.assert_no_reset();
    }
}

#[test]
fn a_captured_socket_that_is_closed_sends_nothing() {
    let net = Net::new();
    let (_client, home) = net.pair();
    let _connection = capture(&home).unwrap();
    let before = net.seen().len();
    drop(home);
    let (_other_client, _other) = net.pair();
    assert_eq!(net.seen()[before..].iter().filter(|seen| seen.flags & 5 != 0).count(), 0);
}

#[test]
fn the_port_can_be_shared_as_before() {
    let net = Net::new();
    let (_client, home) = net.pair();
    for reuse in [0, 1] {
        set_option(&home, SOL_SOCKET, SO_REUSEADDR, reuse).unwrap();
        let connection = leave(&net, &home);
        assert_eq!(option(&home, SOL_SOCKET, SO_REUSEADDR).unwrap(), reuse);
        net.servers[0].run(|| restore_into(&home, &connection).unwrap());
        assert_eq!(option(&home, SOL_SOCKET, SO_REUSEADDR).unwrap(), reuse);
    }
}

#[test]
fn a_failed_restore_leaves_the_placeholder() {
    let net = Net::new();
    let (client, home) = net.pair();
    let (_other_client, other) = net.pair();
    let connection = leave(&net, &home);
    // The local address exists, but is not that of the placeholder.
    let mut elsewhere = connection.clone();
    elsewhere.local.set_ip([127, 0, 0, 1].into());
    let error = net.servers[0].run(|| restore_into(&home, &elsewhere).unwrap_err());
    assert!(matches!(error, RestoreError::Differs(_) | RestoreError::System(_)), "{error}");
    assert_eq!(state(&home), 7);
    let error = net.servers[0].run(|| restore_into(&other, &connection).unwrap_err());
    assert!(matches!(error, RestoreError::NotPlaceholder), "{error}");
    net.servers[0].run(|| restore_into(&home, &connection).unwrap());
    net.release_to(0);
    exchange(&client, &home, &mut Default::default());
    net.assert_no_reset();
}

#[test]
fn a_socket_that_is_not_captured_is_not_discarded() {
    let net = Net::new();
    let (client, home) = net.pair();
    let connection = capture(&home).unwrap();
    net.servers[0].run(|| resume(&home, &connection).unwrap());
    assert_eq!(discard(&home, &connection).unwrap_err().source.kind(), ErrorKind::InvalidInput);
    exchange(&client, &home, &mut Default::default());
}
