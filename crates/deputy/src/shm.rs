//! Shared memory of processes that are away: it must not be accessed at home meanwhile.

pub(crate) mod access;
pub(crate) mod open_guard;
pub(crate) mod open_watch;
pub(crate) mod sharers;
