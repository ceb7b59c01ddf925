//! Shared memory of processes that are away: it must not be accessed at home meanwhile.

pub(crate) mod access;
pub(crate) mod objects;
pub(crate) mod open_blocker;
pub(crate) mod open_watch;
pub(crate) mod sharers;
