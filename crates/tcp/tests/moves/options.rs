//! Every option that a program has set has its value after a move.

use crate::router::Net;
use crate::traffic::{migrate, migrate_into, option, over_the_wire, set_bytes, set_option};
use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};
use rustix::fs::{OFlags, fcntl_setfl};
use tern_tcp::{capture, restore};

/// Level, number and a value that is not the default, of each row of the table in its order.
const VALUES: &[(i32, i32, i32)] = &[
    (IPPROTO_IP, libc::IP_TOS, 0x10),
    (IPPROTO_IP, libc::IP_TTL, 77),
    (IPPROTO_IP, libc::IP_MTU_DISCOVER, 0),
    (IPPROTO_IP, libc::IP_MINTTL, 3),
    (IPPROTO_IP, libc::IP_FREEBIND, 1),
    (IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1),
    (IPPROTO_IP, 51, 60_000 << 16 | 40_000),
    (IPPROTO_IP, libc::IP_RECVOPTS, 1),
    (IPPROTO_IP, libc::IP_RETOPTS, 1),
    (IPPROTO_IP, libc::IP_PKTINFO, 1),
    (IPPROTO_IP, libc::IP_RECVTTL, 1),
    (IPPROTO_IP, libc::IP_RECVTOS, 1),
    (IPPROTO_IP, libc::IP_RECVERR, 1),
    (IPPROTO_IP, 26, 1),
    (IPPROTO_IP, 20, 1),
    (IPPROTO_IP, 25, 1),
    (IPPROTO_IPV6, libc::IPV6_TCLASS, 0x20),
    (IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, 66),
    (IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, 0),
    (IPPROTO_IPV6, 73, 4),
    (IPPROTO_IPV6, libc::IPV6_DONTFRAG, 1),
    (IPPROTO_IPV6, 70, 0),
    (IPPROTO_IPV6, 72, 2),
    (IPPROTO_IPV6, 78, 1),
    (IPPROTO_IPV6, 11, 1),
    (IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1),
    (IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 1),
    (IPPROTO_IPV6, libc::IPV6_RECVRTHDR, 1),
    (IPPROTO_IPV6, libc::IPV6_RECVHOPOPTS, 1),
    (IPPROTO_IPV6, libc::IPV6_RECVDSTOPTS, 1),
    (IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1),
    (IPPROTO_IPV6, libc::IPV6_RECVPATHMTU, 1),
    (IPPROTO_IPV6, libc::IPV6_RECVERR, 1),
    (IPPROTO_IPV6, 31, 1),
    (IPPROTO_IPV6, 74, 1),
    (IPPROTO_IPV6, 77, 1),
    (IPPROTO_IPV6, 2, 1),
    (IPPROTO_IPV6, 3, 1),
    (IPPROTO_IPV6, 4, 1),
    (IPPROTO_IPV6, 5, 1),
    (IPPROTO_IPV6, 8, 1),
    (SOL_SOCKET, libc::SO_PRIORITY, 3),
    (SOL_SOCKET, libc::SO_REUSEPORT, 1),
    (SOL_SOCKET, libc::SO_BROADCAST, 1),
    (SOL_SOCKET, libc::SO_DONTROUTE, 1),
    (SOL_SOCKET, libc::SO_OOBINLINE, 1),
    (SOL_SOCKET, libc::SO_RCVLOWAT, 5),
    (SOL_SOCKET, 29, 1),
    (SOL_SOCKET, 35, 1),
    (SOL_SOCKET, 63, 1),
    (SOL_SOCKET, 64, 1),
    (SOL_SOCKET, 37, 0x18),
    (SOL_SOCKET, 65, 0x18),
    (SOL_SOCKET, libc::SO_RXQ_OVFL, 1),
    (SOL_SOCKET, libc::SO_PEEK_OFF, 5),
    (SOL_SOCKET, 45, 1),
    (SOL_SOCKET, libc::SO_BUSY_POLL, 40),
    (SOL_SOCKET, 69, 1),
    (SOL_SOCKET, 70, 16),
    (SOL_SOCKET, 74, 0),
    (SOL_SOCKET, 75, 1),
    (SOL_SOCKET, 82, 1),
    (SOL_SOCKET, 44, 1),
    (IPPROTO_TCP, libc::TCP_KEEPIDLE, 33),
    (IPPROTO_TCP, libc::TCP_KEEPINTVL, 12),
    (IPPROTO_TCP, libc::TCP_KEEPCNT, 5),
    (SOL_SOCKET, libc::SO_KEEPALIVE, 1),
    (IPPROTO_TCP, libc::TCP_SYNCNT, 3),
    (IPPROTO_TCP, libc::TCP_LINGER2, 7),
    (IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, 3),
    (IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 30_000),
    (IPPROTO_TCP, libc::TCP_THIN_LINEAR_TIMEOUTS, 1),
    (IPPROTO_TCP, 25, 4000),
    (IPPROTO_TCP, 36, 1),
    (IPPROTO_TCP, 37, 100),
    (IPPROTO_TCP, 44, 5000),
    (IPPROTO_TCP, 45, 100_000),
    (IPPROTO_TCP, 46, 20_000),
    (IPPROTO_TCP, libc::TCP_NODELAY, 1),
    (IPPROTO_TCP, libc::TCP_CORK, 1),
    (IPPROTO_TCP, libc::TCP_QUICKACK, 0),
];

