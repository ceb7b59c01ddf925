//! The administration tree: what MOSIX shows below `/proc/mosix` and in `/proc/PID`, as files at
//! `/run/mosix` for `cat` and `echo`.
//!
//! ```text
//!  cat, echo ─▶ kernel ─FUSE─▶ fuse ─▶ tree
//!                                      ├▶ inode   a file or directory, encoded in its inode number
//!                                      ├▶ content the content of a file
//!                                      └▶ action  the request for a value written to a file
//!                                           └▶ ternd ──on behalf of the user──▶ ternd
//! ```
//! The tree is served by a process of its own (`tern-admin`), which ternd starts and restarts. It
//! keeps no state that matters: each read is a request to ternd, and fails with `ENOTCONN` at once
//! if ternd is not running.
//!
//! Requests are made on behalf of the user that opened the file, not the one that writes to it: a
//! program of root's may write to a descriptor that another user has opened and passed to it.
#![forbid(unsafe_code)]

mod action;
mod content;
mod fuse;
mod inode;
mod mount;
mod procfs;
mod ternd;
mod tree;
mod wait_limit;

pub use mount::{Mounted, mount, unmount};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose data no panicking holder can leave inconsistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
