//! Moves of processes: requests, departures, moves between other nodes, and returns.

pub(crate) mod arrival;
pub(crate) mod draining;
pub(crate) mod frozen;
pub(crate) mod group;
pub(crate) mod hollow;
pub(crate) mod home_wait;
pub(crate) mod left_behind;
pub(crate) mod movable;
pub(crate) mod outgoing;
pub(crate) mod remigrate;
pub(crate) mod requests;
pub(crate) mod restore;
pub(crate) mod source;
pub(crate) mod syscall_restart;
