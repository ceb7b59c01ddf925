//! Checks that find what would be lost if the connection moved. Nothing is changed by them.

use crate::Refused;
use crate::connection::State;
use crate::error::{CaptureError, InCall, SystemError};
use crate::repair::{self, Info};
use crate::syscalls::{IntIoctl, SockOpt, int_ioctl, int_option, read_option, set_int_option};
use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;
use std::io::ErrorKind;
use std::net::SocketAddr;

const SO_TYPE: SockOpt = SockOpt(SOL_SOCKET, libc::SO_TYPE);
const SO_DOMAIN: SockOpt = SockOpt(SOL_SOCKET, libc::SO_DOMAIN);
const SO_PROTOCOL: SockOpt = SockOpt(SOL_SOCKET, libc::SO_PROTOCOL);
const SO_GET_FILTER: SockOpt = SockOpt(SOL_SOCKET, libc::SO_ATTACH_FILTER);
const SO_BINDTOIFINDEX: SockOpt = SockOpt(SOL_SOCKET, libc::SO_BINDTOIFINDEX);
const SO_ZEROCOPY: SockOpt = SockOpt(SOL_SOCKET, libc::SO_ZEROCOPY);
const SO_TIMESTAMPING: [SockOpt; 2] = [SockOpt(SOL_SOCKET, 37), SockOpt(SOL_SOCKET, 65)];
const SO_OOBINLINE: SockOpt = SockOpt(SOL_SOCKET, libc::SO_OOBINLINE);
const TCP_ULP: SockOpt = SockOpt(IPPROTO_TCP, 31);
const TCP_AO_INFO: SockOpt = SockOpt(IPPROTO_TCP, 40);
const IP_OPTIONS: SockOpt = SockOpt(IPPROTO_IP, libc::IP_OPTIONS);
const IP_TRANSPARENT: SockOpt = SockOpt(IPPROTO_IP, libc::IP_TRANSPARENT);
const IPV6_TRANSPARENT: SockOpt = SockOpt(IPPROTO_IPV6, 75);
const IPV6_FLOWINFO_SEND: SockOpt = SockOpt(IPPROTO_IPV6, 33);
/// `IPV6_HOPOPTS`, `IPV6_RTHDRDSTOPTS`, `IPV6_RTHDR` and `IPV6_DSTOPTS`.
const EXTENSION_HEADERS: [i32; 4] = [54, 55, 57, 59];

const IPPROTO_MPTCP: i32 = 262;

/// `SOF_TIMESTAMPING_OPT_ID` (include/uapi/linux/net_tstamp.h).
const TIMESTAMPING_OPT_ID: u32 = 1 << 7;

/// The state of a connection that may move.
///
/// # Errors
/// The socket has no such connection.
pub(super) fn check_kind(socket: BorrowedFd<'_>) -> Result<State, CaptureError> {
    let kind = |option| int_option(socket, option);
    let protocol = kind(SO_PROTOCOL).in_call("SO_PROTOCOL")?;
    if protocol == IPPROTO_MPTCP {
        return Err(Refused::Mptcp.into());
    }
    let family = kind(SO_DOMAIN).in_call("SO_DOMAIN")?;
    let stream = kind(SO_TYPE).in_call("SO_TYPE")? == libc::SOCK_STREAM;
    if ![libc::AF_INET, libc::AF_INET6].contains(&family) || !stream || protocol != IPPROTO_TCP {
        return Err(Refused::NotTcp.into());
    }
    // Numbers of include/net/tcp_states.h: SYN_SENT, SYN_RECV, LISTEN and NEW_SYN_RECV.
    match Info::of(socket)?.state {
        2 | 3 | 12 => Err(Refused::Connecting.into()),
        10 => Err(Refused::Listening.into()),
        number => State::from_number(number).ok_or(Refused::NotConnected.into()),
    }
}

