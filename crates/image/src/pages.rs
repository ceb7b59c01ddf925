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
//! What is known of a place stays known as long as it is tracked, and what is mapped anew there is not: so a heap or a stack
//! that has grown is looked at for the first time only where it is new.
//!
//! A process that runs can map something else at a place between the moment when it is described and that when it is looked
//! at. Then what is found is of the new mapping, and is tracked, but the other side puts it into the old one, and loses it
//! when it hears of the new one. So what is known of a place is known of a kind of mapping: of another one, nothing is.
//!
//! Where writes cannot be tracked, each look sends a region's whole content again, after telling the other
//! side to forget what it has; so the first look is then made only once the process stands still.

use crate::layout::{Backing, FileRef, Layout, Region};
use std::collections::BTreeMap;
use tern_ids::ContentHash;
use tern_tracee::dirty::Tracker;
use tern_tracee::pagemap::{Pagemap, Run};
use tern_tracee::{Memory, PAGE, Result};

/// Of more than this the parts are looked for that were touched.
const SPARSE: u64 = 16 << 20;

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

/// What the other side maps anew if it changes, and does not only protect in another way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    grows_down: bool,
    /// The file, and the offset at which it would be mapped at address 0; nothing for anonymous memory.
    file: Option<(u64, u64, ContentHash, u64)>,
}

impl Kind {
    fn of(region: &Region, files: &[FileRef]) -> Self {
        let file = |(file, origin): (u32, u64)| {
            let file = files.get(file as usize)?;
            Some((file.device, file.inode, file.hash, origin))
        };
        Self { grows_down: region.grows_down, file: region.origin().and_then(file) }
    }
}

/// A place of which the other side may have something.
#[derive(Debug, Clone, Copy)]
struct Known {
    end: u64,
    /// What was mapped there, as the other side was told.
    kind: Kind,
    /// Content of it was found once. The kernel does not join two pieces of which that is true.
    held: bool,
    /// The other side has it in one piece with what is before it.
    joined: bool,
}

/// Finds the pages to send, look by look.
#[derive(Debug)]
pub struct Finder {
    pagemap: Pagemap,
    tracker: Option<Tracker>,
    /// What the other side may have something of, by first address; without overlaps.
    sent: BTreeMap<u64, Known>,
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
        Ok(Self { pagemap: Pagemap::open(pid)?, tracker, fresh, sent: BTreeMap::new(), looks: 0 })
    }

    /// Whether looks after the first are cheap.
    #[must_use]
    pub fn tracks(&self) -> bool {
        self.tracker.is_some()
    }

    /// Says of an address space what of it the other side is to map anew: of what should be one piece and is not there,
    /// only one may have content.
    pub fn mark(&self, layout: &mut Layout) {
        let Layout { regions, files } = layout;
        for region in regions.iter_mut().filter(|r| r.is_private()) {
            let mut pieces = 0;
            let mut counted = false;
            for (_, _, known) in self.known(region, Kind::of(region, files)) {
                counted &= known.joined;
                if known.held && !counted {
                    (pieces, counted) = (pieces + 1, true);
                }
            }
            region.anew = self.sent.is_empty() || pieces > 1;
        }
    }

    /// Looks at the whole address space, as it was described to the other side.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn look(&mut self, layout: &Layout) -> Result<Look> {
        let mut look = Look::default();
        let mut known = BTreeMap::new();
        let mut before: Option<(&Region, bool)> = None;
        for region in layout.regions.iter().filter(|r| r.is_private()) {
            let kind = Kind::of(region, &layout.files);
            // Two that become one as they are mapped; or have been.
            let had =
                self.known(region, kind).any(|(_, _, known)| known.held) || !self.fresh && self.looks == 0;
            let is_one = self.sent.get(&region.start).is_some_and(|known| known.joined);
            let one = before.is_some_and(|(b, b_had)| merges(b, region) && (is_one || !had || !b_had));
            before = Some((region, had));
            for (start, end, held) in self.look_at(region, kind, &mut look)? {
                known.insert(start, Known { end, kind, held, joined: one || start > region.start });
            }
        }
        self.sent = known;
        self.looks += 1;
        Ok(look)
    }

    /// How often it has looked.
    #[must_use]
    pub fn looks(&self) -> u32 {
        self.looks
    }

    /// The parts of a region that are known, with what is known.
    fn known(&self, region: &Region, kind: Kind) -> impl Iterator<Item = (u64, u64, &Known)> {
        let (start, end) = (region.start, region.end);
        let first = self.sent.range(..=start).next_back().map_or(start, |(at, _)| *at);
        self.sent
            .range(first..end)
            .filter(move |(_, known)| known.end > start && known.kind == kind)
            .map(move |(at, known)| (start.max(*at), end.min(known.end), known))
    }

    /// Looks at one region; gives the parts of it that are known then, and whether there was content.
    fn look_at(&self, region: &Region, kind: Kind, look: &mut Look) -> Result<Vec<(u64, u64, bool)>> {
        let mut parts = Vec::new();
        let mut at = region.start;
        if !region.anew {
            for (start, end, known) in self.known(region, kind) {
                // Mapped anew at the same place: then it is not tracked any more.
                let Some(written) = self.pagemap.written(start, end)? else { continue };
                self.begin(region, (at, start), look, &mut parts)?;
                parts.push((start, end, known.held || !written.content.is_empty()));
                look.forget.extend(written.dropped);
                look.send.extend(written.content);
                at = end;
            }
        }
        self.begin(region, (at, region.end), look, &mut parts)?;
        Ok(parts)
    }

    /// A part of a region is new to us, or mapped anew. Where much of it was never touched that is left out: to track it
    /// would take page tables for all of it, which for what is reserved by the terabyte are more than there is memory.
    fn begin(
        &self,
        region: &Region,
        (start, end): (u64, u64),
        look: &mut Look,
        parts: &mut Vec<(u64, u64, bool)>,
    ) -> Result<()> {
        if start >= end {
            return Ok(());
        }
        if self.looks > 0 || !self.fresh {
            look.forget.push((start, end - start));
        }
        let touched =
            if end - start > SPARSE { self.pagemap.touched(start, end)? } else { vec![(start, end - start)] };
        if let (Some(tracker), false) = (&self.tracker, touched.is_empty()) {
            let _untracked_it_is_found_anew_each_time = tracker.cover(start, end);
        }
        for (start, len) in touched {
            let end = start + len;
            look.fresh.push(Rest { start, end, whole: region.backing != Backing::Anonymous });
            parts.push((start, end, false));
        }
        Ok(())
    }

    /// The content of a part of a fresh region, which is tracked from here, and what is left of the region.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn content(&mut self, rest: Rest) -> Result<(Vec<Run>, Option<Rest>)> {
        let (start, end) = (rest.start, rest.end);
        let armed = if self.tracks() { self.pagemap.content_arming(start, end)? } else { None };
        let (content, end) = match armed {
            Some(found) => found,
            None => self.pagemap.content(start, end)?,
        };
        if !content.is_empty()
            && let Some((_, known)) = self.sent.range_mut(..=start).next_back()
        {
            known.held = true;
        }
        Ok((content, (end < rest.end).then_some(Rest { start: end, ..rest })))
    }
}

/// Whether the kernel makes one piece of these two, as long as one of them has never had content.
fn merges(before: &Region, region: &Region) -> bool {
    let kind = |r: &Region| (r.prot, r.no_reserve, r.grows_down, r.advice, r.backing);
    before.end == region.start && kind(before) == kind(region) && region.backing == Backing::Anonymous
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
