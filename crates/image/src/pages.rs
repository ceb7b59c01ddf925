//! Which pages have to be sent.
//!
//! ```text
//!  first look            all content of private regions             the process runs
//!  each further look     what was written since the last            the process runs
//!  last look             what was written since the last            the process stands still
//! ```
//! The first look at a region lasts (a gigabyte: 40 ms), so it is made part by part, and what was found is sent
//! meanwhile.
//!
//! Where writes cannot be tracked, each look sends a region's whole content again, after telling the other
//! side to forget what it has; so the first look is then made only once the process stands still.

use crate::layout::{Backing, Layout, Region};
use std::collections::HashMap;
use tern_tracee::dirty::Tracker;
use tern_tracee::pagemap::{Pagemap, Run};
use tern_tracee::{Memory, PAGE, Result};

/// What one look found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Pages to forget: their content is zero, or their file's, whatever was sent before.
    pub forget: Vec<Run>,
    /// Pages to send: what was written since the last look.
    pub send: Vec<Run>,
    /// Regions that are new to us: [`Finder::content`] finds what of them is to be sent, before the next look.
    pub fresh: Vec<Rest>,
}

/// What of a region is still to be looked at for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rest {
    start: u64,
    end: u64,
    /// To be sent even where it is all zero: what is below it at the other side is a file's content.
    pub whole: bool,
}

/// Finds the pages to send, look by look.
#[derive(Debug)]
pub struct Finder {
    pagemap: Pagemap,
    tracker: Option<Tracker>,
    /// What the other side may have something of, by start of region; with the end.
    sent: HashMap<u64, u64>,
    looks: u32,
    /// The other side is known to hold nothing yet.
    fresh: bool,
}

impl Finder {
    /// For one process; without a tracker every look finds everything. `fresh` says that the other side is a new
    /// process; a deputy, or a guest to which a sending was begun before, may hold what is no longer true.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn new(pid: i32, tracker: Option<Tracker>, fresh: bool) -> Result<Self> {
        Ok(Self { pagemap: Pagemap::open(pid)?, tracker, fresh, sent: HashMap::new(), looks: 0 })
    }

    /// Whether looks after the first are cheap.
    #[must_use]
    pub fn tracks(&self) -> bool {
        self.tracker.is_some()
    }

    /// Looks at the whole address space.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn look(&mut self, layout: &Layout) -> Result<Look> {
        let mut look = Look::default();
        for region in layout.regions.iter().filter(|r| r.is_private()) {
            self.look_at(region, &mut look)?;
        }
        self.looks += 1;
        Ok(look)
    }

    /// How often it has looked.
    #[must_use]
    pub fn looks(&self) -> u32 {
        self.looks
    }

    fn look_at(&mut self, region: &Region, look: &mut Look) -> Result<()> {
        let (start, end) = (region.start, region.end);
        let seen = self.sent.get(&start) == Some(&end);
        if seen && let Some(written) = self.pagemap.written(start, end)? {
            look.forget.extend(written.dropped);
            look.send.extend(written.content);
            return Ok(());
        }
        // New to us, or mapped anew at the same place.
        if self.looks > 0 || !self.fresh {
            look.forget.push((start, end - start));
        }
        if let Some(tracker) = &self.tracker {
            let _untracked_it_is_found_anew_each_time = tracker.cover(start, end);
        }
        look.fresh.push(Rest { start, end, whole: region.backing != Backing::Anonymous });
        self.sent.insert(start, end);
        Ok(())
    }

    /// The content of a part of a fresh region, which is tracked from here, and what is left of the region.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn content(&self, rest: Rest) -> Result<(Vec<Run>, Option<Rest>)> {
        let (start, end) = (rest.start, rest.end);
        let armed = if self.tracks() { self.pagemap.content_arming(start, end)? } else { None };
        let (content, end) = match armed {
            Some(found) => found,
            None => self.pagemap.content(start, end)?,
        };
        Ok((content, (end < rest.end).then_some(Rest { start: end, ..rest })))
    }
}

/// Cuts runs into pieces of at most `most` bytes, so that they can be sent one by one.
#[must_use]
pub fn cut(runs: &[Run], most: u64) -> Vec<Vec<Run>> {
    let mut pieces = Vec::new();
    let mut piece: Vec<Run> = Vec::new();
    let mut room = most;
    for &(mut start, mut len) in runs {
        while len > 0 {
            let now = len.min(room);
            piece.push((start, now));
            (start, len, room) = (start + now, len - now, room - now);
            if room == 0 {
                pieces.push(std::mem::take(&mut piece));
                room = most;
            }
        }
    }
    if !piece.is_empty() {
        pieces.push(piece);
    }
    pieces
}

/// Drops from a piece that was read the pages that are all zero; only right for a page's first sending, over
/// memory that is zero until then.
pub fn drop_zero(runs: &mut Vec<Run>, bytes: &mut Vec<u8>) {
    const ZERO: [u8; PAGE as usize] = [0; PAGE as usize];
    if !bytes.chunks_exact(PAGE as usize).any(|page| page == ZERO) {
        return;
    }
    let mut kept: Vec<Run> = Vec::new();
    let mut content = Vec::with_capacity(bytes.len());
    let pages = runs.iter().flat_map(|&(start, len)| (start..start + len).step_by(PAGE as usize));
    for (addr, page) in pages.zip(bytes.chunks_exact(PAGE as usize)) {
        if page == ZERO {
            continue;
        }
        content.extend_from_slice(page);
        match kept.last_mut() {
            Some(last) if last.0 + last.1 == addr => last.1 += PAGE,
            _ => kept.push((addr, PAGE)),
        }
    }
    (*runs, *bytes) = (kept, content);
}

/// Reads a piece's bytes, in place of what is in `bytes`: one buffer serves for all pieces.
///
/// # Errors
/// If a page is gone: the process has unmapped it since, and the next look will show that.
pub fn read(memory: &Memory, piece: &[Run], bytes: &mut Vec<u8>) -> Result<()> {
    let total: u64 = piece.iter().map(|r| r.1).sum();
    bytes.resize(total as usize, 0);
    memory.read_runs(piece, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_cut() {
        let pieces = cut(&[(0x1000, 0x3000), (0x9000, 0x1000)], 0x2000);
        assert_eq!(pieces, [vec![(0x1000, 0x2000)], vec![(0x3000, 0x1000), (0x9000, 0x1000)]]);
        assert!(cut(&[], 4096).is_empty());
    }

    #[test]
    fn zero_pages_are_dropped() {
        let mut runs = vec![(0x1000, 0x3000), (0x9000, 0x1000)];
        let mut bytes = vec![1; 0x4000];
        bytes[0x1000..0x2000].fill(0);
        drop_zero(&mut runs, &mut bytes);
        assert_eq!(runs, [(0x1000, 0x1000), (0x3000, 0x1000), (0x9000, 0x1000)]);
        assert_eq!(bytes, vec![1; 0x3000]);
    }
}
