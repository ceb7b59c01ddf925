//! Runs a cluster inside one machine, for trying Tern out, for tests and for benchmarks.
//!
//! Each node is a set of namespaces (pid, mount, net, uts, ipc) with a small init as its pid 1, a
//! private writable layer over the machine's files, a share of the CPU, and network links to the
//! other nodes.
//!
//! ```text
//!        node1            node2             each: init = pid 1, overlay root, cgroup with quota
//!       ┌──────┐         ┌──────┐
//!       │ eth0 │         │ eth0 │            TBF: what the node sends
//!       └──┬───┘         └───┬──┘
//!   ┌──────┴─── switch ──────┴──────┐       a network namespace of its own; holds the lab's tmpfs too
//!   │     p1 ══ bridge or ══ p2     │       TBF: what the node receives
//!   │         emulator              │       emulator: delay, loss and hubs, in user space
//!   └───────────────────────────────┘
//! ```
//!
//! Outside its namespaces, a lab consists only of its directory `/run/tern-lab/NAME` and its
//! control groups `tern-lab/NAME`. Every process of a lab is in those groups, so [`down`] finds all
//! of them even after the owner was killed. A watchdog process calls [`down`] as soon as the owner
//! of a [`Lab`] dies.
//!
//! The lab starts its helper programs (init, switch, emulator, …) by running the `tern` binary
//! under the name `tern-lab-init`. A binary started under that name must call [`init_main`].
#![deny(unsafe_code)]

pub mod command;
mod error;
mod lab;
mod network;
mod node;
mod process;
mod roles;
mod storm;

pub use error::LabError;
pub use lab::options::{LabName, LabOptions};
pub use lab::{Lab, down};
pub use network::cuts::Cable;
pub use network::link_spec::{LinkSpec, Topology};
pub use node::Node;
pub use roles::{INIT_NAME, init_main};
pub use storm::{Difference, MoveStats, ProgramMoves, StormReport};
