//! What is on the screen after what has happened: events go in, pictures come out. No terminal is needed.
//!
//! The pictures are in `snapshots/`; `cargo insta review`, or `INSTA_UPDATE=always`, accepts changed ones.
#![allow(clippy::unwrap_used, reason = "a test may end by panicking, and its helpers too")]

mod keys;
mod pictures;
mod sample;
mod scale;