#[test]
fn each_option_of_the_table_has_its_value_after_a_move() {
    assert_eq!(tern_tcp::settings::names().count(), VALUES.len());
    for (listen, to) in [("10.0.0.2:0", "10.0.0.2"), ("[fd00::2]:0", "fd00::2"), ("[::]:0", "10.0.0.2")] {
        // One option at a time would be exact; all at once also show that none changes another.
        let net = Net::new();
        let (_client, home) = net.connect(listen, to);
        let v6 = listen.starts_with('[');
        let rows = || tern_tcp::settings::names().zip(VALUES).filter(|(_, row)| v6 || row.0 != IPPROTO_IPV6);
        let refused: Vec<&str> = rows()
            .filter(|(_, (level, name, value))| set_option(&home, *level, *name, *value).is_err())
            .map(|(name, _)| name)
            .collect();
        println!("{to}: this kernel does not set {refused:?}");
        assert!(refused.len() < 8, "{refused:?}");
        let values = |of: &rustix::fd::OwnedFd| -> Vec<(&str, Option<i32>)> {
            rows().map(|(name, (level, number, _))| (name, option(of, *level, *number).ok())).collect()
        };
        let before = values(&home);
        let (away, placeholder) = migrate(&net, home, 1);
        assert_eq!(before, values(&away), "{to}");
        // Some options of the placeholder went back to their defaults when it was disconnected.
        migrate_into(&net, away, 0, &placeholder);
        assert_eq!(before, values(&placeholder), "{to}, at home again");
    }
}

#[test]
fn each_option_has_its_value_if_it_is_the_only_one_set() {
    let net = Net::new();
    let (_client, mut socket) = net.connect("[::]:0", "10.0.0.2");
    let mut at = 0;
    for (name, (level, number, value)) in tern_tcp::settings::names().zip(VALUES) {
        // No other filter may be attached after it, but that is no reason to leave it out.
        let default = option(&socket, *level, *number).ok();
        if set_option(&socket, *level, *number, *value).is_err() {
            continue;
        }
        let before = option(&socket, *level, *number).ok();
        at = 1 - at;
        (socket, _) = migrate(&net, socket, at);
        assert_eq!(option(&socket, *level, *number).ok(), before, "{name}");
        if let Some(default) = default {
            // Some cannot be reset.
            let _ = set_option(&socket, *level, *number, default);
        }
    }
}

#[test]
fn buffers_times_and_file_flags_are_as_before() {
    let net = Net::new();
    let (_client, home) = net.pair();
    let pair = |a: i64, b: i64| [a.to_ne_bytes(), b.to_ne_bytes()].concat();
    set_bytes(&home, SOL_SOCKET, libc::SO_RCVTIMEO, &pair(3, 500_000)).unwrap();
    set_bytes(&home, SOL_SOCKET, libc::SO_SNDTIMEO, &pair(4, 0)).unwrap();
    set_bytes(&home, SOL_SOCKET, libc::SO_LINGER, &[1, 0, 0, 0, 9, 0, 0, 0]).unwrap();
    set_bytes(&home, SOL_SOCKET, 47, &123_456_789_u64.to_ne_bytes()).unwrap();
    set_bytes(&home, IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").unwrap();
    set_option(&home, SOL_SOCKET, libc::SO_RCVBUF, 50_000).unwrap();
    set_option(&home, IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, 40_000).unwrap();
    fcntl_setfl(&home, OFlags::NONBLOCK).unwrap();
    let connection = over_the_wire(&capture(&home).unwrap());
    let settings = &connection.settings;
    assert!(settings.buffers.receive_locked && !settings.buffers.send_locked);
    assert_eq!(settings.buffers.receive, 100_000);
    assert_eq!(
        (settings.receive_timeout, settings.send_timeout, settings.linger),
        (3_500_000, 4_000_000, Some(9))
    );
    assert_eq!((settings.max_pacing_rate, settings.congestion.as_str()), (123_456_789, "reno"));
    assert_eq!(settings.window_clamp, 40_000);
    assert!(settings.file.nonblocking);
    let away = net.servers[1].run(|| restore(&connection).unwrap());
    let again = capture(&away).unwrap();
    assert_eq!(again.settings, *settings);
    assert_eq!((again.local, again.peer), (connection.local, connection.peer));
    assert_eq!((&again.receive, &again.send), (&connection.receive, &connection.send));
    // The peer's window is closed until the connection goes on.
    assert_eq!(again.windows, tern_tcp::connection::Windows { snd_wnd: 0, ..connection.windows });
}

#[test]
fn marks_and_high_priorities_are_left_out() {
    let net = Net::new();
    let (_client, home) = net.pair();
    set_option(&home, SOL_SOCKET, libc::SO_MARK, 7).unwrap();
    set_option(&home, SOL_SOCKET, libc::SO_PRIORITY, 7).unwrap();
    let (away, placeholder) = migrate(&net, home, 1);
    assert_eq!(option(&away, SOL_SOCKET, libc::SO_MARK).unwrap(), 0);
    assert_eq!(option(&away, SOL_SOCKET, libc::SO_PRIORITY).unwrap(), 0);
    assert_eq!(option(&placeholder, SOL_SOCKET, libc::SO_MARK).unwrap(), 7);
}
