//! Simulates a cluster of 2 to 10,000 nodes for `tern sim`. It runs the daemon's own gossip and
//! balancer, and compares their results with those of an ideal scheduler and of static placement.
//!
//! ```text
//!  mix        scenarios by name and seed: jobs that arrive, nodes that fail, join and leave
//!  job        one job: its work, memory, input and output, and its progress
//!  machine    one node: its CPUs shared by its jobs, its sampled load
//!  migration  moves under way, over links that they share
//!  information each node's information about the others, from gossip
//!  world      the cluster, in steps of 100 ms
//!  fair       the same jobs on one imaginary machine with all CPUs: the ideal scheduler
//!  report     the results
//! ```
//!
//! The same options give the same report, byte for byte.
#![forbid(unsafe_code)]

mod fair;
mod information;
mod job;
mod machine;
mod migration;
mod mix;
mod report;
mod rng;
mod world;

pub use job::{FileUse, Job};
pub use machine::Hardware;
pub use mix::{MIXES, Mix, NodeEvent, Scenario};
pub use report::{Comparison, Deaths, Fairness, InformationAges, RunResult, compare};
pub use tern_balancer::{Objective, Policy};
pub use world::{Information, PlacementPolicy, SimSettings, run};
