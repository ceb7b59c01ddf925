//! The commands, grouped by task. Each has one file with its command line and its implementation.

pub(crate) mod cluster;
pub(crate) mod files;
pub(crate) mod placed;
pub(crate) mod process;
pub(crate) mod run;
pub(crate) mod tools;
pub(crate) mod watch;
