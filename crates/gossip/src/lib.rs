//! Gossip: how each node learns of all others and their state, without a master.
//!
//! Once a period each node sends one message to one random live node: its own fresh entry, and the
//! newest entries that it has of others. So information gets older with the size of the cluster
//! ([`model`]), but a node's work does not grow. This crate reads no clock, opens no socket and has
//! no other source of randomness: times, messages and the seed are passed in, so that the same code
//! runs in the daemon and in a simulation of 10,000 nodes. The rationale is in
//! `docs/design/gossip.md`.
//!
//! * [`gossip`]: the protocol of one node; begin here
//! * `compose`: the contents of a message
//! * `pending`: suspicions, probes, replies and urgent news waiting to be sent
//! * `table`, `payloads`: the stored entries of other nodes
//! * [`view`]: those entries as the caller sees them
//! * `message`: the wire format; [`config`]: settings and limits
//! * `clock`, [`rng`]: time and random numbers, from outside
//! * [`model`]: how old information gets, by calculation; [`ages`]: by experiment
#![forbid(unsafe_code)]

pub mod ages;
mod clock;
mod compose;
pub mod config;
pub mod gossip;
mod message;
pub mod model;
mod payloads;
mod pending;
pub mod rng;
mod table;
pub mod view;

pub use config::GossipConfig;
pub use gossip::{Gossip, PayloadTooLong};
pub use message::{ReceiveError, VERSION};
pub use view::{Member, MemberStatus, MembershipEvent};
