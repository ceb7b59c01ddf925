//! A connection as data: what one node sends to another.

use crate::error::Invalid;
use crate::settings::Settings;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

/// Bytes that both queues may have together. The kernel allows a program without privileges less
/// than this unless `tcp_rmem` or `tcp_wmem` is raised.
pub const MAX_QUEUED: usize = 64 << 20;

/// Largest window of RFC 7323: 65,535 shifted by 14, rounded up.
const MAX_WINDOW: u32 = 1 << 30;

/// Smallest segment size that the kernel accepts for a socket (`TCP_MIN_MSS`, include/net/tcp.h).
const MIN_MSS: u16 = 88;

/// Largest window shift (RFC 7323).
const MAX_SCALE: u8 = 14;

/// One TCP connection. [`restore`](crate::restore()) checks it; no other code need trust it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// Address of the socket. A connection of IPv4 on a socket of IPv6 has addresses of the form
    /// `::ffff:192.0.2.1`, and is restored on a socket of IPv6.
    pub local: SocketAddr,
    /// Address of the peer, of the same family.
    pub peer: SocketAddr,
    /// State of the connection.
    pub state: State,
    /// Bytes that the program has not read.
    pub receive: ReceiveQueue,
    /// Bytes that the peer has not acknowledged.
    pub send: SendQueue,
    /// Options of the handshake.
    pub negotiated: Negotiated,
    /// Windows of both sides.
    pub windows: Windows,
    /// Whether the program has called shutdown(2) for the receiving side.
    pub receive_shut: bool,
    /// Socket options and file flags.
    pub settings: Settings,
}

/// States of a connection that can move, as in RFC 9293.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Both directions are open.
    Established,
    /// The peer's FIN was received.
    CloseWait,
    /// An own FIN was sent, or is queued, and is not acknowledged.
    FinWait1,
    /// An own FIN was acknowledged.
    FinWait2,
    /// An own FIN is not acknowledged, and the peer's FIN was received after it was sent.
    Closing,
    /// The peer's FIN was received, and an own FIN is not acknowledged.
    LastAck,
}

impl State {
    /// Whether the peer's FIN was received.
    #[must_use]
    pub fn fin_received(self) -> bool {
        matches!(self, Self::CloseWait | Self::Closing | Self::LastAck)
    }

    /// Whether the program has closed the sending side: an own FIN is queued, sent or acknowledged.
    #[must_use]
    pub fn send_shut(self) -> bool {
        matches!(self, Self::FinWait1 | Self::FinWait2 | Self::Closing | Self::LastAck)
    }

    /// Whether an own FIN is in the send queue.
    #[must_use]
    pub fn fin_queued(self) -> bool {
        self.send_shut() && self != Self::FinWait2
    }

    /// The kernel's number (include/net/tcp_states.h).
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Established => 1,
            Self::FinWait1 => 4,
            Self::FinWait2 => 5,
            Self::CloseWait => 8,
            Self::LastAck => 9,
            Self::Closing => 11,
        }
    }

    pub(crate) fn from_number(number: u8) -> Option<Self> {
        use State::{CloseWait, Closing, Established, FinWait1, FinWait2, LastAck};
        let all = [Established, CloseWait, FinWait1, FinWait2, Closing, LastAck];
        all.into_iter().find(|state| state.number() == number)
    }
}

/// The receive queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiveQueue {
    /// Sequence number after the last byte. A received FIN has this number.
    pub end: u32,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// The send queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendQueue {
    /// Sequence number after the last byte. An own FIN has this number.
    pub end: u32,
    /// Bytes that were sent and not acknowledged.
    pub sent: Vec<u8>,
    /// Bytes that were not sent.
    pub unsent: Vec<u8>,
    /// Whether an own FIN was sent. It is then behind the bytes of `sent`, and `unsent` is empty.
    pub fin_sent: bool,
}

/// Options that both sides agreed on when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Negotiated {
    /// Largest segment that the peer accepts, in bytes.
    pub mss: u16,
    /// Whether selective acknowledgements are used.
    pub sack: bool,
    /// Window shifts, if both sides sent the option.
    pub window_scale: Option<WindowScale>,
    /// If timestamps are used, the value of the next one (`TCP_TIMESTAMP`).
    pub timestamp: Option<u32>,
}

/// Shifts of the window fields, in bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowScale {
    /// Shift of windows that the peer sends.
    pub peer: u8,
    /// Shift of windows that this side sends.
    pub own: u8,
}

