//! Real daemons on the loopback, each a process of its own. Their shims are fakes that move
//! nothing, but use the real protocol.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod cluster;
mod fake_shim;
mod joining;
mod moving;
mod requests;
mod restarting;
mod strangers;
