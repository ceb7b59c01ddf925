//! Captures a connection from its socket.

mod refusals;

use crate::Refused;
use crate::connection::{
    Connection, MAX_QUEUED, Negotiated, ReceiveQueue, SendQueue, State, WindowScale, Windows,
};
use crate::error::{CaptureError, InCall, SystemError};
use crate::repair::{self, Info, Queue, Repair};
use crate::settings::Settings;
use crate::syscalls::{IntIoctl, SockOpt, int_ioctl, int_option, set_int_option};
use libc::SOL_SOCKET;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, getpeername, getsockname, recv};
use std::net::SocketAddr;

const SO_PEEK_OFF: SockOpt = SockOpt(SOL_SOCKET, libc::SO_PEEK_OFF);

/// How often the queues are read until they do not change meanwhile.
const ATTEMPTS: usize = 8;

/// Captures the connection of a socket. The socket is then in repair mode: the program can neither
/// send nor receive, and the kernel sends nothing when it is closed. Its timers still run, and may
/// repeat what was sent before, until [`resume`](crate::resume()) or [`discard`](crate::discard): see
/// the crate's page for which to call when.
///
/// The caller has stopped the programs that use the socket, and holds back the connection's packets.
///
/// # Errors
/// The socket is as before. See [`CaptureError`].
pub fn capture(socket: &impl AsFd) -> Result<Connection, CaptureError> {
    let socket = socket.as_fd();
    let state = refusals::check_kind(socket)?;
    let addresses = addresses(socket)?;
    refusals::check_options(socket, addresses)?;
    let receive_shut = refusals::check_events(socket, state)?;
    let reuse_address = repair::reuses_address(socket)?;
    let settings = Settings::read(socket, addresses.0.is_ipv6(), reuse_address)?;
    let repair = Repair::begin(socket, reuse_address)?;
    let connection = read(socket, addresses, receive_shut, settings)?;
    repair.stay();
    Ok(connection)
}

/// The addresses of the socket and of its peer.
fn addresses(socket: BorrowedFd<'_>) -> Result<(SocketAddr, SocketAddr), CaptureError> {
    let local = SocketAddr::try_from(getsockname(socket).in_call("getsockname")?).in_call("getsockname")?;
    match getpeername(socket) {
        Ok(Some(peer)) => Ok((local, SocketAddr::try_from(peer).in_call("getpeername")?)),
        Ok(None) | Err(Errno::NOTCONN) => Err(Refused::NotConnected.into()),
        Err(error) => Err(error).in_call("getpeername")?,
    }
}

/// Everything that changes when a packet arrives, is sent, or is acknowledged.
#[derive(Debug, PartialEq, Eq)]
struct Snapshot {
    info: Info,
    windows: Windows,
    /// Sequence numbers after the queues, FINs included.
    receive_end: u32,
    send_end: u32,
    /// Lengths of the queues, an own FIN included.
    unread: u32,
    unacked: u32,
    unsent: u32,
}

impl Snapshot {
    /// The send queue is selected, and read, last. While it is, the kernel only counts data as sent
    /// where it would send it (`tcp_write_xmit`, net/ipv4/tcp_output.c): at a timer, of which pacing
    /// has one for every few segments, or at an acknowledgement that was on its way. `unsent` is
    /// therefore what the peer has not been sent when the socket is discarded, if it equals that of an
    /// earlier snapshot. Otherwise the peer would acknowledge data that the restored socket has not
    /// sent, and a socket drops such segments, for ever.
    fn of(socket: BorrowedFd<'_>) -> Result<Self, SystemError> {
        let info = Info::of(socket)?;
        Ok(Self {
            info,
            windows: Windows { rcv_ssthresh: info.rcv_ssthresh, ..repair::windows(socket)? },
            receive_end: repair::end_of_queue(socket, Queue::Receive)?,
            send_end: repair::end_of_queue(socket, Queue::Send)?,
            unread: int_ioctl(socket, IntIoctl::Unread).in_call("SIOCINQ")?,
            unacked: int_ioctl(socket, IntIoctl::Unacked).in_call("SIOCOUTQ")?,
            unsent: int_ioctl(socket, IntIoctl::Unsent).in_call("SIOCOUTQNSD")?,
        })
    }
}

