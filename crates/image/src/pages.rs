//! Finds the pages that must be sent.
//!
//! ```text
//!  first scan            all content of private regions             the process runs
//!  each further scan     pages written since the scan before        the process runs
//!  last scan             pages written since the scan before        the process is stopped
//! ```
//! The first scan of a region takes long (40 ms for a gigabyte), so it is made in parts, and the
//! pages found are sent meanwhile.
//!
//! Pages that were scanned stay known as long as their mapping is tracked. A new mapping is not
//! tracked yet. So if a heap or a stack has grown, only its new part needs a first scan.
//!
//! A running process may replace a mapping between its description and the scan. The scan then
//! finds pages of the new mapping, and tracks them; but the receiver writes them into the old
//! mapping, and loses them when it receives the changed layout. Therefore the record of sent pages
//! includes the kind of mapping, and does not apply to a mapping of another kind.
//!
//! Where writes cannot be tracked, each scan sends the whole content of a region again, after the
//! receiver has discarded its own. The first scan is then made only when the process is stopped.

use crate::layout::{Backing, FileRef, Layout, Region};
use std::collections::BTreeMap;
use tern_ids::ContentHash;
use tern_tracee::pagemap::{Pagemap, Run, push_run};
use tern_tracee::write_tracker::WriteTracker;
use tern_tracee::{Memory, PAGE, Result};

/// In regions larger than this, in bytes, only the touched parts are scanned.
const SPARSE_BYTES: u64 = 16 << 20;

/// No mapping is below this address (`vm.mmap_min_addr`).
const FIRST_ADDRESS: u64 = 16 * PAGE;

/// The result of a scan.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// Pages that the receiver must discard: they are zero, or have their file's content, whatever
    /// was sent before.
    pub discard: Vec<Run>,
    /// Pages written since the last scan, which must be sent.
    pub send: Vec<Run>,
    /// Parts that are new: [`PageFinder::scan_part`] must scan them before the next scan.
    pub new_parts: Vec<NewPart>,
}

/// A part of a region that has not been scanned yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewPart {
    start: u64,
    end: u64,
    /// Send zero pages too: the receiver has a file's content below them.
    pub send_zeroes: bool,
}

/// The properties of a mapping that cannot be changed in place: if one differs, the receiver makes
/// a new mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MappingKind {
    grows_down: bool,
    /// The file, and the offset that address 0 would have; `None` for anonymous memory.
    file: Option<(u64, u64, ContentHash, u64)>,
}

impl MappingKind {
    fn of(region: &Region, files: &[FileRef]) -> Self {
        let file = |(file, origin): (u32, u64)| {
            let file = files.get(file as usize)?;
            Some((file.device, file.inode, file.hash, origin))
        };
        Self { grows_down: region.grows_down, file: region.origin().and_then(file) }
    }
}

/// A range of addresses where the receiver may have pages.
#[derive(Debug, Clone, Copy)]
struct KnownRange {
    end: u64,
    /// The kind of mapping, as described to the receiver.
    kind: MappingKind,
    /// Content was found in it at least once. The kernel does not merge two mappings that have both
    /// held pages.
    had_content: bool,
    /// This range and the one before it are in a single mapping at the receiver.
    joined: bool,
}

/// Finds the pages to send, scan by scan.
#[derive(Debug)]
pub struct PageFinder {
    pagemap: Pagemap,
    tracker: Option<WriteTracker>,
    /// Ranges where the receiver may have pages, by first address, without overlaps.
    sent: BTreeMap<u64, KnownRange>,
    scan_count: u32,
    /// The receiver is a new process and has no pages yet.
    receiver_is_new: bool,
}

