//! Opening and closing delegated files: the data that home sends with the open, and closes that are
//! sent later.
//!
//! Home sends a file's attributes and first bytes with the result of the open. They serve the calls
//! that usually follow. The attributes are valid until the result of the next call. The content is
//! valid until a result reports that the file has changed. A signal invalidates both, and both
//! expire like other cached data ([`CACHE_TERM`]).
//!
//! The close of a file that was only read is sent in the prelude of the next call, whatever call
//! that is, so the descriptor is free again for that call. The delay is visible only to a process
//! that waits for an effect of the close, such as the release of a lock. So files with a lock are
//! excluded, and a close is sent after 20 ms at the latest.

use super::{FileCache, ReadAhead};
use crate::files::limits::CACHE_TERM;
use std::time::{Duration, Instant};
use tern_migrate::prefetch::{FileAttributes, MAX_PREFETCH, OpenPrefetch};

/// How long a pending write may wait for another call that goes home.
const WRITE_DELAY: Duration = Duration::from_secs(1);

impl FileCache {
    /// How many bytes of a file home may send with the result of this call, if that opens it.
    pub(crate) fn prefetch_len(&self, nr: u32) -> u32 {
        let opens = [libc::SYS_open, libc::SYS_openat, libc::SYS_openat2, libc::SYS_creat];
        let wants_data = opens.contains(&i64::from(nr))
            && !self.shares_fd_table
            && !self.is_returning_all
            && !self.skip_prefetch;
        if wants_data { MAX_PREFETCH as u32 } else { 0 }
    }

    /// Stores the data that came with a file, which was requested at `sent_at`.
    pub(super) fn store_prefetched(&mut self, fd: i32, prefetch: &OpenPrefetch, sent_at: Instant) {
        // A signal may have announced a later change.
        let is_current = self.request_generation == self.generation;
        let fresh = |file: &&mut super::DelegatedFile| {
            !file.is_returning && file.read_ahead.is_none() && file.offset() == 0
        };
        let Some(file) = self.files.get_mut(&fd).filter(fresh).filter(|_| is_current) else { return };
        file.attributes = Some((prefetch.attributes, sent_at));
        let content = prefetch.content.as_ref().filter(|content| content.bytes.len() as u64 <= MAX_PREFETCH);
        if let Some(content) = content.filter(|_| file.delegation.can_read && !file.delegation.can_write) {
            self.fill_count += 1;
            file.read_ahead = Some(ReadAhead {
                start: 0,
                bytes: content.bytes.clone(),
                is_eof: content.at_eof,
                end_reported: false,
                is_stable: true,
                since: sent_at,
                is_used: true,
                number: self.fill_count,
            });
            file.prefetch_unread = true;
            file.expected_read = (0, MAX_PREFETCH);
        }
    }

    /// The attributes of a file, if they are still valid.
    pub(crate) fn attributes(&self, fd: i32) -> Option<FileAttributes> {
        let file = self.files.get(&fd).filter(|file| !file.is_returning)?;
        file.attributes.filter(|(_, since)| since.elapsed() < CACHE_TERM).map(|(attributes, _)| attributes)
    }

    /// Whether the descriptor is of a file on one of home's own file systems, which the process
    /// opened while it was away
    /// ([`is_home_local`](tern_migrate::message::FileDelegation::is_home_local)).
    pub(crate) fn is_home_local(&self, fd: i32) -> bool {
        self.files.get(&fd).is_some_and(|file| file.delegation.is_home_local && !file.is_returning)
    }

    /// Closes a file here, unless others could see that it is still open at home. Returns whether
    /// it was closed.
    pub(crate) fn close(&mut self, fd: i32) -> bool {
        let Some(file) = self.files.get(&fd) else { return false };
        let id = file.delegation.id;
        let is_simple = file.delegation.is_home_local
            && !file.delegation.can_write
            && !file.is_returning
            && !file.is_published;
        // Closing any descriptor of a file releases all its POSIX locks.
        let is_locked = self.files.values().any(|other| other.delegation.id == id && other.may_hold_lock);
        if !is_simple || is_locked || file.local_file.is_some() {
            return false;
        }
        self.skip_prefetch |= file.prefetch_unread;
        self.files.remove(&fd);
        self.closing.add(fd);
        true
    }

    /// The latest time at which pending writes and closes must be sent home, if there are any.
    pub(crate) fn due(&self) -> Option<Instant> {
        let write = self.dirty_since.map(|since| since + WRITE_DELAY);
        write.into_iter().chain(self.closing.due()).min()
    }
}
