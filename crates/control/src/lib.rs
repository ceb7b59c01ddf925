//! Requests and replies between a node's daemon (ternd), its shims and its tools, over Unix sockets
//! on one machine.
//!
//! Each connection carries one request and one reply, and is then closed. Both are JSON documents
//! preceded by their length (u32, big endian, at most [`stream::MAX_DOCUMENT_LEN`] bytes). The
//! caller is identified by the socket's peer credentials, never by the request.
//!
//! ```text
//!  tool ──Request──▶ ternd         RUN/control         (RUN is the run directory, /run/tern)
//!  shim ──Request──▶ ternd         RUN/control         (only root, or the user who runs ternd)
//!  ternd ──ShimRequest──▶ shim     RUN/shims/ID.sock
//!  tool, ternd ──GatekeeperRequest──▶ gatekeeper   RUN/outside.sock
//! ```
//!
//! ternd and the shims can be of different versions, since shims outlive an upgrade of ternd. So
//! the names in the JSON are part of the format: where a Rust name differs, `serde(rename)` keeps
//! the name in the JSON.
#![deny(unsafe_code)]

mod advice;
mod cluster;
pub mod control_socket;
mod costs;
pub mod executed;
pub mod gatekeeper;
pub mod handle;
pub mod process_reader;
pub mod procfs;
mod report;
mod request;
mod settings;
pub mod shared;
pub mod shim;
pub mod stream;
mod symbolic_node;
mod traffic;
pub mod turn_watch;
pub mod used_away;
mod why;

pub use advice::{Advice, DecayClass, Workload};
pub use cluster::{ClusterReport, NodeFlags, NodeLoad, NodeState, RecentMigration};
pub use costs::{Costs, LinkRow, MigrationCosts};
pub use gatekeeper::{GatekeeperJob, GatekeeperReply, GatekeeperRequest};
pub use process_reader::{ReadError, read_process};
pub use report::{
    ConnectionRow, MigrationReport, NetworkPath, NodeRow, PathRow, PlacedRow, ProcessRow, Refusal,
    RefusalKind, StartedAs, StatusReport, Usage,
};
pub use request::{Destination, Lock, Reply, Request};
pub use settings::{DecayRates, Evacuation, NodeSettings, Switch};
pub use shim::{ShimReply, ShimRequest, ShimRole, ShimStart};
pub use symbolic_node::SymbolicNode;
pub use traffic::FileTraffic;
pub use why::{CandidateRow, FilesRow, WhyReport};
