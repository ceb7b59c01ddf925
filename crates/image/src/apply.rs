//! Turns one address space into another by mapping only what differs.
//!
//! Used to turn an empty guest into the process, between rounds of pre-copy, and to give the
//! skeleton at home the shape that the process took on while it was away. The plan is a pure
//! function; injected calls carry it out.

use crate::advice::MemoryAdvice;
use crate::layout::{Backing, Layout, Region};
use crate::reserve::Reserve;
use std::borrow::Borrow;
use tern_tracee::batch::InjectedCall;
use tern_tracee::inject::Injection;
use tern_tracee::procfs::Mapping;
use tern_tracee::{Error, PAGE, Result};

/// One change to an address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapStep {
    /// Remove `[start, end)`.
    Unmap {
        /// First address.
        start: u64,
        /// The first address after it.
        end: u64,
    },
    /// Map this region, or the part of it that is missing.
    Map(Region),
    /// Change the protection of existing memory.
    Protect {
        /// First address.
        start: u64,
        /// The first address after it.
        end: u64,
        /// New protection.
        prot: u32,
    },
    /// Set advice for existing memory.
    Advise {
        /// First address.
        start: u64,
        /// The first address after it.
        end: u64,
        /// MADV_…
        advice: i32,
    },
}

/// The smallest piece in which a large mapping is made, in bytes, and the largest number of pieces.
const MIN_PIECE: u64 = 256 << 20;
const MAX_PIECES: u64 = 64;

/// Executes steps in a process under injection.
pub trait InjectedSpace {
    /// The injection.
    fn injection(&mut self) -> &mut Injection;

