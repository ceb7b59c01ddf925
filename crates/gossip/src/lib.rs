//! Gossip: how each node learns of all others, and what of them, without a master.
//!
//! Once a period each node sends one message to one random live node: its own fresh entry, and the newest entries that
//! it has of others. So information gets older with the size of the cluster ([`model`]), but no node ever works more.
//! Nothing here reads a clock, opens a socket, or throws dice of its own: times, messages and the seed come from
//! outside, so that the same code runs in the daemon and in a simulation of 10,000 nodes. Why it is as it is:
//! `docs/design/gossip.md`.
//!
//! * [`gossip`]: a node's part; begin here
//! * `compose`: what goes into a message
//! * `pending`: doubts, probes, answers and news that wait for their message
//! * `table`, `payloads`: what is known of the others
//! * [`view`]: how that is told
//! * `message`: its bytes; [`config`]: settings and limits
//! * `clock`, [`dice`]: time and chance, from outside
//! * [`model`]: how old information gets, by calculation; [`ages`]: and by experiment
#![forbid(unsafe_code)]

pub mod ages;
mod clock;
mod compose;
pub mod config;
pub mod dice;
pub mod gossip;
mod message;
pub mod model;
mod payloads;
mod pending;
mod table;
pub mod view;

pub use config::Config;
pub use gossip::{Gossip, TooLong};
pub use message::{Refused, VERSION};
pub use view::{Event, Seen, Status};
