//! Publishing delegated files to the fast path in the guest ([`crate::fastpath`]), and reclaiming
//! them.
//!
//! The offset of a published file, and the data written to it since, are in the fast path's table
//! and buffers only. Such a file does not count as clean until it is reclaimed, so it is neither
//! returned nor dropped.

use super::{FileCache, MAX_PENDING_BYTES, ReadAhead};
use crate::files::limits::CACHE_TERM;
use std::time::Instant;

/// The part of a file that can be published.
#[derive(Debug)]
pub(crate) enum Publishable<'a> {
    /// A readable file: its offset, and its read-ahead if that can be published.
    Reads { offset: u64, read_ahead: Option<PublishedReadAhead<'a>> },
    /// A writable file: its offset, and how many bytes may be written from there.
    Writes { offset: u64, len: u64 },
}

/// Read-ahead that can be published.
#[derive(Debug)]
pub(crate) struct PublishedReadAhead<'a> {
    pub(crate) start: u64,
    pub(crate) bytes: &'a [u8],
    /// The sequence number of the read-ahead.
    pub(crate) number: u64,
    pub(crate) until: Instant,
}

impl ReadAhead {
    /// None if the data has expired, or may serve one read only.
    fn published(&self) -> Option<PublishedReadAhead<'_>> {
        let until = self.since + CACHE_TERM;
        let is_valid = self.is_stable && until > Instant::now();
        is_valid.then_some(PublishedReadAhead {
            start: self.start,
            bytes: &self.bytes,
            number: self.number,
            until,
        })
    }
}

impl FileCache {
    /// Returns the part of a file that can be published, and counts the file as published; none if
    /// the file is not delegated. `published_len` bytes of other files are already published for
    /// writing.
    pub(crate) fn publish(&mut self, fd: i32, published_len: u64) -> Option<Publishable<'_>> {
        let pending_writes: usize =
            self.files.values().flat_map(|file| &file.pending_writes).map(|(_, bytes)| bytes.len()).sum();
        // Calls on local files are let through; there is nothing to publish.
        let file = self.files.get_mut(&fd).filter(|file| !file.is_returning && file.local_file.is_none())?;
        let offset = file.delegation.offset;
        file.is_published = true;
        (file.attributes, file.prefetch_unread) = (None, false);
        if file.delegation.can_write {
            let len = (MAX_PENDING_BYTES as u64)
                .saturating_sub(pending_writes as u64)
                .saturating_sub(published_len);
            return Some(Publishable::Writes { offset, len });
        }
        if let Some(read_ahead) = file.read_ahead.as_mut().filter(|read_ahead| read_ahead.is_stable) {
            read_ahead.is_used = true;
        }
        let read_ahead =
            file.read_ahead.as_ref().filter(|_| file.delegation.can_read).and_then(ReadAhead::published);
        Some(Publishable::Reads { offset, read_ahead })
    }

    /// Reclaims a file that was read up to this offset. `pread_end` is where the last read ended
    /// that did not move the offset.
    pub(crate) fn reclaim_read(&mut self, fd: i32, offset: u64, pread_end: Option<u64>) {
        let Some(file) = self.files.get_mut(&fd) else { return };
        file.is_published = false;
        if file.delegation.offset != offset {
            (file.delegation.offset, file.expected_read.0) = (offset, offset);
        } else if let Some(end) = pread_end {
            file.expected_read.0 = end;
        }
    }

    /// Reclaims a file to which `bytes` were written from its offset on, at `since` or later.
    pub(crate) fn reclaim_written(&mut self, fd: i32, bytes: Vec<u8>, since: Instant) {
        let Some(file) = self.files.get_mut(&fd) else { return };
        file.is_published = false;
        if bytes.is_empty() {
            return;
        }
        let start = file.delegation.offset;
        file.delegation.offset += bytes.len() as u64;
        // Kept as a separate piece: earlier writes may have been sent.
        file.pending_writes.push((start, bytes.into()));
        self.dirty_since = Some(self.dirty_since.map_or(since, |earlier| earlier.min(since)));
    }

    /// Whether all delegations are being returned.
    pub(crate) fn is_returning_delegations(&self) -> bool {
        self.is_returning_all
    }
}
