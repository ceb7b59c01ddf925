//! Commands that list, migrate and signal processes.

pub(crate) mod migrate;
pub(crate) mod moskillall;
pub(crate) mod mosps;
pub(crate) mod mps;
