//! Tracks writes that were not synced to the node's disk: they are lost when that machine resets.
//!
//! A server that restarts in the same boot of its machine finds all writes in the kernel. After a
//! reset of the machine the writes may be lost. If they are, every operation on a handle that was
//! open for writing fails with EIO, and so does fsync on a handle that was open for reading.

use crate::lock;
use std::sync::Mutex;

/// A boot of a node's machine, numbered from 1 by this client.
pub(crate) type Boot = u64;

/// The unsynced writes to one file, or to a directory's entries.
#[derive(Debug, Default)]
pub(crate) struct UnsyncedWrites(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Number of writes.
    write_count: u64,
    /// The boot of the unsynced writes; 0 if all are synced.
    unsynced_boot: Boot,
    /// The last boot whose unsynced writes were lost.
    lost_boot: Boot,
}

impl State {
    /// The machine is in this boot; replies may arrive late, from an earlier one.
    fn note_boot(&mut self, boot: Boot) {
        if self.unsynced_boot != 0 && self.unsynced_boot < boot {
            (self.lost_boot, self.unsynced_boot) = (self.unsynced_boot, 0);
        }
    }
}

impl UnsyncedWrites {
    /// A write was made in this boot.
    pub(crate) fn note_write(&self, boot: Boot) {
        let mut state = lock(&self.0);
        state.write_count += 1;
        state.note_boot(boot);
        if boot < state.unsynced_boot {
            state.lost_boot = state.lost_boot.max(boot);
        } else {
            state.unsynced_boot = boot;
        }
    }

    /// Number of writes; to be read before an fsync.
    pub(crate) fn write_count(&self) -> u64 {
        lock(&self.0).write_count
    }

    /// An fsync in this boot covers the first `write_count` writes.
    pub(crate) fn note_sync(&self, write_count: u64, boot: Boot) {
        let mut state = lock(&self.0);
        state.note_boot(boot);
        if state.write_count == write_count && state.unsynced_boot == boot {
            state.unsynced_boot = 0;
        }
    }

    /// Whether writes made in the boot `since`, in which a handle was opened, or in a later boot
    /// were lost. `boot` is the current boot.
    pub(crate) fn has_lost_writes(&self, since: Boot, boot: Boot) -> bool {
        let mut state = lock(&self.0);
        state.note_boot(boot);
        since <= state.lost_boot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsynced_writes_are_lost_with_their_boot() {
        let file = UnsyncedWrites::default();
        assert!(!file.has_lost_writes(1, 2), "nothing was written");
        file.note_write(2);
        assert!(!file.has_lost_writes(1, 2), "the machine was not reset");
        assert!(file.has_lost_writes(1, 3) && file.has_lost_writes(2, 3));
        assert!(!file.has_lost_writes(3, 3), "a handle opened after the loss is not affected");
        file.note_write(3);
        assert!(file.has_lost_writes(2, 3) && !file.has_lost_writes(3, 3));
    }

    #[test]
    fn synced_writes_are_not_lost() {
        let file = UnsyncedWrites::default();
        file.note_write(1);
        let before = file.write_count();
        file.note_write(1);
        file.note_sync(before, 1);
        assert!(file.has_lost_writes(1, 2), "the second write came during the fsync");
        file.note_write(2);
        file.note_sync(file.write_count(), 2);
        assert!(!file.has_lost_writes(2, 3));
    }

    #[test]
    fn a_late_reply_of_an_old_boot_counts_as_lost() {
        let file = UnsyncedWrites::default();
        file.note_write(2);
        file.note_write(1);
        assert!(file.has_lost_writes(1, 2) && !file.has_lost_writes(2, 2));
    }
}
