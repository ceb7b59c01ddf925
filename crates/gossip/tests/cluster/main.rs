//! Whole in-memory clusters, with clocks and networks that fail.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on has failed")]

mod ages;
mod deaths;
mod faults;
mod hostile;
mod membership;
mod simulated;
