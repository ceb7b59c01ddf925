//! CPU time used away, and the timers and limits that count it.

pub(crate) mod expiry;
pub(crate) mod fire;
pub(crate) mod rusage;
pub(crate) mod timers;
pub(crate) mod usage_store;
