//! CPU time used away, the timers and limits that count it, time namespaces, and the time limits of
//! sockets.

pub(crate) mod cpu_timers;
mod expiry;
mod fire;
pub(crate) mod namespace;
mod rusage;
pub(crate) mod socket_limit;
pub(crate) mod timers;
pub(crate) mod usage;
pub(crate) mod usage_store;
