//! What a node has, how busy it is, and what its processes ask for. Reads `/proc` and control groups; knows no other
//! node.
//!
//! * [`sampler`]: once a second, the [`Sample`] that the cluster hears of
//!   * [`demand`]: how many threads run or wait for a CPU
//!   * [`group`]: the control groups that limit this node: its quota, its memory
//!   * [`memory`]: memory and swap for a newcomer
//!   * [`pressure`]: stalls, and how much of the time goes to paging
//! * [`speed`]: how fast a CPU is, measured once
//! * [`processes`]: what single processes use and ask for
//! * [`link`]: what it costs to talk to another node, from measurements of the caller's
//! * [`task`]: the texts of `/proc/PID`
//! * [`smooth`]: means that forget
//!
//! **Units.** Speed 10,000 is a standard CPU, load 100 is one standard CPU kept busy. A node's [`speed`](Sample::speed)
//! is what one thread gets there when it is alone: that of one of its CPUs, or the quota's share of it where the quota
//! is less than one CPU. [`cpus`](Sample::cpus) is how many such threads it carries, never less than 1 and not always
//! whole. So `speed * cpus` is all that the node can do, and `load = demand * 100 * 10000 / (speed * cpus)`.
//!
//! Why demand is counted as it is, and what it costs: docs/design/load.md.
#![forbid(unsafe_code)]

mod clock;
pub mod demand;
pub mod group;
pub mod link;
pub mod memory;
pub mod pressure;
mod procdir;
pub mod processes;
pub mod sampler;
pub mod smooth;
pub mod speed;
pub mod task;

pub use link::LinkCost;
pub use processes::{Process, Processes, Rates, Which};
pub use sampler::{Sample, Sampler};
pub use speed::Calibration;
