//! Runs a cluster inside one machine, for the README's first command, for tests and for benchmarks.
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
//!   │           wire                │       wire: delay, loss and hubs, in user space
//!   └───────────────────────────────┘
//! ```
//!
//! Outside its namespaces, a lab consists only of its directory `/run/tern-lab/NAME` and its
//! control groups `tern-lab/NAME`. Every process of a lab is in those groups, so [`down`] finds all
//! of them even after the owner was killed. A keeper process calls [`down`] as soon as the owner of
//! a [`Lab`] dies.
//!
//! The lab starts its helper programs (init, switch, wire, …) by running the `tern` binary under
//! the name `tern-lab-init`. A binary started under that name must call [`init_main`].
#![deny(unsafe_code)]

mod cgroup;
mod cluster;
pub mod command;
mod enter;
mod error;
mod faults;
mod init;
mod keeper;
mod lab;
mod link;
mod medium;
mod netns;
mod node;
mod options;
// Raw packet sockets: libc's sockaddr_ll and setsockopt.
#[allow(unsafe_code, reason = "raw packet sockets")]
mod packet;
mod process;
mod root;
// Signal masks and handlers.
#[allow(unsafe_code, reason = "signal masks and handlers")]
mod signals;
// Code that runs between fork and exec, and unshare.
#[allow(unsafe_code, reason = "namespaces and pre_exec")]
mod spaces;
mod state;
mod storm;
mod topology;
mod wire;

pub use error::LabError;
pub use faults::Cable;
pub use init::{INIT_NAME, init_main};
pub use lab::{Lab, down};
pub use link::{Link, Shape};
pub use node::Node;
pub use options::{Name, Options};
pub use storm::{Difference, Moves, Report};