impl PageFinder {
    /// A finder for one process. Without a tracker every scan finds everything. `receiver_is_new`
    /// says that the receiver is a new process. Otherwise the receiver is a deputy, which may have
    /// stale pages.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn new(pid: i32, tracker: Option<WriteTracker>, receiver_is_new: bool) -> Result<Self> {
        Ok(Self {
            pagemap: Pagemap::open(pid)?,
            tracker,
            receiver_is_new,
            sent: BTreeMap::new(),
            scan_count: 0,
        })
    }

    /// Whether writes are tracked, so that scans after the first are cheap.
    #[must_use]
    pub fn can_track(&self) -> bool {
        self.tracker.is_some()
    }

    /// Marks the regions that the receiver must map anew: before the first scan, all regions;
    /// later, those that consist of several pieces at the receiver, if more than one of the pieces
    /// has had content.
    pub fn mark_remapped(&self, layout: &mut Layout) {
        let Layout { regions, files } = layout;
        for region in regions.iter_mut().filter(|r| r.is_private()) {
            let mut pieces = 0;
            let mut counted = false;
            for (_, _, known) in self.known(region, MappingKind::of(region, files)) {
                counted &= known.joined;
                if known.had_content && !counted {
                    (pieces, counted) = (pieces + 1, true);
                }
            }
            region.remap = self.sent.is_empty() || pieces > 1;
        }
    }

    /// Scans the whole address space, as it was described to the receiver.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn scan(&mut self, layout: &Layout) -> Result<Scan> {
        let mut scan = Scan::default();
        let mut known = BTreeMap::new();
        let mut before: Option<(&Region, bool)> = None;
        let ends_below = std::iter::once(FIRST_ADDRESS).chain(layout.regions.iter().map(|r| r.end));
        for (region, end_below) in layout.regions.iter().zip(ends_below).filter(|(r, _)| r.is_private()) {
            let kind = MappingKind::of(region, &layout.files);
            let had = self.known(region, kind).any(|(_, _, known)| known.had_content)
                || !self.receiver_is_new && self.scan_count == 0;
            let was_joined = self.sent.get(&region.start).is_some_and(|known| known.joined);
            // Whether this region and the one before it are in a single mapping at the receiver:
            // they merge when they are mapped, or have merged before.
            let is_joined =
                before.is_some_and(|(b, b_had)| will_merge(b, region) && (was_joined || !had || !b_had));
            before = Some((region, had));
            for (start, end, had_content) in self.scan_region(region, end_below, kind, &mut scan)? {
                known.insert(
                    start,
                    KnownRange { end, kind, had_content, joined: is_joined || start > region.start },
                );
            }
        }
        self.sent = known;
        self.scan_count += 1;
        Ok(scan)
    }

    /// Number of scans so far.
    #[must_use]
    pub fn scan_count(&self) -> u32 {
        self.scan_count
    }

    /// The parts of a region that were scanned before.
    fn known(&self, region: &Region, kind: MappingKind) -> impl Iterator<Item = (u64, u64, &KnownRange)> {
        let (start, end) = (region.start, region.end);
        let first = self.sent.range(..=start).next_back().map_or(start, |(at, _)| *at);
        self.sent
            .range(first..end)
            .filter(move |(_, known)| known.end > start && known.kind == kind)
            .map(move |(at, known)| (start.max(*at), end.min(known.end), known))
    }

    /// Scans one region. `end_below` is the end of the region below it. Returns its known parts, and
    /// whether each has held content.
    fn scan_region(
        &self,
        region: &Region,
        end_below: u64,
        kind: MappingKind,
        scan: &mut Scan,
    ) -> Result<Vec<(u64, u64, bool)>> {
        let mut parts = Vec::new();
        let mut at = region.start;
        if !region.remap {
            for (start, end, known) in self.known(region, kind) {
                // A new mapping at the same address is not tracked.
                let Some(written) = self.pagemap.written(start, end)? else { continue };
                self.begin(region, end_below, (at, start), scan, &mut parts)?;
                parts.push((start, end, known.had_content || !written.content.is_empty()));
                written.dropped.into_iter().for_each(|run| push_run(&mut scan.discard, run));
                written.content.into_iter().for_each(|run| push_run(&mut scan.send, run));
                at = end;
            }
        }
        self.begin(region, end_below, (at, region.end), scan, &mut parts)?;
        Ok(parts)
    }

    /// Starts to track a part of a region that is new, or that is mapped anew, and adds it to the
    /// new parts. If the part is large, only the ranges in it that were touched are added: scanning
    /// a new part write-protects it, which needs page tables for all of it, and for terabytes of
    /// reserved addresses these would exceed the memory.
    ///
    /// A stack may have grown since it was described. Tracking a part of a mapping would split it,
    /// and the lower piece could then grow by the whole stack limit again. So everything down to
    /// the next region is tracked.
    fn begin(
        &self,
        region: &Region,
        end_below: u64,
        (start, end): (u64, u64),
        scan: &mut Scan,
        parts: &mut Vec<(u64, u64, bool)>,
    ) -> Result<()> {
        if start >= end {
            return Ok(());
        }
        if self.scan_count > 0 || !self.receiver_is_new {
            push_run(&mut scan.discard, (start, end - start));
        }
        let populated = if end - start > SPARSE_BYTES {
            self.pagemap.populated(start, end)?
        } else {
            vec![(start, end - start)]
        };
        if let (Some(tracker), false) = (&self.tracker, populated.is_empty()) {
            let grows_from_here = region.grows_down && start == region.start;
            let from = if grows_from_here { end_below.min(start) } else { start };
            // If a part is not tracked, all its pages are found anew each time.
            let _tracked = tracker.track(from, end).or_else(|_| tracker.track(start, end));
        }
        for (start, len) in populated {
            let end = start + len;
            scan.new_parts.push(NewPart { start, end, send_zeroes: region.backing != Backing::Anonymous });
            parts.push((start, end, false));
        }
        Ok(())
    }

    /// Scans the next piece of a new part, and tracks it from now on. Returns its content and the
    /// rest.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn scan_part(&mut self, rest: NewPart) -> Result<(Vec<Run>, Option<NewPart>)> {
        let (start, end) = (rest.start, rest.end);
        let armed = if self.can_track() { self.pagemap.content_and_protect(start, end)? } else { None };
        let (content, end) = match armed {
            Some(found) => found,
            None => self.pagemap.content(start, end)?,
        };
        if !content.is_empty()
            && let Some((_, known)) = self.sent.range_mut(..=start).next_back()
        {
            known.had_content = true;
        }
        Ok((content, (end < rest.end).then_some(NewPart { start: end, ..rest })))
    }
}

