//! Frames and authenticated links between nodes.
//!
//! ```text
//!  client ── preamble, 32 bytes in clear ──▶ ternd     names the service that the connection is for
//!         ◀══════ TLS 1.3, mutual ═════════▶ ternd, or the shim that ternd passes the socket to
//!         ◀══════ frames: kind, flags, tag, payload ══▶
//! ```
//!
//! Synchronous: a [`Link`] belongs to one thread, which either waits on it or polls it. The codec
//! ([`frame`], [`preamble`], [`message`]) does no I/O and reads no clock. Bytes from a peer cannot
//! make it panic, or allocate more than [`limits`] allow.
#![deny(unsafe_code)]

pub mod authority;
mod byte_queue;
pub mod corrupt;
mod files;
pub mod frame;
pub mod gatekeeper;
pub mod identity;
pub mod limits;
pub mod link;
mod liveness;
pub mod members;
pub mod message;
pub mod pin;
pub mod preamble;
pub mod secret;
mod session;
pub mod tls;

pub use authority::Authority;
pub use frame::{Frame, FrameError};
pub use gatekeeper::GateKey;
pub use identity::{Identity, IdentityError, NodeKey, key_fingerprint};
pub use link::{Link, LinkError};
pub use members::Members;
pub use message::{MessageError, decode, encode};
pub use pin::{Ephemeral, fingerprint_of, join_client, pinned_client, pinned_server};
pub use preamble::{Preamble, PreambleError};
pub use secret::{Nonce, Secret, nonce};
pub use tls::{ClientTls, ServerTls};
