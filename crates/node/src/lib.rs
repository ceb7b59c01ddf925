//! `ternd`, the daemon of one node, and code that the tools share with it: the configuration, the
//! cluster map, and founding and joining a cluster.
//!
//! ```text
//!  tools ──Request──▶ control ─▶ migrate ──ShimRequest──▶ shims (one process per migrated family)
//!                                   │ peer::client (requests to other nodes)
//!                                   ▼
//!  other nodes ──TLS──▶ peer::listener ─┬▶ peer::server         requests of a member
//!                                       ├▶ cluster::admission   a machine joins
//!                                       ├▶ shim                 passed on to a shim
//!                                       └▶ programs             or to the file or command server
//! ```
//!
//! | module | subject |
//! |---|---|
//! | `daemon` | start-up and shutdown |
//! | `node` | the state that all threads share |
//! | `config` | `ternd.toml`, and the settings that `mosctl` changes |
//! | `cluster` | the map, founding, joining, load and gossip |
//! | `peer` | the TCP port, and messages to and from other daemons |
//! | `control` | the control socket: requests of tools and shims |
//! | `process` | this node's processes, and permissions to move them |
//! | `migrate` | moving a process, and evacuating a node |
//! | `balance` | deciding which processes to move, and the owner's priority over guests |
//! | `shim` | starting shims and sending requests to them |
//! | `programs` | the other programs that ternd starts |
//! | `os` | clocks, locks, files, threads |
//!
//! Each connection has a thread, within limits. No lock on the shared state is held while a thread
//! waits for another process or node. All state that must outlive ternd is in files or in the
//! shims.
#![deny(unsafe_code)]

mod balance;
mod cluster;
pub mod config;
mod control;
mod daemon;
mod migrate;
mod node;
mod os;
mod peer;
mod process;
mod programs;
mod shim;

pub use cluster::bootstrap::{InitOptions, InitReport, JoinOptions, JoinReport, SetupError, init, join};
pub use cluster::follow::follow_map;
pub use cluster::speed::cpu_speed;
pub use cluster::{map, token};
pub use config::Config;
pub use config::settings::read_settings;
pub use daemon::run;
pub use process::credentials::{peer_credentials, squash_root};
pub use process::permission::check_access;
