//! Where and when a running program is migrated: along a fixed journey, or at random.

pub mod journey;
pub mod random_moves;
