//! A cluster of 2 to 10,000 nodes in one thread, for `tern sim`: it runs the daemon's own gossip and balancer,
//! and measures what they achieve against what an all-knowing scheduler would, and against static placement.
//!
//! ```text
//!  mix        what happens: jobs that arrive, nodes that fail, join and leave; by name and seed
//!  job        one job: its work, memory, input and output, and how far it is
//!  machine    one node: its CPUs shared by its jobs, its load as it is sampled
//!  transit    moves under way, over links that they share
//!  knowledge  what each node knows of the others, by gossip
//!  world      all of that, in steps of 100 ms
//!  fair       the same jobs on one imaginary machine with all CPUs: what an all-knowing scheduler could give
//!  report     the measures, side by side
//! ```
//!
//! The same options give the same report, byte for byte.
#![forbid(unsafe_code)]

mod chance;
mod fair;
mod job;
mod knowledge;
mod machine;
mod mix;
mod report;
mod transit;
mod world;

pub use job::{Files, Job};
pub use machine::Hardware;
pub use mix::{Event, MIXES, Mix, Scenario};
pub use report::{Ages, Comparison, Deaths, Fairness, Outcome, compare};
pub use tern_balancer::{Objective, Policy};
pub use world::{Information, Placing, Settings, run};
