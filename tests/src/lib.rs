//! The harness of the migration tests: tiny programs, a lab cluster to move them in, and the
//! comparison of each run with one that did not move.
//!
//! ```text
//!  programs ──▶ moves ─────▶ runs
//!  catalogue,   journey in   captured output, outcome,
//!  built        a cluster    comparison, verdict
//! ```
//!
//! [`drivers`] are programs that a test controls step by step; [`cluster`] also has faults to
//! inject, jobs for load balancing, and the search for leaks.
//!
//! To work on one program:
//! `TERN_PROGRAMS=file,pipe TERN_FLAVOURS=static cargo test -p tern-tests --test moving journeys`.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod drivers;
pub mod moves;
pub mod programs;
pub mod runs;
