//! A cluster inside one machine: what the README's first command starts, what tests use, what benchmarks
//! measure.
//!
//! Each node is a set of namespaces (pid, mount, net, uts, ipc) with a small init of ours as its pid 1, a
//! writable layer of its own over the machine's files, a share of the CPU, and a link to the others.
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
//! Nothing of a lab exists outside its namespaces but its directory `/run/tern-lab/NAME` and its control
//! groups `tern-lab/NAME`, and every process of a lab is in those groups: so [`down`] finds all of it, even
//! after its owner was killed. A keeper process does that at once when the owner of a [`Lab`] dies.
//!
//! The lab starts programs of its own (init, switch, wire, …) by running the `tern` binary under the name
//! `tern-lab-init`; that binary must call [`init_main`] then.
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
// What happens between fork and exec, and leaving namespaces.
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
