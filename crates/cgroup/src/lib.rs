//! Control groups: which hierarchies this machine has, and the group that holds a node's guests and what is placed there.
//!
//! * [`mounts`]: the mount table
//! * [`hierarchy`]: the mounted hierarchies, of version 1 and 2, and groups in them
//! * [`guests`]: `tern/guests`, beside the daemon
#![forbid(unsafe_code)]

pub mod guests;
pub mod hierarchy;
pub mod mounts;

pub use hierarchy::Hierarchy;