    /// Makes a system call in the process; the process's filter, if it has one, allows it.
    ///
    /// # Errors
    /// If the process is gone, or the call fails.
    fn call(&mut self, operation: &'static str, nr: i64, args: [u64; 6]) -> Result<u64>;

    /// Makes these calls in order, with few stops of the process. Returns the results, errors as
    /// negative numbers. A call that fails does not keep the next ones from being made.
    ///
    /// # Errors
    /// If the process is gone.
    fn call_all(&mut self, calls: &[InjectedCall]) -> Result<Vec<i64>>;

    /// Maps parts of files at fixed addresses, in order. The backing of each region is `File`.
    ///
    /// # Errors
    /// If a file is not available, or cannot be mapped.
    fn map_files(&mut self, regions: &[Region]) -> Result<()>;
}

/// The steps that turn a space with the mappings `now` into one with the layout `then`.
///
/// `identify` returns the index in `then.files` of the file that a mapping of `now` maps. The
/// kernel's own mappings and Tern's range are left alone. Removals come first, so that new mappings
/// find their addresses free; only shared memory is unmapped last.
pub fn plan(
    now: &[Mapping],
    then: &Layout,
    reserve: Option<Reserve>,
    identify: &dyn Fn(&Mapping) -> Option<u32>,
) -> Vec<MapStep> {
    let present: Vec<Region> = Reserve::exclude(reserve, now)
        .iter()
        .filter(|m| !m.is_kernel_mapping())
        .map(|m| Region {
            start: m.start,
            end: m.end,
            prot: m.prot,
            shared: m.shared,
            grows_down: m.has(b"gd"),
            no_reserve: false,
            advice: MemoryAdvice::of(m),
            remap: false,
            backing: match (m.is_anonymous(), identify(m)) {
                (true, _) => Backing::Anonymous,
                (_, Some(file)) => Backing::File { file, offset: m.offset },
                // A file that `then` does not have: it matches nothing.
                (_, None) => Backing::File { file: u32::MAX, offset: m.offset },
            },
        })
        .collect();
    let wanted: Vec<&Region> = then.regions.iter().filter(|r| r.backing != Backing::Kernel).collect();
    // Adjacent pieces need not merge into one mapping: two pieces that have both held pages stay
    // separate, and mremap takes only one mapping (before 6.17). So memory that the program has in
    // one mapping is kept only if it is in one mapping here too. If it is not, there are two cases.
    // If the sender has set [`Region::remap`], all content will be sent, and the memory is mapped
    // anew. Otherwise the missing part is mapped beside the existing one and merges with it, since
    // only one of the two has held pages. The stack is always kept: it is one mapping that grows,
    // and has a name.
    let keeps_mapping = |p: &Region, w: &Region| {
        let may_be_extended = w.backing != Backing::Anonymous || w.grows_down || !w.remap;
        may_be_extended || (p.start <= w.start && w.end <= p.end)
    };
    let mut steps = Vec::new();
    // Shared memory that is mapped again elsewhere is unmapped last, except where something else is
    // mapped over it.
    let mut last = Vec::new();
    for p in &present {
        let kept = overlapping(&wanted, p.start, p.end)
            .filter(|w| is_compatible(p, w) && keeps_mapping(p, w))
            .map(|w| (w.start, w.end));
        let is_object = matches!(p.backing, Backing::File { file, .. }
            if then.files.get(file as usize).is_some_and(|file| file.is_object));
        let removed = if is_object { &mut last } else { &mut steps };
        removed.extend(subtract(p.start, p.end, kept).map(|(start, end)| MapStep::Unmap { start, end }));
    }
    for w in &wanted {
        let there: Vec<&Region> = overlapping(&present, w.start, w.end)
            .filter(|p| is_compatible(p, w) && keeps_mapping(p, w))
            .collect();
        for (start, end) in subtract(w.start, w.end, there.iter().map(|p| (p.start, p.end))) {
            steps.push(MapStep::Map(cut(w, start, end)));
            advise(&mut steps, (start, end), w.advice, MemoryAdvice::default());
        }
        for p in there.iter().filter(|p| p.prot != w.prot) {
            steps.push(MapStep::Protect { start: p.start.max(w.start), end: p.end.min(w.end), prot: w.prot });
        }
        for p in &there {
            advise(&mut steps, (p.start.max(w.start), p.end.min(w.end)), w.advice, p.advice);
        }
    }
    for step in last {
        let MapStep::Unmap { start, end } = step else { continue };
        let over = overlapping(&wanted, start, end).map(|w| (w.start, w.end));
        steps.extend(subtract(start, end, over).map(|(start, end)| MapStep::Unmap { start, end }));
    }
    steps
}

/// The regions that overlap `[start, end)`, among regions that are sorted and do not overlap each
/// other.
fn overlapping<R: Borrow<Region>>(sorted: &[R], start: u64, end: u64) -> impl Iterator<Item = &Region> {
    let first = sorted.partition_point(|region| region.borrow().end <= start);
    sorted[first..].iter().map(Borrow::borrow).take_while(move |region| region.start < end)
}

fn advise(steps: &mut Vec<MapStep>, (start, end): (u64, u64), then: MemoryAdvice, now: MemoryAdvice) {
    steps.extend(then.changes_from(now).map(|advice| MapStep::Advise { start, end, advice }));
}

fn is_compatible(a: &Region, b: &Region) -> bool {
    let backing = match (a.backing, b.backing) {
        (Backing::Anonymous, Backing::Anonymous) => true,
        (Backing::File { .. }, Backing::File { .. }) => a.origin() == b.origin(),
        _ => false,
    };
    backing && a.shared == b.shared && a.grows_down == b.grows_down
}

fn cut(region: &Region, start: u64, end: u64) -> Region {
    let backing = match region.backing {
        Backing::File { file, offset } => Backing::File { file, offset: offset + (start - region.start) },
        other => other,
    };
    Region { start, end, backing, ..*region }
}

/// The union of ranges, as ranges that are sorted and do not overlap.
#[must_use]
pub fn joined(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    ranges.dedup_by(|next, before| {
        let joins = next.0 <= before.1;
        if joins {
            before.1 = before.1.max(next.1);
        }
        joins
    });
    ranges
}

/// Whether `[start, end)` overlaps one of these ranges, which are [`joined`].
#[must_use]
pub fn overlaps(ranges: &[(u64, u64)], start: u64, end: u64) -> bool {
    let at = ranges.partition_point(|range| range.1 <= start);
    ranges.get(at).is_some_and(|range| range.0 < end)
}

/// `[start, end)` without the given ranges, which are sorted and do not overlap.
pub fn subtract(
    start: u64,
    end: u64,
    holes: impl Iterator<Item = (u64, u64)>,
) -> impl Iterator<Item = (u64, u64)> {
    let mut rest = Vec::new();
    let mut at = start;
    for (from, to) in holes.filter(|h| h.0 < end && start < h.1) {
        if at < from {
            rest.push((at, from));
        }
        at = at.max(to);
    }
    if at < end {
        rest.push((at, end));
    }
    rest.into_iter()
}

/// Carries out a plan. If a step fails, the address space is in an intermediate state: the caller
/// abandons the process, or makes a new plan.
///
/// The files are mapped after the first removals and before everything else, so that the file
/// mappings can be made in one batch, and the other steps in another. This reorders only steps for
/// different addresses.
///
/// # Errors
/// The error of the first step that fails.
pub fn execute_plan(steps: &[MapStep], space: &mut dyn InjectedSpace) -> Result<()> {
    let steps: Vec<MapStep> = steps.iter().flat_map(pieces).collect();
    let removals = steps.iter().take_while(|step| matches!(step, MapStep::Unmap { .. })).count();
    let (removals, rest) = steps.split_at(removals);
    execute_calls(removals, space)?;
    let files: Vec<Region> = rest.iter().filter_map(MapStep::mapped_file).copied().collect();
    if !files.is_empty() {
        space.map_files(&files)?;
    }
    execute_calls(rest, space)
}

/// Splits a mapping that is larger than [`MIN_PIECE`] and counts as memory that may be needed. The
/// kernel refuses such a mapping if it alone exceeds all memory, but the program may have made it in
/// pieces, which the kernel has joined, as it does here.
fn pieces(step: &MapStep) -> Vec<MapStep> {
    let MapStep::Map(region) = *step else { return vec![*step] };
    let counts = region.backing == Backing::Anonymous && region.prot & libc::PROT_WRITE as u32 != 0;
    if !counts || region.shared || region.no_reserve || region.grows_down || region.len() <= MIN_PIECE {
        return vec![*step];
    }
    let piece = (region.len() / MAX_PIECES).next_multiple_of(PAGE).max(MIN_PIECE);
    let starts = (region.start..region.end).step_by(piece as usize);
    starts.map(|start| MapStep::Map(cut(&region, start, region.end.min(start + piece)))).collect()
}

/// Carries out the steps that map no file.
fn execute_calls(steps: &[MapStep], space: &mut dyn InjectedSpace) -> Result<()> {
    let made: Vec<(&MapStep, InjectedCall)> =
        steps.iter().filter_map(|step| Some((step, step.call()?))).collect();
    let calls: Vec<InjectedCall> = made.iter().map(|(_, call)| *call).collect();
    if calls.is_empty() {
        return Ok(());
    }
    let results = space.call_all(&calls)?;
    let pid = space.injection().pid();
    made.iter().zip(results).try_for_each(|((step, _), result)| step.check(result, pid))
}

impl MapStep {
    /// The region that this step maps, if its backing is a file.
    fn mapped_file(&self) -> Option<&Region> {
        match self {
            Self::Map(region) if matches!(region.backing, Backing::File { .. }) => Some(region),
            _ => None,
        }
    }