/// The fields of the kernel's `struct tcp_repair_window`, and one more. All but the two sequence
/// numbers are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Windows {
    /// Sequence number of the segment that set `snd_wnd`.
    pub snd_wl1: u32,
    /// Window that the peer offered.
    pub snd_wnd: u32,
    /// Largest window that the peer ever offered.
    pub max_window: u32,
    /// Window that this side offered last, counted from `rcv_wup`.
    pub rcv_wnd: u32,
    /// Sequence number up to which this side had received when it offered `rcv_wnd`.
    pub rcv_wup: u32,
    /// Limit of the next window that this side offers.
    pub rcv_ssthresh: u32,
}

impl Connection {
    /// Sequence number of the first byte that the program has not read.
    pub(crate) fn first_unread(&self) -> u32 {
        self.receive.end.wrapping_sub(length(&self.receive.bytes))
    }

    /// Sequence number of the first byte that the peer has not acknowledged. After an acknowledged
    /// FIN it is the number of the FIN.
    pub(crate) fn first_unacked(&self) -> u32 {
        let queued = length(&self.send.sent).wrapping_add(length(&self.send.unsent));
        self.send.end.wrapping_sub(queued)
    }

    /// The next sequence number that the peer will send.
    pub(crate) fn next_received(&self) -> u32 {
        self.receive.end.wrapping_add(self.state.fin_received().into())
    }

    /// The part of the offered window that the peer has not filled, in bytes.
    pub(crate) fn open_window(&self) -> u32 {
        let end = self.windows.rcv_wup.wrapping_add(self.windows.rcv_wnd);
        let open = end.wrapping_sub(self.next_received());
        if open <= MAX_WINDOW { open } else { 0 }
    }

    /// Checks every field that the kernel relies on, so that data of a hostile node can neither
    /// allocate without a limit nor set what is not in the table of options.
    ///
    /// # Errors
    /// The first property that does not hold.
    pub fn validate(&self) -> Result<(), Invalid> {
        self.validate_addresses()?;
        let Self { receive, send, negotiated, windows, state, .. } = self;
        let queued = [&receive.bytes, &send.sent, &send.unsent].map(Vec::len);
        if queued.into_iter().fold(0, usize::saturating_add) > MAX_QUEUED {
            return Err(Invalid::Queues);
        }
        let fin_acked = *state == State::FinWait2;
        if fin_acked && !(send.sent.is_empty() && send.unsent.is_empty())
            || send.fin_sent != (state.send_shut() && send.unsent.is_empty() && send.fin_sent)
            || fin_acked && !send.fin_sent
        {
            return Err(Invalid::State);
        }
        let scales = negotiated.window_scale.map_or([0, 0], |scale| [scale.peer, scale.own]);
        if negotiated.mss < MIN_MSS || scales.iter().any(|scale| *scale > MAX_SCALE) {
            return Err(Invalid::Negotiated);
        }
        let Windows { snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup, rcv_ssthresh } = *windows;
        let next = self.next_received();
        if [snd_wnd, max_window, rcv_wnd, rcv_ssthresh].iter().any(|window| *window > MAX_WINDOW)
            || max_window < snd_wnd
            || is_after(snd_wl1, next.wrapping_add(rcv_wnd))
            || is_after(rcv_wup, next)
        {
            return Err(Invalid::Windows);
        }
        self.settings.validate(self.local.is_ipv6())
    }

    fn validate_addresses(&self) -> Result<(), Invalid> {
        let (local, peer) = (self.local, self.peer);
        let mapped = |ip: IpAddr| matches!(ip, IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some());
        let of_one_host = |address: SocketAddr| {
            let ip = address.ip().to_canonical();
            let broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
            let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
            let scoped = matches!(address, SocketAddr::V6(v6) if v6.scope_id() != 0 || v6.flowinfo() != 0);
            let special = ip.is_unspecified() || ip.is_multicast() || broadcast || link_local || scoped;
            !special && address.port() != 0
        };
        let same_family = local.is_ipv4() == peer.is_ipv4() && mapped(local.ip()) == mapped(peer.ip());
        let valid = same_family && of_one_host(local) && of_one_host(peer);
        if valid { Ok(()) } else { Err(Invalid::Addresses) }
    }
}

/// A length as a difference of sequence numbers. Queues are shorter than 4 GiB ([`MAX_QUEUED`]).
pub(crate) fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

/// Whether sequence number `a` is after `b` (RFC 9293, arithmetic modulo 2^32).
fn is_after(a: u32, b: u32) -> bool {
    b.wrapping_sub(a).cast_signed() < 0
}
