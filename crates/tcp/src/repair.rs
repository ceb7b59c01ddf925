//! Repair mode of a TCP socket (`TCP_REPAIR`, net/ipv4/tcp.c), and the values that it gives access
//! to.
//!
//! In repair mode the kernel sends nothing when the socket is closed or disconnected, puts data that
//! is sent into one of the queues, and binds to a port that is in use. It does not stop the
//! socket's timers, and it does not stop packets that arrive.

use crate::connection::{Negotiated, Windows};
use crate::error::{InCall, SystemError};
use crate::syscalls::{SockOpt, int_option, read_option, set_int_option, write_option};
use libc::{IPPROTO_TCP, SOL_SOCKET};
use rustix::fd::BorrowedFd;
use std::io;
use std::net::SocketAddr;

// Numbers from include/uapi/linux/tcp.h.
const TCP_REPAIR: SockOpt = SockOpt(IPPROTO_TCP, 19);
const TCP_REPAIR_QUEUE: SockOpt = SockOpt(IPPROTO_TCP, 20);
const TCP_QUEUE_SEQ: SockOpt = SockOpt(IPPROTO_TCP, 21);
const TCP_REPAIR_OPTIONS: SockOpt = SockOpt(IPPROTO_TCP, 22);
const TCP_TIMESTAMP: SockOpt = SockOpt(IPPROTO_TCP, 24);
const TCP_REPAIR_WINDOW: SockOpt = SockOpt(IPPROTO_TCP, 29);
const TCP_INFO: SockOpt = SockOpt(IPPROTO_TCP, 11);
const TCP_MAXSEG: SockOpt = SockOpt(IPPROTO_TCP, 2);
const SO_REUSEADDR: SockOpt = SockOpt(SOL_SOCKET, 2);

/// `TCP_REPAIR_OFF_NO_WP`: the end of repair mode without a window probe. The probe of
/// `TCP_REPAIR_OFF` is sent in ESTABLISHED only, and a peer answers one such probe in 500 ms
/// (`tcp_invalid_ratelimit`); [`announce`](crate::announce) has neither limit.
const OFF_WITHOUT_PROBE: i32 = -1;

/// Bit 0 of `TCP_TIMESTAMP` is a flag (Linux 6.7), so that the value that was read may be 1 less than
/// the last one that was sent. A peer drops segments whose timestamp goes back (RFC 7323, PAWS). The
/// flag stays as it is.
const TIMESTAMP_ROUNDING: u32 = 2;

/// A queue of the socket.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Queue {
    /// Data can be neither sent nor peeked at.
    None = 0,
    /// Data that is sent goes into the receive queue.
    Receive = 1,
    /// Data that is sent goes into the send queue and counts as sent. So does data of the queue that
    /// was not sent, when the kernel would send it.
    Send = 2,
}

/// A socket in repair mode. Repair mode ends when this is dropped, without a packet.
#[derive(Debug)]
pub(crate) struct Repair<'a> {
    socket: BorrowedFd<'a>,
    reuse_address: bool,
    stays: bool,
}

impl<'a> Repair<'a> {
    /// # Errors
    /// EPERM without CAP_NET_ADMIN, or for a socket that listens.
    pub(crate) fn begin(socket: BorrowedFd<'a>, reuse_address: bool) -> Result<Self, SystemError> {
        begin(socket)?;
        Ok(Self { socket, reuse_address, stays: false })
    }

    /// Leaves the socket in repair mode.
    pub(crate) fn stay(mut self) {
        self.stays = true;
    }
}

impl Drop for Repair<'_> {
    fn drop(&mut self) {
        if !self.stays {
            // An error cannot be handled here, and these two calls fail only for a closed socket.
            let _ = end(self.socket, self.reuse_address);
        }
    }
}

/// Begins repair mode.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN, or for a socket that listens.
pub(crate) fn begin(socket: BorrowedFd<'_>) -> Result<(), SystemError> {
    set_int_option(socket, TCP_REPAIR, 1).in_call("TCP_REPAIR")
}

/// Ends repair mode without a packet. It also resets `SO_REUSEADDR`, which is set again here.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN; the socket is then still in repair mode.
pub(crate) fn end(socket: BorrowedFd<'_>, reuse_address: bool) -> Result<(), SystemError> {
    set_int_option(socket, TCP_REPAIR, OFF_WITHOUT_PROBE).in_call("TCP_REPAIR")?;
    set_int_option(socket, SO_REUSEADDR, i32::from(reuse_address)).in_call("SO_REUSEADDR")
}

