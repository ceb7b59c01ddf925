//! The administration tree: what MOSIX shows below `/proc/mosix` and in `/proc/PID`, as files at
//! `/run/mosix` for `cat` and `echo`.
//!
//! ```text
//!  cat, echo ─▶ kernel ─FUSE─▶ fuse ─▶ tree
//!                                      ├▶ inode   a file or directory, encoded in its inode number
//!                                      ├▶ content the content of a file
//!                                      ├▶ action  the request for a value written to a file
//!                                      └▶ ternd   sends requests to the daemon, for a user
//! ```
//! The tree is served by a process of its own (`tern-admin`), which ternd starts and restarts. It
//! stores nothing: nearly every file that is read needs a request to ternd, which fails at once
//! with `ENOTCONN` if ternd is not running.
//!
//! Requests are made on behalf of the user that opened the file, not the one that writes to it. So
//! if another user opens a file and passes the descriptor to a program of root, a write by that
//! program does not lend root's rights to that user.
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
