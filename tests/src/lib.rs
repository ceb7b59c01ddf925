//! The harness of the migration tests: tiny programs, a lab cluster to move them in, and the
//! comparison of each run with one that did not move.
//!
//! ```text
//!  catalogue ─▶ programs ─▶ journey ─▶ running ─▶ outcome ─▶ verdict
//!  what there is  built      moved in a   captured   compared   one table
//!                            cluster
//! ```
//!
//! To work on one program:
//! `TERN_PROGRAMS=file,pipe TERN_FLAVOURS=static cargo test -p tern-tests --test moving journeys`.
#![forbid(unsafe_code)]

pub mod catalogue;
pub mod cluster;
pub mod disk_comparison;
pub mod fault_injection;
pub mod file_guest;
pub mod hostile;
pub mod jobs;
pub mod journey;
pub mod line_client;
pub mod material;
pub mod mover;
pub mod natives;
pub mod outcome;
pub mod programs;
pub mod resources;
pub mod running;
pub mod verdict;
