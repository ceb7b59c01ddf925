//! Shared memory of processes that are away: it must not be accessed at home meanwhile.

mod access;
pub(crate) mod mapped_away;
mod objects;
mod open_blocker;
mod open_watch;
pub(crate) mod openers;
mod opens;
mod scan;
pub(crate) mod shared_memory;
pub(crate) mod sharers;
