//! Turns one address space into another by mapping only what differs.
//!
//! Used where an empty guest becomes the process, between rounds of pre-copy, and where the skeleton at home
//! gets the shape that the process has taken on while it was away. The plan is a pure function; the process
//! carries it out by injected calls.

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
/// range are left alone. All removals come first: what is mapped afterwards falls on free addresses.
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
            backing: match (m.inode, identify(m)) {
                (0, _) => Backing::Anonymous,
                (_, Some(file)) => Backing::File { file, offset: m.offset },
                // A file that the target does not know: matches nothing.
                (_, None) => Backing::File { file: u32::MAX, offset: m.offset },
            },
        })
        .collect();
    let wanted: Vec<&Region> = then.regions.iter().filter(|r| r.backing != Backing::Kernel).collect();
    let mut steps = Vec::new();
    for p in &present {
        let kept = wanted.iter().filter(|w| same_kind(p, w)).map(|w| (w.start, w.end));
        for (start, end) in subtract(p.start, p.end, kept) {
            steps.push(Step::Unmap { start, end });
        }
    }
    for w in &wanted {
        let there: Vec<&Region> =
            present.iter().filter(|p| same_kind(p, w) && p.start < w.end && w.start < p.end).collect();
        for (start, end) in subtract(w.start, w.end, there.iter().map(|p| (p.start, p.end))) {
            steps.push(Step::Map(cut(w, start, end)));
        }
        for p in there.iter().filter(|p| p.prot != w.prot) {
            steps.push(Step::Protect { start: p.start.max(w.start), end: p.end.min(w.end), prot: w.prot });
        }
    }
    steps
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
fn subtract(start: u64, end: u64, holes: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
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
    rest
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
        Mapping { start, end, prot, shared: false, offset, device: 1, inode, name, flags: Vec::new() }
    }

    fn region(start: u64, end: u64, prot: u32, backing: Backing) -> Region {
        Region { start, end, prot, shared: false, grows_down: false, no_reserve: false, backing }
    }

    fn file(inode: u64) -> FileRef {
        let hash = ContentHash([0; 32]);
        FileRef { device: 1, inode, path: Vec::new(), size: 0, hash, shareable: true }
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
        // Anonymous memory has grown at both ends and been split by a protection; a file was remapped at
        // another offset.
        let now = [mapping(0x2000, 0x4000, 3, 0, 0), mapping(0x8000, 0x9000, 1, 1, 0)];
        let regions = vec![
            region(0x1000, 0x3000, 3, Backing::Anonymous),
            region(0x3000, 0x5000, 1, Backing::Anonymous),
            region(0x8000, 0x9000, 1, Backing::File { file: 0, offset: 0x1000 }),
        ];
        let then = Layout { regions, files: vec![file(1)] };
        let steps = plan(&now, &then, None, &by_inode);
        let expected = [
            Step::Unmap { start: 0x8000, end: 0x9000 },
            Step::Map(region(0x1000, 0x2000, 3, Backing::Anonymous)),
            Step::Map(region(0x4000, 0x5000, 1, Backing::Anonymous)),
            Step::Protect { start: 0x3000, end: 0x4000, prot: 1 },
            Step::Map(region(0x8000, 0x9000, 1, Backing::File { file: 0, offset: 0x1000 })),
        ];
        assert_eq!(steps, expected);
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
