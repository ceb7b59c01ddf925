//! What is lent of one file.

use super::{ROOM, SOON, stub};
use crate::inhand::lending::Lent;
use std::time::Instant;
use tern_tracee::{Memory, Result};

/// What is lent of one file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub(super) fd: i32,
    /// What the stub may do with it; 0 if nothing.
    pub(super) kind: u8,
    /// Whether it is written.
    pub(super) writes: bool,
    /// The stub may have moved it on.
    pub(super) out: bool,
    pub(super) offset: u64,
    pub(super) start: u64,
    pub(super) end: u64,
    /// Which of the things read ahead is in its room.
    pub(super) filled: u64,
    /// It is read in pieces of which few would fit: those are copied once, by the shim.
    pub(super) bulk: bool,
    pub(super) since: Instant,
    pub(super) until: Instant,
}

impl Default for Slot {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            fd: -1,
            kind: 0,
            writes: false,
            out: false,
            offset: 0,
            start: 0,
            end: 0,
            filled: 0,
            bulk: false,
            since: now,
            until: now,
        }
    }
}

impl Slot {
    pub(super) fn lend_read(
        &mut self,
        offset: u64,
        ahead: Option<Lent<'_>>,
        memory: &Memory,
        place: u64,
    ) -> Result<()> {
        let now = Instant::now();
        let Some(ahead) = ahead else {
            *self = Self {
                fd: self.fd,
                bulk: self.bulk,
                kind: stub::READ,
                out: true,
                offset,
                until: now + SOON,
                ..Self::default()
            };
            return Ok(());
        };
        let end = ahead.start + ahead.bytes.len() as u64;
        let there = !self.writes && self.filled == ahead.number && (self.start..self.end).contains(&offset);
        if !there {
            // What fits, from here on; all of it if that fits.
            let start = offset.min(end.saturating_sub(ROOM)).max(ahead.start);
            let from = (start - ahead.start) as usize;
            let bytes = ahead.bytes.get(from..).unwrap_or_default();
            let bytes = &bytes[..bytes.len().min(ROOM as usize)];
            memory.write(place, bytes)?;
            (self.start, self.end, self.filled) = (start, start + bytes.len() as u64, ahead.number);
        }
        (self.kind, self.writes, self.out) = (stub::READ, false, true);
        (self.offset, self.until) = (offset, ahead.until);
        Ok(())
    }

    pub(super) fn lend_room(&mut self, offset: u64, room: u64) {
        let since = Instant::now();
        (self.kind, self.writes, self.out) = (stub::WRITTEN, true, true);
        (self.offset, self.start, self.end) = (offset, offset, offset + room);
        (self.since, self.until) = (since, since + SOON);
    }
}
