//! Resources of processes: CPU time, CPU-time timers, limits, and the scheduler's time slices.

pub mod allowance;
pub mod cpu;
pub mod limit;
pub mod time_slice;
pub mod timers;
