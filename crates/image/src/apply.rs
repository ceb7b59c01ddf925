//! Turns one address space into another by mapping only what differs.
//!
//! Used where an empty guest becomes the process, between rounds of pre-copy, and where the skeleton at home
//! gets the shape that the process has taken on while it was away. The plan is a pure function; the process
//! carries it out by injected calls.

use crate::advice::Advice;
use crate::layout::{Backing, Layout, Region};
use crate::reserve::Reserve;
use tern_tracee::inject::Injection;
use tern_tracee::procfs::Mapping;
use tern_tracee::{Error, Result};

/// One change to an address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Remove `[start, end)`.
    Unmap {
        /// First address.
        start: u64,
        /// Address behind the last.
        end: u64,
    },
    /// Map this part (cut to what is missing).
    Map(Region),
    /// Change the protection of what is there.
    Protect {
        /// First address.
        start: u64,
        /// Address behind the last.
        end: u64,
        /// New protection.
        prot: u32,
    },
    /// Say something about what is there then.
    Advise {
        /// First address.
        start: u64,
        /// Address behind the last.
        end: u64,
        /// MADV_…
        advice: i32,
    },
}

/// How a process under injection is told what to do.
pub trait Space {
    /// The process, under our hand.
    fn injection(&mut self) -> &mut Injection;

