//! The leases (fcntl(2), F_SETLEASE) that opening a file would break.

use crate::object::ObjectId;
use std::fs;
use std::io;

/// The leases of this node at one moment. Reading them stops all locking in the kernel for a moment, so
/// they are read once for many files.
#[derive(Debug)]
pub(super) struct Leases {
    /// The content of /proc/locks. It names a file by the device and inode that /proc/PID/maps shows,
    /// which on overlayfs and btrfs are not those of stat.
    locks: String,
}

impl Leases {
    /// Those that processes hold now. None if /proc/locks cannot be read.
    pub(super) fn now() -> Self {
        Self { locks: fs::read_to_string("/proc/locks").unwrap_or_default() }
    }

    /// Whether a mapped file can be opened as it is mapped. Only a write lease prevents that: an open for
    /// writing would break a read lease too, but the kernel grants none on a file that is mapped shared
    /// and writable.
    ///
    /// # Errors
    /// `ResourceBusy` if the open would break a lease, and wait for its holder.
    pub(super) fn check(&self, (device, inode): ObjectId) -> io::Result<()> {
        let file = format!("{:02x}:{:02x}:{inode}", device >> 20, device & 0xf_ffff);
        let mut lines = self.locks.lines();
        let is_broken = lines.any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            matches!(fields[..], [_, "LEASE", _, kind, _, of, ..] if of == file && kind != "READ")
        });
        if is_broken { Err(io::ErrorKind::ResourceBusy.into()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_lease_is_found() {
        let locks = "1: POSIX  ADVISORY  WRITE 71 00:1f:5 0 EOF\n\
                     2: LEASE  ACTIVE    READ  72 00:1f:6 0 EOF\n\
                     3: LEASE  ACTIVE    WRITE 73 00:1f:7 0 EOF\n\
                     4: LEASE  BREAKING  UNLCK 73 00:1f:8 0 EOF\n";
        let leases = Leases { locks: locks.to_owned() };
        let leased = |device| -> Vec<u64> {
            (5..10).filter(|inode| leases.check((device, *inode)).is_err()).collect()
        };
        assert_eq!(leased(31), [7, 8]);
        assert_eq!(leased(30), [0; 0]);
    }
}
