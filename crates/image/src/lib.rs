//! A process on paper: what of it travels, how it is read from a stopped process, and how it is put into one.
//!
//! Only the *user context* is here: memory, registers, signal handlers, and what the kernel keeps about
//! these. Descriptors, credentials, parents, timers and locks never leave home and have no record.
//!
//! * [`layout`]: the address space as a list of regions, and the files they map
//! * [`advice`], [`limits`]: what was said about memory, and how much of it there may be
//! * [`apply`]: turn one address space into another by mapping only what differs
//! * [`content`]: files by the hash of their content, and the node's cache of them
//! * [`object`]: memory that processes share, which has no hash: it lives
//! * [`pages`]: which pages have to be sent
//! * [`place`]: whose file it is, of those of other nodes
//! * [`thread`], [`process`]: registers and the rest; capture and restore side by side
//! * [`reserve`]: the range that deputy and guest keep free for us at the same address
#![deny(unsafe_code)]

pub mod advice;
pub mod apply;
pub mod content;
pub mod layout;
pub mod limits;
pub mod object;
pub mod pages;
pub mod place;
pub mod process;
pub mod reserve;
pub mod thread;

pub use advice::Advice;
pub use layout::{Backing, FileRef, Layout, Region};
pub use process::{ProcessImage, Unmovable};
pub use reserve::Reserve;
pub use thread::ThreadImage;

/// Version of everything in this crate that is serialised; a node refuses what it does not know.
pub const VERSION: u16 = 11;
