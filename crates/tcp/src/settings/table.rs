//! The table of socket options whose value is an int.

use crate::syscalls::SockOpt;
use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};
use std::ops::RangeInclusive;

/// One option.
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) option: SockOpt,
    /// Values that are carried over and accepted. A value outside it is left at the default.
    pub(super) range: RangeInclusive<i32>,
}

impl Row {
    /// Whether only sockets of IPv6 have the option.
    pub(super) fn v6_only(&self) -> bool {
        self.option.0 == IPPROTO_IPV6
    }
}

/// The names of all rows, as in the C headers.
pub fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|row| row.name)
}

const fn row(name: &'static str, level: i32, option: i32, range: RangeInclusive<i32>) -> Row {
    Row { name, option: SockOpt(level, option), range }
}

const FLAG: RangeInclusive<i32> = 0..=1;
const NATURAL: RangeInclusive<i32> = 0..=i32::MAX;
const ANY: RangeInclusive<i32> = i32::MIN..=i32::MAX;

/// Longest time that a call may busy-wait, in microseconds. A program needs CAP_NET_ADMIN at home
/// for more than the default.
const MAX_BUSY_POLL: i32 = 1000;

/// All options, in the order in which they are set. Numbers are those of
/// include/uapi/asm-generic/socket.h and include/uapi/linux/{tcp,in,in6}.h. `SO_MARK` is not in it,
/// and `SO_PRIORITY` only as far as a program without privileges may set it: a node must not let its
/// peers choose how its own rules treat packets.
pub(super) const TABLE: &[Row] = &[
    // Setting IP_TOS also sets SO_PRIORITY.
    row("IP_TOS", IPPROTO_IP, libc::IP_TOS, 0..=255),
    row("IP_TTL", IPPROTO_IP, libc::IP_TTL, 1..=255),
    row("IP_MTU_DISCOVER", IPPROTO_IP, libc::IP_MTU_DISCOVER, 0..=5),
    row("IP_MINTTL", IPPROTO_IP, libc::IP_MINTTL, 0..=255),
    row("IP_FREEBIND", IPPROTO_IP, libc::IP_FREEBIND, FLAG),
    row("IP_BIND_ADDRESS_NO_PORT", IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, FLAG),
    row("IP_LOCAL_PORT_RANGE", IPPROTO_IP, 51, ANY),
    row("IP_RECVOPTS", IPPROTO_IP, libc::IP_RECVOPTS, FLAG),
    row("IP_RETOPTS", IPPROTO_IP, libc::IP_RETOPTS, FLAG),
    row("IP_PKTINFO", IPPROTO_IP, libc::IP_PKTINFO, FLAG),
    row("IP_RECVTTL", IPPROTO_IP, libc::IP_RECVTTL, FLAG),
    row("IP_RECVTOS", IPPROTO_IP, libc::IP_RECVTOS, FLAG),
    row("IP_RECVERR", IPPROTO_IP, libc::IP_RECVERR, FLAG),
    row("IP_RECVERR_RFC4884", IPPROTO_IP, 26, FLAG),
    row("IP_RECVORIGDSTADDR", IPPROTO_IP, 20, FLAG),
    row("IP_RECVFRAGSIZE", IPPROTO_IP, 25, FLAG),
    row("IPV6_TCLASS", IPPROTO_IPV6, libc::IPV6_TCLASS, -1..=255),
    row("IPV6_UNICAST_HOPS", IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, -1..=255),
    row("IPV6_MTU_DISCOVER", IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, 0..=5),
    row("IPV6_MINHOPCOUNT", IPPROTO_IPV6, 73, 0..=255),
    row("IPV6_DONTFRAG", IPPROTO_IPV6, libc::IPV6_DONTFRAG, FLAG),
    row("IPV6_AUTOFLOWLABEL", IPPROTO_IPV6, 70, FLAG),
    row("IPV6_ADDR_PREFERENCES", IPPROTO_IPV6, 72, NATURAL),
    row("IPV6_FREEBIND", IPPROTO_IPV6, 78, FLAG),
    row("IPV6_FLOWINFO", IPPROTO_IPV6, 11, FLAG),
    row("IPV6_RECVPKTINFO", IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, FLAG),
    row("IPV6_RECVHOPLIMIT", IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, FLAG),
    row("IPV6_RECVRTHDR", IPPROTO_IPV6, libc::IPV6_RECVRTHDR, FLAG),
    row("IPV6_RECVHOPOPTS", IPPROTO_IPV6, libc::IPV6_RECVHOPOPTS, FLAG),
    row("IPV6_RECVDSTOPTS", IPPROTO_IPV6, libc::IPV6_RECVDSTOPTS, FLAG),
    row("IPV6_RECVTCLASS", IPPROTO_IPV6, libc::IPV6_RECVTCLASS, FLAG),
    row("IPV6_RECVPATHMTU", IPPROTO_IPV6, libc::IPV6_RECVPATHMTU, FLAG),
    row("IPV6_RECVERR", IPPROTO_IPV6, libc::IPV6_RECVERR, FLAG),
    row("IPV6_RECVERR_RFC4884", IPPROTO_IPV6, 31, FLAG),
    row("IPV6_RECVORIGDSTADDR", IPPROTO_IPV6, 74, FLAG),
    row("IPV6_RECVFRAGSIZE", IPPROTO_IPV6, 77, FLAG),
    row("IPV6_2292PKTINFO", IPPROTO_IPV6, 2, FLAG),
    row("IPV6_2292HOPOPTS", IPPROTO_IPV6, 3, FLAG),
    row("IPV6_2292DSTOPTS", IPPROTO_IPV6, 4, FLAG),
    row("IPV6_2292RTHDR", IPPROTO_IPV6, 5, FLAG),
    row("IPV6_2292HOPLIMIT", IPPROTO_IPV6, 8, FLAG),
    row("SO_PRIORITY", SOL_SOCKET, libc::SO_PRIORITY, 0..=6),
    row("SO_REUSEPORT", SOL_SOCKET, libc::SO_REUSEPORT, FLAG),
    row("SO_BROADCAST", SOL_SOCKET, libc::SO_BROADCAST, FLAG),
    row("SO_DONTROUTE", SOL_SOCKET, libc::SO_DONTROUTE, FLAG),
    row("SO_OOBINLINE", SOL_SOCKET, libc::SO_OOBINLINE, FLAG),
    row("SO_RCVLOWAT", SOL_SOCKET, libc::SO_RCVLOWAT, NATURAL),
    row("SO_TIMESTAMP", SOL_SOCKET, 29, FLAG),
    row("SO_TIMESTAMPNS", SOL_SOCKET, 35, FLAG),
    row("SO_TIMESTAMP_NEW", SOL_SOCKET, 63, FLAG),
    row("SO_TIMESTAMPNS_NEW", SOL_SOCKET, 64, FLAG),
    row("SO_TIMESTAMPING", SOL_SOCKET, 37, NATURAL),
    row("SO_TIMESTAMPING_NEW", SOL_SOCKET, 65, NATURAL),
    row("SO_RXQ_OVFL", SOL_SOCKET, libc::SO_RXQ_OVFL, FLAG),
    row("SO_PEEK_OFF", SOL_SOCKET, libc::SO_PEEK_OFF, -1..=i32::MAX),
    row("SO_SELECT_ERR_QUEUE", SOL_SOCKET, 45, FLAG),
    row("SO_BUSY_POLL", SOL_SOCKET, libc::SO_BUSY_POLL, 0..=MAX_BUSY_POLL),
    row("SO_PREFER_BUSY_POLL", SOL_SOCKET, 69, FLAG),
    row("SO_BUSY_POLL_BUDGET", SOL_SOCKET, 70, 0..=64),
    row("SO_TXREHASH", SOL_SOCKET, 74, FLAG),
    row("SO_RCVMARK", SOL_SOCKET, 75, FLAG),
    row("SO_RCVPRIORITY", SOL_SOCKET, 82, FLAG),
    // Last of this level: no other filter can be attached after it.
    row("SO_LOCK_FILTER", SOL_SOCKET, 44, FLAG),
    row("TCP_KEEPIDLE", IPPROTO_TCP, libc::TCP_KEEPIDLE, 1..=32767),
    row("TCP_KEEPINTVL", IPPROTO_TCP, libc::TCP_KEEPINTVL, 1..=32767),
    row("TCP_KEEPCNT", IPPROTO_TCP, libc::TCP_KEEPCNT, 1..=127),
    // After its three times, so that its timer is set with them.
    row("SO_KEEPALIVE", SOL_SOCKET, libc::SO_KEEPALIVE, FLAG),
    row("TCP_SYNCNT", IPPROTO_TCP, libc::TCP_SYNCNT, 1..=127),
    row("TCP_LINGER2", IPPROTO_TCP, libc::TCP_LINGER2, ANY),
    row("TCP_DEFER_ACCEPT", IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, NATURAL),
    row("TCP_USER_TIMEOUT", IPPROTO_TCP, libc::TCP_USER_TIMEOUT, NATURAL),
    row("TCP_THIN_LINEAR_TIMEOUTS", IPPROTO_TCP, libc::TCP_THIN_LINEAR_TIMEOUTS, FLAG),
    row("TCP_NOTSENT_LOWAT", IPPROTO_TCP, 25, ANY),
    row("TCP_INQ", IPPROTO_TCP, 36, FLAG),
    row("TCP_TX_DELAY", IPPROTO_TCP, 37, NATURAL),
    row("TCP_RTO_MAX_MS", IPPROTO_TCP, 44, 1000..=120_000),
    row("TCP_RTO_MIN_US", IPPROTO_TCP, 45, NATURAL),
    row("TCP_DELACK_MAX_US", IPPROTO_TCP, 46, NATURAL),
    row("TCP_NODELAY", IPPROTO_TCP, libc::TCP_NODELAY, FLAG),
    row("TCP_CORK", IPPROTO_TCP, libc::TCP_CORK, FLAG),
    // The state of delayed acknowledgements, which the kernel also changes by itself.
    row("TCP_QUICKACK", IPPROTO_TCP, libc::TCP_QUICKACK, FLAG),
];
