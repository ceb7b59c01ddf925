//! Daemons on the loopback, each a process of its own, with shims that move nothing but speak as real ones do.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod cluster;
mod fake_shim;
mod joining;
mod moving;
mod requests;
mod restarting;
mod strangers;
