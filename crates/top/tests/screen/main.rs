//! Tests the screen after a sequence of events, without a terminal.
//!
//! The expected pictures are in `snapshots/`; `cargo insta review` or `INSTA_UPDATE=always` accepts
//! changes.
#![allow(clippy::unwrap_used, reason = "a test may end by panicking, and its helpers too")]

mod keys;
mod pictures;
mod sample;
mod scale;
