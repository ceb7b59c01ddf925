//! The descriptors on which the guest's kernel makes calls without a trap.

use super::code::MAX_DESCRIPTORS;

/// Bytes of a set of descriptors in the table.
const SET_LEN: usize = MAX_DESCRIPTORS / 8;

/// Sets of descriptors, as they are in the fast path's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NativeDescriptors {
    bytes: [u8; 4 * SET_LEN],
    /// Whether a set has a member.
    has_any: bool,
}

impl Default for NativeDescriptors {
    fn default() -> Self {
        Self { bytes: [0; 4 * SET_LEN], has_any: false }
    }
}

impl NativeDescriptors {
    /// Adds a file or connection, on which the kernel makes the calls that transfer data.
    pub(crate) fn add_file(&mut self, fd: i32) {
        self.add(0, fd);
    }

    /// Adds an epoll set, for which the kernel makes the waits.
    pub(crate) fn add_epoll_set(&mut self, fd: i32) {
        self.add(1, fd);
    }

    /// Adds a descriptor for which poll and select can wait here.
    pub(crate) fn add_polled(&mut self, fd: i32) {
        self.add(2, fd);
    }

    /// Adds a connection for which poll and select can wait here.
    pub(crate) fn add_polled_connection(&mut self, fd: i32) {
        self.add(2, fd);
        self.add(3, fd);
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        !self.has_any
    }

    /// The sets as bytes of the table.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn add(&mut self, set: usize, fd: i32) {
        if let Some(fd) = usize::try_from(fd).ok().filter(|fd| *fd < MAX_DESCRIPTORS) {
            self.bytes[set * SET_LEN + fd / 8] |= 1 << (fd % 8);
            self.has_any = true;
        }
    }
}
