//! File handles, by which fanotify's events identify files.

use std::io;
use std::os::fd::AsFd;

/// Identifies a file among those of all file systems of this node, for as long as the file exists.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Handle {
    /// The file system ID, as reported by statfs.
    pub(super) volume: u64,
    /// Type of the handle.
    pub(super) kind: i32,
    /// Opaque; defined by the file system.
    pub(super) bytes: Vec<u8>,
}

impl Handle {
    /// The handle of a file on this file system.
    ///
    /// # Errors
    /// If the file system does not support handles.
    pub(super) fn of(fd: impl AsFd, volume: u64) -> io::Result<Self> {
        let (kind, bytes) = tern_control::handle::name_to_handle(fd)?;
        Ok(Self { volume, kind, bytes })
    }
}
