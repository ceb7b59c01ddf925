//! The image of a process: the state that is sent, how it is captured from a stopped process, and
//! how it is restored into one.
//!
//! Only the *user context* is part of it: memory, registers, signal handlers, and the kernel's
//! state about these. Descriptors, credentials, parents, timers and locks stay at home and are not
//! described.
//!
//! * [`layout`]: the address space as a list of regions, and the files they map
//! * [`advice`], [`limits`]: a program's advice about its memory, and its limits on memory
//! * [`apply`]: changes one address space into another by mapping only the differences
//! * [`content`]: mapped files identified by content hash, and the node's cache of them
//! * [`object`]: writable memory that processes share, which has no hash because it changes
//! * [`pages`]: finds the pages that must be sent
//! * [`node_file`]: files that the guest's node can open itself, directly or through MFS
//! * [`thread`], [`process`]: registers and all other state; capture and restore side by side
//! * [`reserve`]: the address range that Tern keeps for itself in deputy and guest, at the same
//!   address
#![deny(unsafe_code)]

pub mod advice;
pub mod apply;
pub mod content;
pub mod futex_wait;
pub mod guards;
pub mod layout;
pub mod limits;
pub mod modes;
pub mod node_file;
pub mod object;
pub mod pages;
mod pending;
pub mod process;
pub mod reserve;
mod rights;
pub mod sharing;
pub mod thread;
mod unmovable;

pub use advice::MemoryAdvice;
pub use layout::{Backing, FileRef, Layout, Region};
pub use process::ProcessImage;
pub use reserve::Reserve;
pub use rights::Rights;
pub use thread::ThreadImage;
pub use unmovable::Unmovable;

/// Version of everything that this crate serialises. A node refuses other versions.
pub const VERSION: u16 = 19;
