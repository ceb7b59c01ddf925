//! CPU time and clocks.

pub(crate) mod clocks;
pub(crate) mod cpu;
pub(crate) mod cpu_threshold;
pub(crate) mod futex_wait;
