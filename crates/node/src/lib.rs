//! The daemon of a node, `ternd`, and what tools need of it: founding and joining a cluster.
//!
//! ```text
//!  tools ──Request──▶ control ─▶ moving ──ShimRequest──▶ shims (one process per migrated family)
//!                                  │ peers (asking)
//!                                  ▼
//!  other nodes ──TLS──▶ listen ─┬▶ serve   a member asks: ping, host a guest, map
//!                               ├▶ admit   a machine joins
//!                               ├▶ shims   a connection is passed on to a shim
//!                               └▶ beside  or to the server of this node's files, or to what runs commands
//! ```
//! Threads, one for each connection, within limits; no lock is held over a wait for somebody else. All that
//! must outlive ternd is in files or in the shims.
#![deny(unsafe_code)]

mod admin;
mod admit;
mod balancing;
mod beside;
mod cluster;
pub mod config;
mod control;
mod costs;
mod credentials;
mod daemon;
mod eligible;
mod entry;
mod evacuation;
mod files;
pub mod found;
mod gatekeeper;
mod habits;
mod kernel_log;
mod leave;
mod listen;
pub mod map;
pub mod message;
mod mfs;
mod moving;
mod out;
mod owner;
mod peers;
mod permission;
mod places;
mod processes;
mod procfs;
mod registry;
#[cfg(test)]
mod scratch;
mod serve;
mod settings;
mod shims;
mod single;
mod slots;
mod speed;
mod state;
pub mod token;
mod traffic;
pub mod users;
mod watch;
mod why;

pub use config::Config;
pub use credentials::{with_groups as caller, without_root};
pub use daemon::run;
pub use found::{InitOptions, InitReport, JoinOptions, JoinReport, SetupError, init, join};
pub use permission::check_access;
pub use settings::settings;
pub use speed::speed;
