//! Programs in a cluster that a test controls step by step, by commands on their standard input.

pub mod disk_comparison;
pub mod file_guest;
pub mod hostile_guest;
pub mod line_client;
pub mod siblings;