/// Whether the kernel merges two adjacent regions, as long as one of them has never had content.
fn will_merge(before: &Region, region: &Region) -> bool {
    let kind = |r: &Region| (r.prot, r.no_reserve, r.grows_down, r.advice, r.backing);
    before.end == region.start && kind(before) == kind(region) && region.backing == Backing::Anonymous
}

/// Cuts runs into pieces of at most `max` bytes, which are sent one by one.
#[must_use]
pub fn cut(runs: &[Run], max: u64) -> Vec<Vec<Run>> {
    let mut pieces = Vec::new();
    let mut piece: Vec<Run> = Vec::new();
    let mut room = max;
    for &(mut start, mut len) in runs {
        while len > 0 {
            let now = len.min(room);
            piece.push((start, now));
            (start, len, room) = (start + now, len - now, room - now);
            if room == 0 {
                pieces.push(std::mem::take(&mut piece));
                room = max;
            }
        }
    }
    if !piece.is_empty() {
        pieces.push(piece);
    }
    pieces
}

/// Removes the pages of a piece that are all zero. Correct only when a page is sent for the first
/// time, and the receiver's memory is zero.
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

/// Reads the content of a piece into `bytes`, replacing its old content.
///
/// # Errors
/// If a page is gone: the process unmapped it meanwhile, and the next scan reports that.
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
