//! The slots of the fast path's table.

use super::code;
use crate::files::cache::publish::PublishedReadAhead;
use crate::files::limits::FASTPATH_BUFFER_LEN;
use std::time::{Duration, Instant};
use tern_tracee::{Memory, Result};

/// How long written data may stay in a buffer. Nothing else stays published for longer either.
pub(super) const PUBLICATION_TERM: Duration = Duration::from_secs(1);

/// The published part of one file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub(super) fd: i32,
    /// The permitted use ([`code::READ`] or [`code::WRITE`]), or 0 if it is not published.
    pub(super) kind: u8,
    /// Whether it was published for writing.
    pub(super) writes: bool,
    /// The fast path may have changed its offset.
    pub(super) in_use: bool,
    pub(super) offset: u64,
    pub(super) start: u64,
    pub(super) end: u64,
    /// The sequence number of the read-ahead in its buffer.
    pub(super) read_ahead_number: u64,
    /// Its last transfer was large. Its read-ahead is then not published, to save the additional
    /// copy.
    pub(super) is_bulk: bool,
    /// When it was published for writing: its pending writes are not older.
    pub(super) since: Instant,
    /// When the publication ends.
    pub(super) until: Instant,
}

impl Default for Slot {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            fd: -1,
            kind: 0,
            writes: false,
            in_use: false,
            offset: 0,
            start: 0,
            end: 0,
            read_ahead_number: 0,
            is_bulk: false,
            since: now,
            until: now,
        }
    }
}

impl Slot {
    pub(super) fn publish_read(
        &mut self,
        offset: u64,
        read_ahead: Option<PublishedReadAhead<'_>>,
        memory: &Memory,
        buffer_addr: u64,
    ) -> Result<()> {
        let now = Instant::now();
        let Some(read_ahead) = read_ahead else {
            *self = Self {
                fd: self.fd,
                is_bulk: self.is_bulk,
                kind: code::READ,
                in_use: true,
                offset,
                until: now + PUBLICATION_TERM,
                ..Self::default()
            };
            return Ok(());
        };
        let end = read_ahead.start + read_ahead.bytes.len() as u64;
        let is_current = !self.writes
            && self.read_ahead_number == read_ahead.number
            && (self.start..self.end).contains(&offset);
        if !is_current {
            // Copies all of the read-ahead if it fits into the buffer. Otherwise copies the part
            // from the offset on, or the last part that fills the buffer.
            let start = offset.min(end.saturating_sub(FASTPATH_BUFFER_LEN)).max(read_ahead.start);
            let from = (start - read_ahead.start) as usize;
            let bytes = read_ahead.bytes.get(from..).unwrap_or_default();
            let bytes = &bytes[..bytes.len().min(FASTPATH_BUFFER_LEN as usize)];
            memory.write(buffer_addr, bytes)?;
            (self.start, self.end, self.read_ahead_number) =
                (start, start + bytes.len() as u64, read_ahead.number);
        }
        (self.kind, self.writes, self.in_use) = (code::READ, false, true);
        (self.offset, self.until) = (offset, read_ahead.until);
        Ok(())
    }

    pub(super) fn publish_write(&mut self, offset: u64, len: u64) {
        let since = Instant::now();
        (self.kind, self.writes, self.in_use) = (code::WRITE, true, true);
        (self.offset, self.start, self.end) = (offset, offset, offset + len);
        (self.since, self.until) = (since, since + PUBLICATION_TERM);
    }
}
