//! What of files in hand is this node's own ([`crate::near`]): calls on them are let through, and their descriptors are the guest's.

use super::Files;

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

    /// A call is let through.
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
