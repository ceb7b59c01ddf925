//! What the tests of whole journeys share: tiny programs, a cluster in the lab to move them in, and how a run
//! is compared with one that never moved.
//!
//! ```text
//!  catalogue ─▶ programs ─▶ journey ─▶ running ─▶ outcome ─▶ verdict
//!  what there is  built      moved in a   captured   compared   one table
//!                            cluster
//! ```
//!
//! For work on one program: `TERN_PROGRAMS=file,pipe TERN_FLAVOURS=static cargo test -p tern-tests --test journeys out`.
#![forbid(unsafe_code)]

pub mod asked;
pub mod breaking;
pub mod catalogue;
pub mod cluster;
pub mod doers;
pub mod held;
pub mod hostile;
pub mod jobs;
pub mod journey;
pub mod material;
pub mod mover;
pub mod natives;
pub mod outcome;
pub mod programs;
pub mod running;
pub mod told;
pub mod verdict;
