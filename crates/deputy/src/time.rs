//! CPU time used away, and the timers and limits that count it.

pub(crate) mod cpu_timers;
mod expiry;
mod fire;
mod rusage;
pub(crate) mod timers;
pub(crate) mod usage;
pub(crate) mod usage_store;