    /// Makes it perform a call that its filter, if it has one, lets through.
    ///
    /// # Errors
    /// If the process is gone, or the call fails.
    fn call(&mut self, operation: &'static str, nr: i64, args: [u64; 6]) -> Result<u64>;

    /// Maps a part of a file at a fixed address; `region.backing` is `File`.
    ///
    /// # Errors
    /// If the file is not there, or cannot be mapped.
    fn map_file(&mut self, region: &Region, file: u32, offset: u64) -> Result<()>;
}

/// What would have to be done to a space with the maps `now` so that it has the layout `then`.
///
/// `identify` says which of `then`'s files is behind a mapping of `now`. The kernel's own mappings and our
/// range are left alone. Removals come first: what is mapped afterwards falls on free addresses.
pub fn plan(
    now: &[Mapping],
    then: &Layout,
    reserve: Option<Reserve>,
    identify: &dyn Fn(&Mapping) -> Option<u32>,
) -> Vec<Step> {
    let present: Vec<Region> = Reserve::without(reserve, now)
        .iter()
        .filter(|m| !m.is_kernels())
        .map(|m| Region {
            start: m.start,
            end: m.end,
            prot: m.prot,
            shared: m.shared,
            grows_down: m.has(b"gd"),
            no_reserve: false,
            advice: Advice::of(m),
            anew: false,
            backing: match (m.is_anonymous(), identify(m)) {
                (true, _) => Backing::Anonymous,
                (_, Some(file)) => Backing::File { file, offset: m.offset },
                // A file that the target does not know: matches nothing.
                (_, None) => Backing::File { file: u32::MAX, offset: m.offset },
            },
        })
        .collect();
    let wanted: Vec<&Region> = then.regions.iter().filter(|r| r.backing != Backing::Kernel).collect();
    // Pieces that are there need not become one: two that have held pages stay two, and mremap takes only one of them
    // (before 6.17). What the program has in one piece is kept only where it is in one, else mapped anew, if the sender
    // says that all of its content comes. If it does not, what is missing is mapped beside what is there, and is one with
    // it: of them all, only one has held pages. The stack has one beginning, and a name.
    let in_one = |p: &Region, w: &Region| {
        let joined = w.backing != Backing::Anonymous || w.grows_down || !w.anew;
        joined || (p.start <= w.start && w.end <= p.end)
    };
    let mut steps = Vec::new();
    // What shared memory is mapped anew from is removed last, but for what has been mapped over it by then.
    let mut last = Vec::new();
    for p in &present {
        let kept = wanted.iter().filter(|w| same_kind(p, w) && in_one(p, w)).map(|w| (w.start, w.end));
        let live = matches!(p.backing, Backing::File { file, .. }
            if then.files.get(file as usize).is_some_and(|file| file.live));
        let removed = if live { &mut last } else { &mut steps };
        removed.extend(subtract(p.start, p.end, kept).map(|(start, end)| Step::Unmap { start, end }));
    }
    for w in &wanted {
        let there: Vec<&Region> = present
            .iter()
            .filter(|p| same_kind(p, w) && in_one(p, w) && p.start < w.end && w.start < p.end)
            .collect();
        for (start, end) in subtract(w.start, w.end, there.iter().map(|p| (p.start, p.end))) {
            steps.push(Step::Map(cut(w, start, end)));
            advise(&mut steps, (start, end), w.advice, Advice::default());
        }
        for p in there.iter().filter(|p| p.prot != w.prot) {
            steps.push(Step::Protect { start: p.start.max(w.start), end: p.end.min(w.end), prot: w.prot });
        }
        for p in &there {
            advise(&mut steps, (p.start.max(w.start), p.end.min(w.end)), w.advice, p.advice);
        }
    }
    for step in last {
        let Step::Unmap { start, end } = step else { continue };
        let over = wanted.iter().map(|w| (w.start, w.end));
        steps.extend(subtract(start, end, over).map(|(start, end)| Step::Unmap { start, end }));
    }
    steps
}

fn advise(steps: &mut Vec<Step>, (start, end): (u64, u64), then: Advice, now: Advice) {
    steps.extend(then.steps(now).map(|advice| Step::Advise { start, end, advice }));
}

fn same_kind(a: &Region, b: &Region) -> bool {
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

/// `[start, end)` without the given ranges, which are in order and do not overlap.
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

/// Carries a plan out. If it fails midway the address space is neither the old one nor the new: the caller
/// gives the process up, or plans anew.
///
/// # Errors
/// Of the first step that fails.
pub fn carry_out(steps: &[Step], space: &mut dyn Space) -> Result<()> {
    for step in steps {
        match *step {
            Step::Unmap { start, end } => {
                space.call("unmap", libc::SYS_munmap, [start, end - start, 0, 0, 0, 0])?;
            }
            Step::Protect { start, end, prot } => {
                space.call("protect", libc::SYS_mprotect, [start, end - start, u64::from(prot), 0, 0, 0])?;
            }
            Step::Advise { start, end, advice } => {
                // Huge pages are a wish, which a kernel may not know.
                let wish = matches!(advice, libc::MADV_HUGEPAGE | libc::MADV_NOHUGEPAGE);
                let args = [start, end - start, advice as u64, 0, 0, 0];
                match space.call("say what a program has said of its memory", libc::SYS_madvise, args) {
                    Err(Error::Refused { .. }) if wish => {}
                    done => drop(done?),
                }
            }
            Step::Map(r) => match r.backing {
                Backing::File { file, offset } => space.map_file(&r, file, offset)?,
                Backing::Anonymous => {
                    let flags = flags(&r) | libc::MAP_ANONYMOUS as u64;
                    let args = [r.start, r.len(), u64::from(r.prot), flags, u64::MAX, 0];
                    let at = space.call("map memory", libc::SYS_mmap, args)?;
                    if at != r.start {
                        return Err(Error::Astray { what: format!("mapped at {at:#x}"), pid: 0 });
                    }
                }
                Backing::Kernel => {}
            },
        }
    }
    Ok(())
}

/// The flags with which a region is mapped, without MAP_ANONYMOUS.
#[must_use]
pub fn flags(r: &Region) -> u64 {
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
            advice: Advice::default(),
            backing,
            anew: true,
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
            live: false,
            place: None,
        }
    }

    fn by_inode(m: &Mapping) -> Option<u32> {
        m.inode.checked_sub(1).map(|i| i as u32)
    }

    #[test]
    fn equal_spaces_need_nothing() {
        let now = [mapping(0x1000, 0x3000, 3, 0, 0), mapping(0x5000, 0x6000, 5, 1, 0x1000)];
        let backing = Backing::File { file: 0, offset: 0x1000 };
        let regions = vec![region(0x1000, 0x3000, 3, Backing::Anonymous), region(0x5000, 0x6000, 5, backing)];
        let then = Layout { regions, files: vec![file(1)] };
        assert!(plan(&now, &then, None, &by_inode).is_empty());
    }

