//! Signals that reach deputies.

pub(crate) mod coredump;
pub(crate) mod hold;
pub(crate) mod order;
pub(crate) mod verdict;
