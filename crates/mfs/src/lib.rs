//! MFS: the files of every node, below `/mfs/NODE` on every node.
//!
//! ```text
//!  program ─▶ kernel ─FUSE─▶ client ══ lanes, mutual TLS ══▶ serve ─▶ kernel of the node that has the files
//! ```
//! Both halves are processes of their own (`tern-mfs`) and outlive ternd. What they say to each other is in [`message`]; what
//! holds of it is in docs/design/files.md.
#![forbid(unsafe_code)]

pub mod client;
pub mod message;
pub mod serve;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock whose holder cannot leave it half changed, or has ended with the process.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
