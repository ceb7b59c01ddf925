//! What a node, its shims and its tools say to each other, over Unix sockets on one machine.
//!
//! Each conversation is one connection: one request, one reply, then both ends close. Both travel as one
//! JSON document preceded by its length (u32, big endian, at most [`stream::MOST`] bytes). Who asks is known from the socket's peer
//! credentials, never from the request.
//!
//! ```text
//!  tool ──Request──▶ ternd         RUN/control          (RUN is the node's run directory, /run/tern)
//!  shim ──Request──▶ ternd         RUN/control          (root, or the user who runs ternd, only)
//!  ternd ──ShimRequest──▶ shim     RUN/shims/ID.sock
//!  tool, ternd ──OutsideAsk──▶ gatekeeper   RUN/outside.sock
//! ```
#![deny(unsafe_code)]

pub mod advice;
pub mod cluster;
pub mod costs;
pub mod door;
pub mod executed;
pub mod handle;
pub mod outside;
pub mod place;
pub mod report;
pub mod request;
pub mod shared;
pub mod shim;
pub mod steer;
pub mod stream;
pub mod traffic;
pub mod why;

pub use advice::{Advice, Forget, Habit};
pub use cluster::{ClusterReport, NodeFlags, NodeLoad, NodeState, RecentMigration};
pub use costs::{Costs, LinkRow, MigrationCosts};
pub use outside::{OutsideAsk, OutsideJob, OutsideReply};
pub use place::Place;
pub use report::{
    MigrationReport, NodeRow, PlacedRow, ProcessRow, Refusal, RefusalKind, StartedAs, StatusReport, Usage,
};
pub use request::{Destination, Lock, Reply, Request};
pub use shim::{ShimReply, ShimRequest, ShimRole, ShimStart};
pub use steer::{Decay, Evacuation, Settings, Switch};
pub use traffic::FileTraffic;
pub use why::{FilesRow, ProspectRow, WhyReport};
