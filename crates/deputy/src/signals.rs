//! Signals that reach deputies.

pub(crate) mod coredump;
pub(crate) mod hold;
mod masked_call;
pub(crate) mod order;
pub(crate) mod verdict;
