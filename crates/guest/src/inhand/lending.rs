//! What of files in hand is lent to the stub in the guest ([`crate::hot`]), and taken back.
//!
//! A lent file's offset, and what was written to it since, only the stub's table knows: it is not clean until it has been taken
//! back, so that it is neither put down nor forgotten.

use super::{Ahead, Files, MOST_BEHIND, TERM};
use std::time::Instant;

/// What may be lent of a file.
#[derive(Debug)]
pub(crate) enum Offer<'a> {
    /// What was read ahead, if anything can be lent: where in the file, which, and until when it is good.
    Reads { offset: u64, ahead: Option<Lent<'a>> },
    /// So much room for what is written from its offset on.
    Writes { offset: u64, room: u64 },
}

/// What was read ahead of a file.
#[derive(Debug)]
pub(crate) struct Lent<'a> {
    pub(crate) start: u64,
    pub(crate) bytes: &'a [u8],
    /// Another number for each that was read.
    pub(crate) number: u64,
    pub(crate) until: Instant,
}

impl Ahead {
    /// Not what is good for one read only.
    fn lent(&self) -> Option<Lent<'_>> {
        let until = self.since + TERM;
        let good = self.steady && until > Instant::now();
        good.then_some(Lent { start: self.start, bytes: &self.bytes, number: self.number, until })
    }
}

impl Files {
    /// What may be lent of a file, with so much lent for writing already; nothing if it is not in hand. From now on it counts as lent.
    pub(crate) fn lend(&mut self, fd: i32, taken: u64) -> Option<Offer<'_>> {
        let behind: usize =
            self.open.values().flat_map(|file| &file.behind).map(|(_, bytes)| bytes.len()).sum();
        // Calls on a file of this node's own are let through: there is nothing of it to be lent.
        let file = self.open.get_mut(&fd).filter(|file| !file.leaves && file.near.is_none())?;
        let offset = file.known.offset;
        file.lent = true;
        (file.about, file.unread) = (None, false);
        if file.known.writes {
            let room = (MOST_BEHIND as u64).saturating_sub(behind as u64).saturating_sub(taken);
            return Some(Offer::Writes { offset, room });
        }
        if let Some(ahead) = file.ahead.as_mut().filter(|ahead| ahead.steady) {
            ahead.used = true;
        }
        let ahead = file.ahead.as_ref().filter(|_| file.known.reads).and_then(Ahead::lent);
        Some(Offer::Reads { offset, ahead })
    }

    /// A lent file is read at this offset by now; or a read that did not move it has ended at this other place.
    pub(crate) fn take_back_read(&mut self, fd: i32, offset: u64, elsewhere: Option<u64>) {
        let Some(file) = self.open.get_mut(&fd) else { return };
        file.lent = false;
        if file.known.offset != offset {
            (file.known.offset, file.window.0) = (offset, offset);
        } else if let Some(end) = elsewhere {
            file.window.0 = end;
        }
    }

    /// A lent file has been written from its offset on, since then at the earliest.
    pub(crate) fn take_back_written(&mut self, fd: i32, bytes: Vec<u8>, since: Instant) {
        let Some(file) = self.open.get_mut(&fd) else { return };
        file.lent = false;
        if bytes.is_empty() {
            return;
        }
        let start = file.known.offset;
        file.known.offset += bytes.len() as u64;
        // A piece of its own: what was there before may be on its way.
        file.behind.push((start, bytes.into()));
        self.waits = Some(self.waits.map_or(since, |waits| waits.min(since)));
    }

    /// Whether files are being put down.
    pub(crate) fn are_put_down(&self) -> bool {
        self.putting_down
    }
}
