//! Segments that are sent through a raw socket: to the peer, so that it acknowledges, and to the
//! socket itself, as if the peer had sent them.
//!
//! A packet to a local address is delivered through the loopback device, which must be up, and the
//! kernel does not check its source address then. The checks of TCP apply.

use crate::Connection;
use crate::connection::{State, WindowScale};
use crate::error::{InCall, SystemError};
use crate::segment::{ACK, FIN, Segment};
use crate::syscalls::{SockOpt, read_option};
use libc::SOL_SOCKET;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with};
use std::io::{Error, ErrorKind};
use std::net::{IpAddr, SocketAddr};

/// include/uapi/asm-generic/socket.h, Linux 5.14.
const SO_NETNS_COOKIE: SockOpt = SockOpt(SOL_SOCKET, 71);

/// A distance from the next sequence number that is outside every window: the largest is 2^30, and
/// numbers up to 2^31 count as later.
const OUTSIDE_WINDOW: u32 = 0x5000_0000;

/// A raw socket in the network namespace of a connection's socket.
#[derive(Debug)]
pub(crate) struct Injector<'a> {
    raw: OwnedFd,
    connection: &'a Connection,
}

impl<'a> Injector<'a> {
    /// # Errors
    /// The caller lacks CAP_NET_RAW, or its thread is in another network namespace than the socket.
    pub(crate) fn open(socket: BorrowedFd<'_>, connection: &'a Connection) -> Result<Self, SystemError> {
        let family = match connection.local.ip().to_canonical() {
            IpAddr::V4(_) => AddressFamily::INET,
            IpAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // With this protocol, packets include their IP header (raw(7)), and none are received.
        let raw = socket_with(family, SocketType::RAW, flags, Some(ipproto::RAW)).in_call("raw socket")?;
        if namespace(raw.as_fd())? != namespace(socket)? {
            let elsewhere = Error::new(ErrorKind::InvalidInput, "the socket is in another network namespace");
            return Err(elsewhere).in_call("SO_NETNS_COOKIE");
        }
        Ok(Self { raw, connection })
    }

    /// Makes both sides send an acknowledgement with their present window, so that neither waits
    /// for a timeout if packets were lost while the connection moved. Repair mode must be off.
    ///
    /// # Errors
    /// Those of sendto(2).
    pub(crate) fn announce(&self, timestamp: Option<u32>) -> Result<(), SystemError> {
        let connection = self.connection;
        // The peer has acknowledged the byte before `first_unacked`, so that its content has no
        // effect. It answers a segment with data always, and one without at most twice a second.
        let probe = Segment {
            from: connection.local,
            to: connection.peer,
            sequence: connection.first_unacked().wrapping_sub(1),
            acknowledged: connection.next_received(),
            flags: ACK,
            window: field(connection.open_window(), own_shift(connection)),
            timestamp,
            payload: &[0],
        };
        // A peer that has closed as well has nothing to send, and if this side's FIN was sent, its answer
        // could arrive after this side has closed, which would answer with a reset.
        let both_closed = matches!(connection.state, State::LastAck | State::Closing);
        if !(both_closed && connection.send.fin_sent) {
            self.send(&probe)?;
        }
        // The socket answers data outside its window in the same way, with its window of now. A
        // segment without the timestamp option passes the socket's check for old duplicates.
        let next = connection.next_received();
        self.send(&self.peer_segment(
            next.wrapping_add(OUTSIDE_WINDOW),
            connection.first_unacked(),
            ACK,
            &[0],
        ))
    }

    /// Sends the peer's FIN to the socket.
    ///
    /// # Errors
    /// Those of sendto(2).
    pub(crate) fn finish_receiving(&self) -> Result<(), SystemError> {
        let Connection { receive, .. } = self.connection;
        self.send(&self.peer_segment(receive.end, self.connection.first_unacked(), ACK | FIN, &[]))
    }

    /// Sends the peer's acknowledgement of the own FIN to the socket.
    ///
    /// # Errors
    /// Those of sendto(2).
    pub(crate) fn acknowledge_fin(&self) -> Result<(), SystemError> {
        let Connection { receive, send, .. } = self.connection;
        self.send(&self.peer_segment(receive.end, send.end.wrapping_add(1), ACK, &[]))
    }

    fn peer_segment<'p>(
        &self,
        sequence: u32,
        acknowledged: u32,
        flags: u8,
        payload: &'p [u8],
    ) -> Segment<'p> {
        let Connection { local, peer, negotiated, windows, .. } = self.connection;
        let shift = negotiated.window_scale.map_or(0, |scale| scale.peer);
        let window = field(windows.snd_wnd, shift);
        Segment { from: *peer, to: *local, sequence, acknowledged, flags, window, timestamp: None, payload }
    }

    fn send(&self, segment: &Segment<'_>) -> Result<(), SystemError> {
        let packet = segment.packet().ok_or(Error::from(ErrorKind::InvalidInput)).in_call("raw socket")?;
        let to = SocketAddr::new(segment.to.ip().to_canonical(), 0);
        sendto(&self.raw, &packet, SendFlags::DONTWAIT, &to).in_call("raw socket")?;
        Ok(())
    }
}

fn own_shift(connection: &Connection) -> u8 {
    connection.negotiated.window_scale.map_or(0, |WindowScale { own, .. }| own)
}

/// The window field of a segment.
fn field(window: u32, shift: u8) -> u16 {
    u16::try_from(window >> shift.min(14)).unwrap_or(u16::MAX)
}

/// The kernel's number for the network namespace of a socket.
fn namespace(socket: BorrowedFd<'_>) -> Result<u64, SystemError> {
    let mut cookie = [0; 8];
    read_option(socket, SO_NETNS_COOKIE, &mut cookie).in_call("SO_NETNS_COOKIE")?;
    Ok(u64::from_ne_bytes(cookie))
}
