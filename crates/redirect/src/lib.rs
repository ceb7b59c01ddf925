//! The kernel's objects by which the packets of a TCP connection reach the node where its socket is.
//!
//! ```text
//!  client ──▶ home: [Table]       held: drop, and [Hold] keeps the frames
//!                                 forwarded: to the guest's node
//!               │
//!               ▼
//!             guest's node: [Table]  forwarded: into the [Namespace] of that home
//!               │                    answers: from there to the client; all others: drop
//!               ▼
//!  client ◀── directly, with home's address as source
//! ```
//!
//! Order of a move, with the functions of this crate:
//!
//! 1. guest's node: [`Namespace::create`], [`Table::apply`] with [`Change::Forward`] into the namespace
//!    and [`Change::Answer`] to the client ([`RouteLookup::to`]).
//! 2. home: [`Hold::open`], then [`Change::Hold`]. The socket is captured, and restored on the node.
//! 3. home: [`Hold::release`], which changes to [`Change::Forward`], or to [`Change::Forget`] if the
//!    move is cancelled.
//!
//! Where the network does not carry packets with home's address from other machines ([`PathProbe`]
//! finds out), both directions go through a [`Tunnel`].
//!
//! Nothing here communicates with other nodes, and no function waits for packets. The caller needs
//! CAP_NET_ADMIN in its network namespace, and CAP_SYS_ADMIN for new ones; [`probe()`] finds out what
//! is possible.
#![deny(unsafe_code)]

mod elements;
mod ends;
mod error;
mod filter;
mod hold;
mod injector;
mod link;
mod namespace;
mod netlink;
mod network_namespace;
mod nftables;
mod packet_socket;
mod path_probe;
mod probe;
mod route;
mod sysctl;
mod table;
mod tunnel;

pub use elements::{Change, Elements};
pub use ends::{Ends, Family, Way};
pub use error::RedirectError;
pub use hold::{Hold, Released};
pub use injector::Injector;
pub use link::NetworkInterface;
pub use namespace::Namespace;
pub use network_namespace::NetworkNamespace;
pub use path_probe::{PathProbe, ProbeToken, probe_frame};
pub use probe::{Finding, probe};
pub use route::RouteLookup;
pub use table::Table;
pub use tunnel::{MAX_TUNNEL_FRAME_LEN, MAX_TUNNEL_QUEUE, Tunnel, TunnelEnd};