fn read(
    socket: BorrowedFd<'_>,
    (local, peer): (SocketAddr, SocketAddr),
    receive_shut: bool,
    settings: Settings,
) -> Result<Connection, CaptureError> {
    for _ in 0..ATTEMPTS {
        let before = Snapshot::of(socket)?;
        let state = State::from_number(before.info.state).ok_or(Refused::NotConnected)?;
        let Some((receive, send)) = queues(socket, &before, state)? else { continue };
        let negotiated = negotiated(socket, &before.info)?;
        if Snapshot::of(socket)? != before {
            continue;
        }
        let windows = before.windows;
        return Ok(Connection {
            local,
            peer,
            state,
            receive,
            send,
            negotiated,
            windows,
            receive_shut,
            settings,
        });
    }
    Err(CaptureError::Changing)
}

/// Both queues, or nothing if they changed meanwhile.
fn queues(
    socket: BorrowedFd<'_>,
    at: &Snapshot,
    state: State,
) -> Result<Option<(ReceiveQueue, SendQueue)>, CaptureError> {
    // An own FIN in the queue counts as a byte of the part that it is in.
    let fin = u32::from(state.fin_queued());
    let fin_sent = state.send_shut() && at.unsent == 0;
    let (Some(queued), Some(unsent)) =
        (at.unacked.checked_sub(fin), at.unsent.checked_sub(if fin_sent { 0 } else { fin }))
    else {
        return Ok(None);
    };
    let Some(sent) = queued.checked_sub(unsent) else { return Ok(None) };
    if u64::from(at.unread) + u64::from(queued) > MAX_QUEUED as u64 {
        return Err(Refused::QueueTooLong.into());
    }
    let received = peek_received(socket, at.unread as usize)?;
    let mut sending = peek(socket, Queue::Send, queued as usize)?;
    if received.len() != at.unread as usize || sending.len() != queued as usize {
        return Ok(None);
    }
    let unsent = sending.split_off(sent as usize);
    let receive =
        ReceiveQueue { end: at.receive_end.wrapping_sub(state.fin_received().into()), bytes: received };
    let end = at.send_end.wrapping_sub(state.send_shut().into());
    Ok(Some((receive, SendQueue { end, sent: sending, unsent, fin_sent })))
}

/// The receive queue from its first byte, whatever the program's `SO_PEEK_OFF`.
fn peek_received(socket: BorrowedFd<'_>, length: usize) -> Result<Vec<u8>, SystemError> {
    match int_option(socket, SO_PEEK_OFF) {
        Ok(offset) if offset >= 0 => {
            set_int_option(socket, SO_PEEK_OFF, -1).in_call("SO_PEEK_OFF")?;
            let bytes = peek(socket, Queue::Receive, length);
            set_int_option(socket, SO_PEEK_OFF, offset).in_call("SO_PEEK_OFF")?;
            bytes
        }
        _ => peek(socket, Queue::Receive, length),
    }
}

fn peek(socket: BorrowedFd<'_>, queue: Queue, length: usize) -> Result<Vec<u8>, SystemError> {
    // The kernel copies the send queue as a whole, or fails with EFAULT if it has grown.
    let mut bytes = vec![0; length];
    if length > 0 {
        repair::select(socket, queue)?;
        let copied = match recv(socket, &mut bytes[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((copied, _)) => copied,
            Err(Errno::AGAIN | Errno::FAULT) => 0,
            Err(error) => return Err(error).in_call("recv with MSG_PEEK"),
        };
        bytes.truncate(copied);
    }
    Ok(bytes)
}

fn negotiated(socket: BorrowedFd<'_>, info: &Info) -> Result<Negotiated, SystemError> {
    let agreed = |option: u8| info.options & option != 0;
    let scale = WindowScale { peer: info.snd_wscale, own: info.rcv_wscale };
    let timestamp = if agreed(Info::TIMESTAMPS) { Some(repair::timestamp(socket)?) } else { None };
    Ok(Negotiated {
        mss: repair::peer_mss(socket)?,
        sack: agreed(Info::SACK),
        window_scale: agreed(Info::WINDOW_SCALE).then_some(scale),
        timestamp,
    })
}
