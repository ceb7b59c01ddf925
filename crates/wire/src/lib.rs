//! Frames and authenticated links between nodes.
//!
//! ```text
//!  client ── preamble, 32 bytes in clear ──▶ ternd     says whose connection this is to be
//!         ◀══════ TLS 1.3, mutual ═════════▶ ternd, or the shim that ternd passes the socket to
//!         ◀══════ frames: kind, flags, tag, payload ══▶
//! ```
//!
//! Synchronous: a [`Link`] belongs to one thread, which either waits on it or polls it. The codec ([`frame`],
//! [`preamble`], [`message`]) does no I/O and reads no clock, and whatever a peer sends can neither make it
//! panic nor allocate beyond [`limits`].
#![forbid(unsafe_code)]

pub mod authority;
mod files;
pub mod frame;
pub mod gatekeeper;
pub mod hostile;
pub mod identity;
pub mod limits;
pub mod link;
pub mod message;
mod outgoing;
pub mod pin;
pub mod preamble;
pub mod secret;
mod session;
pub mod tls;

pub use authority::Authority;
pub use frame::{Frame, FrameError};
pub use gatekeeper::GateKey;
pub use identity::{Identity, IdentityError, NodeKey};
pub use link::{Link, LinkError};
pub use message::{MessageError, decode, encode};
pub use pin::{Ephemeral, fingerprint_of, join_client, pinned_client, pinned_server};
pub use preamble::{Preamble, PreambleError};
pub use secret::{Nonce, Secret, nonce};
pub use tls::{ClientTls, ServerTls};
