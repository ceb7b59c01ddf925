//! What the kernel calls a file in its events.

use std::io;
use std::os::fd::AsFd;

/// A file of all that are there, while it is there.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Handle {
    /// The file system, as statfs says.
    pub(super) volume: u64,
    /// The kind of what follows.
    pub(super) kind: i32,
    /// The file system's own business.
    pub(super) bytes: Vec<u8>,
}

impl Handle {
    /// The one of a file on this file system.
    ///
    /// # Errors
    /// If the file system has none.
    pub(super) fn of(fd: impl AsFd, volume: u64) -> io::Result<Self> {
        let (kind, bytes) = tern_control::handle::of(fd)?;
        Ok(Self { volume, kind, bytes })
    }
}