    #[test]
    fn differences_only() {
        // Anonymous memory was given back at its end and split by a protection; a file was remapped at another offset.
        let now = [mapping(0x1000, 0x6000, 3, 0, 0), mapping(0x8000, 0x9000, 1, 1, 0)];
        let regions = vec![
            region(0x1000, 0x3000, 3, Backing::Anonymous),
            region(0x3000, 0x5000, 1, Backing::Anonymous),
            region(0x8000, 0x9000, 1, Backing::File { file: 0, offset: 0x1000 }),
        ];
        let then = Layout { regions, files: vec![file(1)] };
        let steps = plan(&now, &then, None, &by_inode);
        let expected = [
            Step::Unmap { start: 0x5000, end: 0x6000 },
            Step::Unmap { start: 0x8000, end: 0x9000 },
            Step::Protect { start: 0x3000, end: 0x5000, prot: 1 },
            Step::Map(region(0x8000, 0x9000, 1, Backing::File { file: 0, offset: 0x1000 })),
        ];
        assert_eq!(steps, expected);
    }

    #[test]
    fn what_is_one_piece_is_not_put_together() {
        let one = vec![region(0x2000, 0x5000, 3, Backing::Anonymous)];
        let then = Layout { regions: one, files: Vec::new() };
        let anew = |now: &[Mapping]| {
            let mut steps: Vec<Step> =
                now.iter().map(|m| Step::Unmap { start: m.start, end: m.end }).collect();
            steps.push(Step::Map(then.regions[0]));
            steps
        };
        for now in [
            vec![mapping(0x2000, 0x3000, 3, 0, 0), mapping(0x3000, 0x5000, 3, 0, 0)],
            vec![mapping(0x2000, 0x4000, 1, 0, 0)],
            vec![mapping(0x1000, 0x3000, 3, 0, 0), mapping(0x4000, 0x6000, 3, 0, 0)],
        ] {
            assert_eq!(plan(&now, &then, None, &by_inode), anew(&now));
        }
        // A heap that has grown, of which only what is new is sent.
        let grown = Region { anew: false, ..then.regions[0] };
        let heap = Layout { regions: vec![grown], files: Vec::new() };
        let missing = Region { start: 0x3000, ..grown };
        assert_eq!(plan(&[mapping(0x2000, 0x3000, 3, 0, 0)], &heap, None, &by_inode), [Step::Map(missing)]);
        // The stack has grown; its name and the arguments above it stay.
        let stack = Mapping { flags: vec![*b"gd"], ..mapping(0x4000, 0x5000, 3, 0, 0) };
        let grown = Region { grows_down: true, ..then.regions[0] };
        let then = Layout { regions: vec![grown], files: Vec::new() };
        assert_eq!(plan(&[stack], &then, None, &by_inode), [Step::Map(Region { end: 0x4000, ..grown })]);
    }

    /// What is shared is mapped anew from where it is mapped still.
    #[test]
    fn shared_memory_is_let_go_of_last() {
        let now = [mapping(0x1000, 0x3000, 3, 1, 0), mapping(0x8000, 0x9000, 3, 2, 0)];
        let now = now.map(|m| Mapping { shared: true, ..m });
        let moved = |start: u64| Region {
            shared: true,
            ..region(start, start + 0x2000, 3, Backing::File { file: 0, offset: 0 })
        };
        for (to, left) in [(0x5000, vec![(0x1000, 0x3000)]), (0x2000, vec![(0x1000, 0x2000)])] {
            let files = vec![FileRef { live: true, ..file(1) }];
            let then = Layout { regions: vec![moved(to)], files };
            let first = Step::Unmap { start: 0x8000, end: 0x9000 };
            let last = left.into_iter().map(|(start, end)| Step::Unmap { start, end });
            let expected: Vec<Step> = [first, Step::Map(moved(to))].into_iter().chain(last).collect();
            assert_eq!(plan(&now, &then, None, &by_inode), expected);
        }
    }

    #[test]
    fn our_range_is_left_alone() {
        let reserve = Reserve { start: 0x10_0000 };
        let now = [mapping(reserve.start, reserve.end(), 7, 0, 0)];
        assert!(plan(&now, &Layout::default(), Some(reserve), &by_inode).is_empty());
        // Merged with a neighbour on each side.
        let now = [mapping(reserve.start - 0x1000, reserve.end() + 0x2000, 3, 0, 0)];
        let unmapped = plan(&now, &Layout::default(), Some(reserve), &by_inode);
        let sides = [(reserve.start - 0x1000, reserve.start), (reserve.end(), reserve.end() + 0x2000)];
        assert_eq!(unmapped, sides.map(|(start, end)| Step::Unmap { start, end }));
    }
}