/// Binds a socket of the state CLOSE in repair mode, unless it is bound. The port may be in use.
///
/// A socket that its program bound keeps its port when it is disconnected. One that was accepted, or
/// was connected without bind(2), does not, although getsockname(2) still reports the port
/// (`tcp_set_state`, net/ipv4/tcp.c).
///
/// # Errors
/// Those of bind(2) except EINVAL, which is that of a socket that is bound.
pub(crate) fn bind_if_free(socket: BorrowedFd<'_>, local: SocketAddr) -> Result<(), SystemError> {
    match rustix::net::bind(socket, &local) {
        Err(rustix::io::Errno::INVAL) => Ok(()),
        result => result.in_call("bind"),
    }
}

/// Whether the socket is in repair mode.
///
/// # Errors
/// The socket is not TCP.
pub(crate) fn is_on(socket: BorrowedFd<'_>) -> Result<bool, SystemError> {
    Ok(int_option(socket, TCP_REPAIR).in_call("TCP_REPAIR")? != 0)
}

/// The value of `SO_REUSEADDR`. Repair mode overwrites it.
///
/// # Errors
/// The descriptor is no socket.
pub(crate) fn reuses_address(socket: BorrowedFd<'_>) -> Result<bool, SystemError> {
    Ok(int_option(socket, SO_REUSEADDR).in_call("SO_REUSEADDR")? != 0)
}

/// Selects the queue that data is written to, or read from by `MSG_PEEK`.
///
/// # Errors
/// The socket is not in repair mode.
pub(crate) fn select(socket: BorrowedFd<'_>, queue: Queue) -> Result<(), SystemError> {
    set_int_option(socket, TCP_REPAIR_QUEUE, queue as i32).in_call("TCP_REPAIR_QUEUE")
}

/// The sequence number after the last byte of a queue, FINs included.
///
/// # Errors
/// The socket is not in repair mode.
pub(crate) fn end_of_queue(socket: BorrowedFd<'_>, queue: Queue) -> Result<u32, SystemError> {
    select(socket, queue)?;
    Ok(int_option(socket, TCP_QUEUE_SEQ).in_call("TCP_QUEUE_SEQ")?.cast_unsigned())
}

/// Sets the sequence number at which a queue begins.
///
/// # Errors
/// The socket is connected, or its queue is not empty.
pub(crate) fn begin_queue(socket: BorrowedFd<'_>, queue: Queue, sequence: u32) -> Result<(), SystemError> {
    select(socket, queue)?;
    set_int_option(socket, TCP_QUEUE_SEQ, sequence.cast_signed()).in_call("TCP_QUEUE_SEQ")
}

/// The value that the next segment's timestamp would have. Bit 0 is set if it counts microseconds.
///
/// # Errors
/// The socket is not TCP.
pub(crate) fn timestamp(socket: BorrowedFd<'_>) -> Result<u32, SystemError> {
    Ok(int_option(socket, TCP_TIMESTAMP).in_call("TCP_TIMESTAMP")?.cast_unsigned())
}

/// The windows, in the layout of `struct tcp_repair_window`. `rcv_ssthresh` is left at 0.
///
/// # Errors
/// The socket is not in repair mode.
pub(crate) fn windows(socket: BorrowedFd<'_>) -> Result<Windows, SystemError> {
    let mut raw = [0; 20];
    read_option(socket, TCP_REPAIR_WINDOW, &mut raw).in_call("TCP_REPAIR_WINDOW")?;
    Ok(Windows {
        snd_wl1: word(&raw, 0),
        snd_wnd: word(&raw, 4),
        max_window: word(&raw, 8),
        rcv_wnd: word(&raw, 12),
        rcv_wup: word(&raw, 16),
        rcv_ssthresh: 0,
    })
}

/// Sets the windows, except `rcv_ssthresh`.
///
/// # Errors
/// EINVAL for windows that contradict the queues.
pub(crate) fn set_windows(socket: BorrowedFd<'_>, windows: &Windows) -> Result<(), SystemError> {
    let Windows { snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup, rcv_ssthresh: _ } = *windows;
    let mut raw = [0; 20];
    for (bytes, value) in raw.chunks_mut(4).zip([snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup]) {
        bytes.copy_from_slice(&value.to_ne_bytes());
    }
    write_option(socket, TCP_REPAIR_WINDOW, &raw).in_call("TCP_REPAIR_WINDOW")
}

