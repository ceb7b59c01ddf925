//! The published CPU time of a process.

use std::time::Instant;

/// The published CPU time, as an addition to the time that this node's kernel has counted.
#[derive(Debug)]
pub(super) struct CpuClock {
    /// Seconds, and nanoseconds below a second.
    pub(super) offset: (i64, i64),
    pub(super) until: Instant,
    /// Whether it is in the table.
    pub(super) is_published: bool,
}

impl CpuClock {
    /// Its representation in the table.
    pub(super) fn bytes(&self) -> [u8; 16] {
        let (mut bytes, (seconds, rest)) = ([0; 16], self.offset);
        bytes[..8].copy_from_slice(&seconds.to_le_bytes());
        bytes[8..].copy_from_slice(&rest.to_le_bytes());
        bytes
    }
}
