//! Moves connections between two nodes, each a network namespace.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod move_and_return;
mod scene;
mod tunnel;