/// Sets the options that were negotiated when the connection was made.
///
/// # Errors
/// The socket has sent something, or a value is out of range.
pub(crate) fn set_negotiated(socket: BorrowedFd<'_>, negotiated: &Negotiated) -> Result<(), SystemError> {
    // Option kinds of RFC 9293 and RFC 7323, each followed by the value that the kernel defines.
    const MSS: u32 = 2;
    const WINDOW_SCALE: u32 = 3;
    const SACK_PERMITTED: u32 = 4;
    const TIMESTAMPS: u32 = 8;
    let mut raw = Vec::new();
    let mut push = |kind: u32, value: u32| {
        raw.extend_from_slice(&kind.to_ne_bytes());
        raw.extend_from_slice(&value.to_ne_bytes());
    };
    push(MSS, negotiated.mss.into());
    if let Some(scale) = negotiated.window_scale {
        push(WINDOW_SCALE, u32::from(scale.peer) | u32::from(scale.own) << 16);
    }
    if negotiated.sack {
        push(SACK_PERMITTED, 0);
    }
    if negotiated.timestamp.is_some() {
        push(TIMESTAMPS, 0);
    }
    write_option(socket, TCP_REPAIR_OPTIONS, &raw).in_call("TCP_REPAIR_OPTIONS")?;
    if let Some(timestamp) = negotiated.timestamp {
        let next = timestamp.wrapping_add(TIMESTAMP_ROUNDING);
        set_int_option(socket, TCP_TIMESTAMP, next.cast_signed()).in_call("TCP_TIMESTAMP")?;
    }
    Ok(())
}

/// The largest segment that the peer accepts. In repair mode only; else `TCP_MAXSEG` is the size
/// that is used at present.
///
/// # Errors
/// The socket is not TCP.
pub(crate) fn peer_mss(socket: BorrowedFd<'_>) -> Result<u16, SystemError> {
    let mss = int_option(socket, TCP_MAXSEG).in_call("TCP_MAXSEG")?;
    u16::try_from(mss).map_err(io::Error::other).in_call("TCP_MAXSEG")
}

/// Sets `TCP_MAXSEG`, the program's limit for the segment size; 0 removes it.
///
/// # Errors
/// The value is out of range.
pub(crate) fn limit_mss(socket: BorrowedFd<'_>, mss: u16) -> Result<(), SystemError> {
    set_int_option(socket, TCP_MAXSEG, mss.into()).in_call("TCP_MAXSEG")
}

/// The fields of `struct tcp_info` (include/uapi/linux/tcp.h) that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Info {
    /// A number of include/net/tcp_states.h.
    pub(crate) state: u8,
    /// `TCPI_OPT_*`.
    pub(crate) options: u8,
    /// Shift of the windows that the peer sends.
    pub(crate) snd_wscale: u8,
    /// Shift of the windows that this side sends.
    pub(crate) rcv_wscale: u8,
    /// Limit of the window that is offered, in bytes.
    pub(crate) rcv_ssthresh: u32,
}

impl Info {
    pub(crate) const TIMESTAMPS: u8 = 1;
    pub(crate) const SACK: u8 = 2;
    pub(crate) const WINDOW_SCALE: u8 = 4;

    /// # Errors
    /// The socket is not TCP.
    pub(crate) fn of(socket: BorrowedFd<'_>) -> Result<Self, SystemError> {
        let mut raw = [0; 104];
        read_option(socket, TCP_INFO, &mut raw).in_call("TCP_INFO")?;
        // The shifts are bit fields; their order in the byte is that of a little-endian machine.
        let scales = if cfg!(target_endian = "little") { raw[6] } else { raw[6].rotate_left(4) };
        Ok(Self {
            state: raw[0],
            options: raw[5],
            snd_wscale: scales & 0xf,
            rcv_wscale: scales >> 4,
            rcv_ssthresh: word(&raw, 64),
        })
    }
}

fn word(raw: &[u8], offset: usize) -> u32 {
    let bytes = raw.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u32::from_ne_bytes)
}
