//! Runs of programs: their captured output, their outcomes, and the verdict over many of them.

pub(crate) mod native_outcomes;
pub mod outcome;
pub mod running;
pub mod verdict;
