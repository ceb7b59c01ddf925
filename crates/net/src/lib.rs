//! tern-net: the connections of programs, on the nodes where the programs run
//! (docs/design/connections.md).
//!
//! ```text
//!  home's shim ──offer──▶ [home]  ◀══ link: [message] ══▶  [guest] ◀──take, return── guest's shim
//!                           │                                 │
//!                           ▼                                 ▼
//!                  socket, placeholder                 socket in a namespace with home's address
//!                           └──────────── [packets] ──────────┘
//! ```
//!
//! Each node has one such process. It has CAP_NET_ADMIN, so that shims need not. It holds no
//! connection itself: after it has ended, connections go on where they are, until it is started again.
#![forbid(unsafe_code)]

pub mod guest;
pub mod home;
pub mod link;
pub mod message;
pub mod packets;
pub mod path;
pub mod serve;
mod tunnel;
