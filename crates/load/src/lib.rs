//! Measures a node's capacity and load, and what its processes use and demand. Reads `/proc` and
//! control groups; does not communicate with other nodes.
//!
//! * [`sampler`]: once a second, the [`Sample`] that is published to the cluster
//!   * [`demand`]: how many threads run or wait for a CPU
//!   * [`group`]: the control groups that limit this node: its quota, its memory
//!   * [`memory`]: memory and swap available to an arriving process
//!   * [`pressure`]: stalls, and the time lost to paging
//! * [`speed`]: the speed of a CPU, measured once
//! * [`processes`]: what single processes use and demand
//! * [`link`]: the cost of communication with another node, from the caller's measurements
//! * [`task`]: parsers of the files in `/proc/PID`
//! * [`moving_average`]: exponential moving averages
//!
//! **Units.** Speed 10,000 is a standard CPU, load 100 is one busy standard CPU. A node's
//! [`speed`](Sample::speed) is what one thread gets there when it is alone: the speed of one CPU,
//! or the quota's share of it where the quota is less than one CPU. [`cpus`](Sample::cpus) is how
//! many such threads the node can run, at least 1 and possibly fractional. So `speed * cpus` is the
//! node's capacity, and `load = demand * 100 * 10000 / (speed * cpus)`.
//!
//! Why demand is measured this way, and what it costs: docs/design/load.md.
#![forbid(unsafe_code)]

mod clock;
pub mod demand;
pub mod group;
pub mod link;
pub mod memory;
pub mod moving_average;
pub mod pressure;
mod procdir;
pub mod processes;
pub mod sampler;
pub mod speed;
pub mod task;

pub use link::LinkEstimate;
pub use processes::{ProcessRates, ProcessSample, ProcessScanner, ScanScope};
pub use sampler::{Sample, Sampler};
pub use speed::Calibration;
