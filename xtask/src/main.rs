//! Checks and generated files.
fn main() {}
