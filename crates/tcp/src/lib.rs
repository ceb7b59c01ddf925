//! One TCP connection as data: captured from a socket, and restored as another socket, in another
//! network namespace and possibly on another machine. The kernel's interface for this is
//! `TCP_REPAIR` (net/ipv4/tcp.c).
//!
//! ```text
//!  connected ──capture──▶ captured ──discard──▶ placeholder ──restore_into──▶ connected
//!      ▲                     │
//!      └───────resume────────┘                  (new socket) ───restore──────▶ connected
//! ```
//!
//! The caller stops the programs that use the socket, and holds back the connection's packets that
//! arrive, from before [`capture`] until after [`restore`], [`restore_into`] or [`resume`]. A captured
//! socket sends nothing new, but its timers still run: they may repeat segments, with timestamps after
//! which the peer drops those of the restored socket. Data that they would have sent counts as sent
//! then. So the caller calls [`discard`] at once after [`capture`], before it sends the connection
//! anywhere. A move is cancelled by [`restore_into`] after [`discard`], and by [`resume`] before.
//!
//! The caller has CAP_NET_ADMIN and CAP_NET_RAW in the user namespace that owns the network namespace.
//!
//! * [`connection`]: what is sent to the other node; [`validate`](Connection::validate) checks it
//! * [`settings`]: socket options and flags of the open file
//! * [`refused`]: why a connection cannot move
//! * [`capture`], [`restore`], [`placeholder`], [`resume`]: the four operations
//!
//! # What a move loses
//! Congestion window, round-trip times, statistics of `TCP_INFO`, segments received out of order,
//! and the negotiation of ECN. The peer sends unacknowledged segments again. `SO_MARK` is not
//! restored, nor a `SO_PRIORITY` above 6: both may exempt packets from the rules of the node. An
//! urgent byte that was sent and is not acknowledged becomes an ordinary byte if it has to be sent
//! again, since the kernel does not report it.
//!
//! Two things are not found by [`capture`], and the caller must not move such a socket: a key of
//! `TCP_MD5SIG`, and membership in a sockmap of BPF.
#![deny(unsafe_code)]

mod announce;
pub mod capture;
pub mod connection;
pub mod error;
pub mod placeholder;
pub mod refused;
mod repair;
pub mod restore;
pub mod resume;
mod segment;
pub mod settings;
mod syscalls;

pub use capture::capture;
pub use connection::Connection;
pub use error::{CaptureError, Invalid, RestoreError, SystemError};
pub use placeholder::{discard, restore_into};
pub use refused::Refused;
pub use restore::restore;
pub use resume::resume;
pub use settings::Settings;

/// Version of everything that this crate serialises. A node refuses other versions.
pub const VERSION: u16 = 1;