    /// The system call that carries it out. `None` if it needs a file, or nothing is to be done.
    fn call(&self) -> Option<InjectedCall> {
        Some(match *self {
            Self::Unmap { start, end } => (libc::SYS_munmap, [start, end - start, 0, 0, 0, 0]),
            Self::Protect { start, end, prot } => {
                (libc::SYS_mprotect, [start, end - start, u64::from(prot), 0, 0, 0])
            }
            Self::Advise { start, end, advice } => {
                (libc::SYS_madvise, [start, end - start, advice as u64, 0, 0, 0])
            }
            Self::Map(region) if region.backing == Backing::Anonymous => {
                let flags = mmap_flags(&region) | libc::MAP_ANONYMOUS as u64;
                let args = [region.start, region.len(), u64::from(region.prot), flags, u64::MAX, 0];
                (libc::SYS_mmap, args)
            }
            Self::Map(_) => return None,
        })
    }

    /// Checks the result of its call.
    fn check(&self, result: i64, pid: i32) -> Result<()> {
        let operation = match self {
            Self::Unmap { .. } => "unmap",
            Self::Protect { .. } => "protect",
            // Advice about huge pages is only a hint, which the kernel may not support.
            Self::Advise { advice: libc::MADV_HUGEPAGE | libc::MADV_NOHUGEPAGE, .. } => return Ok(()),
            Self::Advise { .. } => "set memory advice",
            Self::Map(_) => "map memory",
        };
        if (-4095..0).contains(&result) {
            let source = std::io::Error::from_raw_os_error((-result) as i32);
            return Err(Error::Refused { operation, pid, source });
        }
        match self {
            Self::Map(region) if result.cast_unsigned() != region.start => {
                Err(Error::Inconsistent { what: format!("mapped at {result:#x}"), pid })
            }
            _ => Ok(()),
        }
    }
}

/// The mmap flags of a region, without MAP_ANONYMOUS.
#[must_use]
pub fn mmap_flags(r: &Region) -> u64 {
    let mut flags = libc::MAP_FIXED;
    flags |= if r.shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
    if r.grows_down {
        flags |= libc::MAP_GROWSDOWN;
    }
    if r.no_reserve {
        flags |= libc::MAP_NORESERVE;
    }
    flags as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::FileRef;
    use tern_ids::ContentHash;

    fn mapping(start: u64, end: u64, prot: u32, inode: u64, offset: u64) -> Mapping {
        let name = Vec::new();
        let device = u64::from(inode != 0);
        Mapping { start, end, prot, shared: false, offset, device, inode, name, flags: Vec::new() }
    }

    fn region(start: u64, end: u64, prot: u32, backing: Backing) -> Region {
        Region {
            start,
            end,
            prot,
            shared: false,
            grows_down: false,
            no_reserve: false,
            advice: MemoryAdvice::default(),
            backing,
            remap: true,
        }
    }

    fn file(inode: u64) -> FileRef {
        let hash = ContentHash([0; 32]);
        FileRef {
            device: 1,
            inode,
            path: Vec::new(),
            size: 0,
            hash,
            shareable: true,
            is_object: false,
            location: None,
        }
    }

    fn by_inode(m: &Mapping) -> Option<u32> {
        m.inode.checked_sub(1).map(|i| i as u32)
    }

    #[test]
    fn equal_spaces_need_no_steps() {
        let now = [mapping(0x1000, 0x3000, 3, 0, 0), mapping(0x5000, 0x6000, 5, 1, 0x1000)];
        let backing = Backing::File { file: 0, offset: 0x1000 };
        let regions = vec![region(0x1000, 0x3000, 3, Backing::Anonymous), region(0x5000, 0x6000, 5, backing)];
        let then = Layout { regions, files: vec![file(1)] };
        assert!(plan(&now, &then, None, &by_inode).is_empty());
    }

    #[test]
    fn plan_covers_differences_only() {
        // Anonymous memory was unmapped at its end and split by a protection; a file was remapped
        // at another offset.
        let now = [mapping(0x1000, 0x6000, 3, 0, 0), mapping(0x8000, 0x9000, 1, 1, 0)];
        let regions = vec![
            region(0x1000, 0x3000, 3, Backing::Anonymous),
            region(0x3000, 0x5000, 1, Backing::Anonymous),
            region(0x8000, 0x9000, 1, Backing::File { file: 0, offset: 0x1000 }),
        ];
        let then = Layout { regions, files: vec![file(1)] };
        let steps = plan(&now, &then, None, &by_inode);
        let expected = [
            MapStep::Unmap { start: 0x5000, end: 0x6000 },
            MapStep::Unmap { start: 0x8000, end: 0x9000 },
            MapStep::Protect { start: 0x3000, end: 0x5000, prot: 1 },
            MapStep::Map(region(0x8000, 0x9000, 1, Backing::File { file: 0, offset: 0x1000 })),
        ];
        assert_eq!(steps, expected);
    }

    #[test]
    fn single_mapping_is_not_assembled_from_pieces() {
        let one = vec![region(0x2000, 0x5000, 3, Backing::Anonymous)];
        let then = Layout { regions: one, files: Vec::new() };
        let remap = |now: &[Mapping]| {
            let mut steps: Vec<MapStep> =
                now.iter().map(|m| MapStep::Unmap { start: m.start, end: m.end }).collect();
            steps.push(MapStep::Map(then.regions[0]));
            steps
        };
        for now in [
            vec![mapping(0x2000, 0x3000, 3, 0, 0), mapping(0x3000, 0x5000, 3, 0, 0)],
            vec![mapping(0x2000, 0x4000, 1, 0, 0)],
            vec![mapping(0x1000, 0x3000, 3, 0, 0), mapping(0x4000, 0x6000, 3, 0, 0)],
        ] {
            assert_eq!(plan(&now, &then, None, &by_inode), remap(&now));
        }
        // A heap that has grown: only its new part is mapped.
        let grown = Region { remap: false, ..then.regions[0] };
        let heap = Layout { regions: vec![grown], files: Vec::new() };
        let missing = Region { start: 0x3000, ..grown };
        assert_eq!(
            plan(&[mapping(0x2000, 0x3000, 3, 0, 0)], &heap, None, &by_inode),
            [MapStep::Map(missing)]
        );
        // A stack that has grown: its name and the arguments above it stay.
        let stack = Mapping { flags: vec![*b"gd"], ..mapping(0x4000, 0x5000, 3, 0, 0) };
        let grown = Region { grows_down: true, ..then.regions[0] };
        let then = Layout { regions: vec![grown], files: Vec::new() };
        assert_eq!(plan(&[stack], &then, None, &by_inode), [MapStep::Map(Region { end: 0x4000, ..grown })]);
    }

    /// Shared memory that is mapped at a new address is still mapped at the old one at that time.
    #[test]
    fn shared_memory_is_unmapped_last() {
        let now = [mapping(0x1000, 0x3000, 3, 1, 0), mapping(0x8000, 0x9000, 3, 2, 0)];
        let now = now.map(|m| Mapping { shared: true, ..m });
        let moved = |start: u64| Region {
            shared: true,
            ..region(start, start + 0x2000, 3, Backing::File { file: 0, offset: 0 })
        };
        for (to, left) in [(0x5000, vec![(0x1000, 0x3000)]), (0x2000, vec![(0x1000, 0x2000)])] {
            let files = vec![FileRef { is_object: true, ..file(1) }];
            let then = Layout { regions: vec![moved(to)], files };
            let first = MapStep::Unmap { start: 0x8000, end: 0x9000 };
            let last = left.into_iter().map(|(start, end)| MapStep::Unmap { start, end });
            let expected: Vec<MapStep> = [first, MapStep::Map(moved(to))].into_iter().chain(last).collect();
            assert_eq!(plan(&now, &then, None, &by_inode), expected);
        }
    }

    #[test]
    fn ranges_are_joined() {
        assert_eq!(joined(vec![(5, 6), (1, 4), (2, 3), (6, 9), (11, 12)]), [(1, 4), (5, 9), (11, 12)]);
        assert!(joined(Vec::new()).is_empty());
    }

    #[test]
    fn reserved_range_is_left_alone() {
        let reserve = Reserve { start: 0x10_0000 };
        let now = [mapping(reserve.start, reserve.end(), 7, 0, 0)];
        assert!(plan(&now, &Layout::default(), Some(reserve), &by_inode).is_empty());
        // The kernel merged the range with a neighbour on each side.
        let now = [mapping(reserve.start - 0x1000, reserve.end() + 0x2000, 3, 0, 0)];
        let unmapped = plan(&now, &Layout::default(), Some(reserve), &by_inode);
        let sides = [(reserve.start - 0x1000, reserve.start), (reserve.end(), reserve.end() + 0x2000)];
        assert_eq!(unmapped, sides.map(|(start, end)| MapStep::Unmap { start, end }));
    }

    #[test]
    fn range_is_mapped_if_regions_cover_it() {
        let ranges = [(0x1000, 0x3000), (0x3000, 0x4000), (0x6000, 0x7000)];
        let regions = ranges.map(|(start, end)| region(start, end, 3, Backing::Anonymous)).to_vec();
        let layout = Layout { regions, files: Vec::new() };
        for (start, end) in [(0x1000, 0x3000), (0x2000, 0x4000), (0x6000, 0x7000)] {
            assert!(layout.is_mapped(start, end), "{start:x}");
        }
        for (start, end) in
            [(0, 0x2000), (0x3000, 0x5000), (0x3000, 0x7000), (0x6000, 0x8000), (0x1000, 0x1000)]
        {
            assert!(!layout.is_mapped(start, end), "{start:x}");
        }
    }
}
