//! A connection that cannot move is refused, and its socket is as before.

use crate::established::exchange;
use crate::router::{Net, wait_until};
use crate::traffic::{option, set_bytes, set_option};
use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};
use rustix::fd::OwnedFd;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind, connect, listen, recv,
    send, socket, socket_with,
};
use std::net::SocketAddr;
use tern_tcp::{CaptureError, Refused, capture};

const TCP_REPAIR: i32 = 19;

#[track_caller]
fn assert_refused(socket: &OwnedFd, reason: Refused) {
    match capture(socket) {
        Err(CaptureError::Refused(refused)) => assert_eq!(refused, reason),
        other => panic!("{reason}: {other:?}"),
    }
    if reason != Refused::InRepair && reason != Refused::NotTcp && reason != Refused::Mptcp {
        assert_eq!(option(socket, IPPROTO_TCP, TCP_REPAIR).unwrap(), 0, "repair mode is off");
    }
}

#[test]
fn a_socket_without_a_connection_is_refused() {
    let net = Net::new();
    net.hold_to_server();
    let to: SocketAddr = "10.0.0.2:9".parse().unwrap();
    net.client.run(|| {
        let tcp = || socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        assert_refused(&tcp(), Refused::NotConnected);
        assert_refused(&socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap(), Refused::NotTcp);
        assert_refused(&socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap(), Refused::NotTcp);
        let listener = tcp();
        bind(&listener, &"0.0.0.0:0".parse::<SocketAddr>().unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        assert_refused(&listener, Refused::Listening);
        let mptcp = Protocol::from_raw(262.try_into().unwrap());
        if let Ok(mptcp) = socket(AddressFamily::INET, SocketType::STREAM, Some(mptcp)) {
            assert_refused(&mptcp, Refused::Mptcp);
        }
        let connecting =
            socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        connect(&connecting, &to).unwrap_err();
        assert_refused(&connecting, Refused::Connecting);
    });
}

#[test]
fn a_connection_with_state_that_cannot_be_read_is_refused_until_it_is_gone() {
    let net = Net::new();
    let (client, server) = net.connect("[fd00::2]:0", "fd00::2");
    let int = |level: i32, number: i32, on: i32, reason: Refused| {
        set_option(&server, level, number, on).unwrap();
        assert_refused(&server, reason);
        set_option(&server, level, number, 0).unwrap();
    };
    int(SOL_SOCKET, libc::SO_ZEROCOPY, 1, Refused::ZeroCopy);
    int(SOL_SOCKET, 37, 1 << 7 | 1 << 4 | 1 << 1, Refused::NumberedTimestamps);
    int(IPPROTO_IP, libc::IP_TRANSPARENT, 1, Refused::Transparent);
    int(IPPROTO_IPV6, 33, 1, Refused::FlowLabel);
    net.servers[0].run(|| {
        set_option(&server, SOL_SOCKET, libc::SO_BINDTOIFINDEX, 1).unwrap();
        assert_refused(&server, Refused::BoundToDevice);
        set_option(&server, SOL_SOCKET, libc::SO_BINDTOIFINDEX, 0).unwrap();
    });
    // Router alert, aligned by padding.
    set_bytes(&server, IPPROTO_IPV6, 54, &[0, 0, 5, 2, 0, 0, 1, 0]).unwrap();
    assert_refused(&server, Refused::PacketOptions);
    set_bytes(&server, IPPROTO_IPV6, 54, &[]).unwrap();
    // One instruction of classic BPF: accept all bytes.
    let instruction = [6, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
    let mut program = [0; 16];
    program[0] = 1;
    let address = instruction.as_ptr() as usize;
    program[8..].copy_from_slice(&address.to_ne_bytes());
    set_bytes(&server, SOL_SOCKET, libc::SO_ATTACH_FILTER, &program).unwrap();
    assert_refused(&server, Refused::Filter);
    set_option(&server, SOL_SOCKET, libc::SO_DETACH_FILTER, 0).unwrap();
    exchange(&client, &server, &mut Default::default());
    let connection = capture(&server).unwrap();
    assert_refused(&server, Refused::InRepair);
    net.servers[0].run(|| tern_tcp::resume(&server, &connection).unwrap());
}

#[test]
fn urgent_data_is_refused_until_it_is_behind() {
    let net = Net::new();
    let (client, server) = net.pair();
    send(&client, b"before!", SendFlags::OOB).unwrap();
    send(&client, b"after", SendFlags::empty()).unwrap();
    let peek = |flags: RecvFlags| recv(&server, &mut [0; 64][..], flags).map_or(0, |(length, _)| length);
    wait_until("the urgent byte arrives", || {
        peek(RecvFlags::PEEK | RecvFlags::OOB | RecvFlags::DONTWAIT) == 1
    });
    assert_refused(&server, Refused::UrgentData);
    peek(RecvFlags::OOB);
    assert_refused(&server, Refused::UrgentData);
    assert_eq!(peek(RecvFlags::empty()), 6);
    assert_refused(&server, Refused::UrgentData);
    assert_eq!(peek(RecvFlags::empty()), 5);
    capture(&server).unwrap();
}

#[test]
fn an_aborted_connection_is_refused() {
    let net = Net::new();
    let (client, server) = net.pair();
    set_bytes(&client, SOL_SOCKET, libc::SO_LINGER, &[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    drop(client);
    wait_until("the reset arrives", || crate::traffic::state(&server) == 7);
    assert_refused(&server, Refused::NotConnected);
}

#[test]
fn queues_above_the_limit_are_refused() {
    let net = Net::new();
    let (_client, server) = net.pair();
    set_option(&server, SOL_SOCKET, libc::SO_SNDBUFFORCE, 80 << 20).unwrap();
    let bytes = vec![0; 1 << 20];
    let mut left = tern_tcp::connection::MAX_QUEUED + (1 << 20);
    while left > 0 {
        left = left.saturating_sub(send(&server, &bytes, SendFlags::DONTWAIT).unwrap());
    }
    assert_refused(&server, Refused::QueueTooLong);
}