/// # Errors
/// An option of the socket belongs to its node, or has state that cannot be read.
pub(super) fn check_options(
    socket: BorrowedFd<'_>,
    (local, peer): (SocketAddr, SocketAddr),
) -> Result<(), CaptureError> {
    if repair::is_on(socket)? {
        return Err(Refused::InRepair.into());
    }
    let is_set = |option| int_option(socket, option).is_ok_and(|value| value != 0);
    let scoped = |address| matches!(address, SocketAddr::V6(v6) if v6.scope_id() != 0);
    let timestamping = |option| {
        let mut value = [0; 8];
        read_option(socket, option, &mut value).is_ok_and(|_| {
            let [flags, clock] = [0, 4].map(|at| u32::from_ne_bytes([0, 1, 2, 3].map(|i| value[at + i])));
            flags & TIMESTAMPING_OPT_ID != 0 || clock != 0
        })
    };
    let v6 = local.is_ipv6();
    let extension_headers =
        || EXTENSION_HEADERS.into_iter().any(|option| has_bytes(socket, SockOpt(IPPROTO_IPV6, option)));
    let refused = if upper_layer(socket)? {
        Refused::UpperLayerProtocol
    } else if read_option(socket, TCP_AO_INFO, &mut [0; 64]).is_ok() {
        Refused::Signed
    } else if has_filter(socket)? {
        Refused::Filter
    } else if is_set(SO_BINDTOIFINDEX) || scoped(local) || scoped(peer) {
        Refused::BoundToDevice
    } else if is_set(IP_TRANSPARENT) || v6 && is_set(IPV6_TRANSPARENT) {
        Refused::Transparent
    } else if has_bytes(socket, IP_OPTIONS) || v6 && extension_headers() {
        Refused::PacketOptions
    } else if v6 && is_set(IPV6_FLOWINFO_SEND) {
        Refused::FlowLabel
    } else if is_set(SO_ZEROCOPY) {
        Refused::ZeroCopy
    } else if SO_TIMESTAMPING.into_iter().any(timestamping) {
        Refused::NumberedTimestamps
    } else {
        return Ok(());
    };
    Err(refused.into())
}

/// Returns whether the program has shut down the receiving side.
///
/// # Errors
/// Urgent data or an error is pending.
pub(super) fn check_events(socket: BorrowedFd<'_>, state: State) -> Result<bool, CaptureError> {
    let mut events = [PollFd::from_borrowed_fd(socket, PollFlags::PRI | PollFlags::RDHUP)];
    poll(&mut events, Some(&Timespec::default())).in_call("poll")?;
    let events = events[0].revents();
    if events.contains(PollFlags::ERR) {
        return Err(Refused::ErrorPending.into());
    }
    if events.contains(PollFlags::PRI) || has_urgent_mark(socket)? {
        return Err(Refused::UrgentData.into());
    }
    Ok(events.contains(PollFlags::RDHUP) && !state.fin_received())
}

/// Whether an urgent byte that was read by `MSG_OOB` still divides the receive queue. The mark shows
/// as the end of the data that can be read (`tcp_inq`, include/net/tcp.h), unless `SO_OOBINLINE` is
/// set.
fn has_urgent_mark(socket: BorrowedFd<'_>) -> Result<bool, SystemError> {
    let unread = || int_ioctl(socket, IntIoctl::Unread).in_call("SIOCINQ");
    if int_ioctl(socket, IntIoctl::AtMark).in_call("SIOCATMARK")? != 0 {
        return Ok(true);
    }
    if int_option(socket, SO_OOBINLINE).in_call("SO_OOBINLINE")? != 0 {
        return Ok(false);
    }
    let to_mark = unread()?;
    set_int_option(socket, SO_OOBINLINE, 1).in_call("SO_OOBINLINE")?;
    let all = unread();
    set_int_option(socket, SO_OOBINLINE, 0).in_call("SO_OOBINLINE")?;
    // More bytes may have arrived meanwhile, so that the first number is read again.
    Ok(all? > to_mark && unread()? == to_mark)
}

fn upper_layer(socket: BorrowedFd<'_>) -> Result<bool, SystemError> {
    let mut name = [0; 16];
    match read_option(socket, TCP_ULP, &mut name) {
        Ok(length) => Ok(length > 0 && name[0] != 0),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(false),
        Err(error) => Err(error).in_call("TCP_ULP"),
    }
}

/// Whether a filter is attached. The kernel reports the number of its instructions, or EACCES for
/// one that was loaded by bpf(2).
fn has_filter(socket: BorrowedFd<'_>) -> Result<bool, SystemError> {
    match read_option(socket, SO_GET_FILTER, &mut []) {
        Ok(instructions) => Ok(instructions > 0),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Ok(true),
        Err(error) => Err(error).in_call("SO_GET_FILTER"),
    }
}

fn has_bytes(socket: BorrowedFd<'_>, option: SockOpt) -> bool {
    read_option(socket, option, &mut [0; 256]).is_ok_and(|length| length > 0)
}
