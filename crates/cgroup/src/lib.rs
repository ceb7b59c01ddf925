//! Control groups: the hierarchies of this machine, and the group of a node's guests and placed
//! commands.
//!
//! * [`mounts`]: the mount table
//! * [`hierarchy`]: the mounted hierarchies, of version 1 and 2, and groups in them
//! * [`guests`]: `tern/guests`, next to the daemon
#![forbid(unsafe_code)]

pub mod guests;
pub mod hierarchy;
pub mod mounts;

pub use hierarchy::Hierarchy;
