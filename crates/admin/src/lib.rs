//! The administration's tree: what MOSIX shows below `/proc/mosix` and in `/proc/PID`, as files that `cat` and `echo` read and
//! write, at `/run/mosix`.
//!
//! ```text
//!  cat, echo ─▶ kernel ─FUSE─▶ fuse ─▶ tree
//!                                      ├▶ item    what a path is, as a number
//!                                      ├▶ show    what a file says
//!                                      └▶ order   what is written to it asks for
//!                                           └▶ asking ──for that user──▶ ternd
//! ```
//! A process of its own (`tern-admin`), which ternd starts and starts anew. It remembers nothing that matters: all that is shown
//! is asked of ternd there and then, and without ternd the answer is `ENOTCONN`, at once.
//!
//! Whoever has opened a file is who asks, not who writes: a descriptor that a program of root's was given by somebody else is
//! that one's still.
#![forbid(unsafe_code)]

mod asking;
mod fuse;
mod item;
mod mount;
mod order;
mod show;
mod tasks;
mod tree;
mod waiting;

pub use mount::{Mounted, mount, unmount};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock whose holder cannot leave it half changed, or has ended with the process.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
