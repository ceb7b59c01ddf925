//! What of files in hand is this node's own ([`crate::near`]): calls on them are let through, and their descriptors are the guest's.

use super::{Files, OpenFile, TERM};
use crate::near::{Beside, Near};
use std::time::Instant;
use tern_migrate::message::FileWord;

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
        let own = self.open.iter().filter(|(_, file)| file.is_near() && !file.leaves && file.is_steady());
        own.filter(|(fd, _)| (0..below).contains(*fd)).fold(0, |bits, (fd, _)| bits | 1 << fd)
    }

    /// How long calls on files that nodes share may be made without asking home again, if any may.
    pub(crate) fn vouched_until(&self) -> Option<Instant> {
        let shared = self.open.values().filter(|file| file.is_near() && file.is_shared());
        shared.filter_map(|file| file.vouched).map(|since| since + TERM).min()
    }

    /// Whether home has said of a file, since anything was heard, that nobody has changed it.
    pub(crate) fn is_vouched(&self, fd: i32) -> bool {
        self.open.get(&fd).is_some_and(OpenFile::is_vouched)
    }

    /// Takes what home says of a file that nodes share. Where it is read here others' changes may be seen late; so when there is one it goes home.
    pub(super) fn hear_of_shared(
        &mut self,
        fd: i32,
        word: &FileWord,
        asked: Option<Instant>,
        beside: &Beside,
    ) {
        let locks = self.locks;
        let Some(file) = self.open.get_mut(&fd).filter(|file| !file.leaves) else { return };
        match word {
            FileWord::Steady => file.vouched = asked,
            FileWord::Changed => {
                file.share_no_more();
                self.part();
            }
            FileWord::Shared(place) if file.near.is_none() && !file.known.writes && !locks => {
                (file.near, file.vouched) = (Near::shared(place, beside), asked);
            }
            _ => {}
        }
    }

    /// As if this file in hand had been opened by the guest itself.
    #[cfg(test)]
    pub(crate) fn open_here(&mut self, fd: i32, near: Near) {
        self.open.get_mut(&fd).unwrap().near = Some(near);
    }

    /// As if home had just said that nobody has changed it.
    #[cfg(test)]
    pub(crate) fn vouch(&mut self, fd: i32) {
        self.open.get_mut(&fd).unwrap().vouched = Some(Instant::now());
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

impl OpenFile {
    fn is_shared(&self) -> bool {
        self.near.as_ref().is_some_and(Near::is_shared)
    }

    pub(crate) fn is_vouched(&self) -> bool {
        self.vouched.is_some_and(|since| since.elapsed() < TERM)
    }

    /// Whether what this kernel has of it is what it is.
    fn is_steady(&self) -> bool {
        !self.is_shared() || self.is_vouched()
    }

    /// If nodes share it, it is read at home from now on.
    pub(super) fn share_no_more(&mut self) {
        if self.is_shared() {
            self.leaves |= self.is_near();
            // What was only offered is in hand as before.
            self.near.take_if(|near| !near.is_open());
        }
    }
}
