//! What of files in hand is this node's own ([`crate::near`]): calls on them are let through, and their descriptors are the guest's.

use super::Files;
#[cfg(test)]
use crate::near::Near;

impl Files {
    /// Files that leave are not made calls on here any more: from now on their offset is what we remember.
    pub(super) fn part(&mut self) {
        if self.passed {
            return;
        }
        for (fd, file) in self.open.iter_mut().filter(|(_, file)| file.leaves) {
            file.known.offset = file.offset();
            if file.near.take().is_some_and(|near| near.is_open()) {
                self.stale.push(*fd);
            }
        }
    }

    /// The descriptors below this one of files that are this node's own, a bit each.
    pub(crate) fn own_files(&self, below: i32) -> u64 {
        let own = self.open.iter().filter(|(_, file)| file.is_near() && !file.leaves);
        own.filter(|(fd, _)| (0..below).contains(*fd)).fold(0, |bits, (fd, _)| bits | 1 << fd)
    }

    /// As if this file in hand had been opened by the guest itself.
    #[cfg(test)]
    pub(crate) fn open_here(&mut self, fd: i32, near: Near) {
        self.open.get_mut(&fd).unwrap().near = Some(near);
    }

    /// A call is let through, or may be made without a stop.
    pub(crate) fn pass(&mut self) {
        self.passed = true;
    }

    /// The program has trapped, or stands: what was let through is over.
    pub(crate) fn is_back(&mut self) {
        self.passed = false;
    }

    /// Whether a file can only be put down when the program is back.
    pub(crate) fn await_return(&self) -> bool {
        self.passed && self.open.values().any(|file| file.leaves && file.is_near())
    }

    /// A file of this node's own goes home; its thread waits in a call.
    pub(crate) fn put_down_near(&mut self, fd: i32) {
        if let Some(file) = self.open.get_mut(&fd) {
            file.leaves = true;
        }
        self.part();
    }

    /// The guest has this descriptor still, and should not.
    pub(crate) fn is_stale(&mut self, fd: i32) {
        self.stale.push(fd);
    }

    /// The guest has this descriptor anew.
    pub(crate) fn is_given(&mut self, fd: i32) {
        self.stale.retain(|stale| *stale != fd);
    }

    /// Descriptors that the guest has, and should not.
    pub(crate) fn take_stale(&mut self) -> Vec<i32> {
        std::mem::take(&mut self.stale)
    }
}
