//! The address space as a list of regions, and the files they map.

use crate::advice::Advice;
use crate::place::Place;
use crate::process::Unmovable;
use crate::reserve::Reserve;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use tern_ids::ContentHash;
use tern_tracee::procfs::Mapping;

/// A file that is mapped: what is needed to map the same bytes elsewhere, and to find the file at home again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRef {
    /// Device as in /proc/PID/maps at home.
    pub device: u64,
    /// Inode as in /proc/PID/maps at home.
    pub inode: u64,
    /// Its name at home, as /proc/PID/maps shows it.
    pub path: Vec<u8>,
    /// Length in bytes.
    pub size: u64,
    /// Hash of the whole content; of a file that has a place, of what changes whenever its content does.
    pub hash: ContentHash,
    /// Everybody at home may read it, so that it may lie in a node's cache for everybody.
    pub shareable: bool,
    /// It is memory that its processes share and write ([`crate::object`]): it has no hash, and its content travels with
    /// these processes.
    pub live: bool,
    /// Where else it can be opened: on its own node, which is not home, or as MFS shows home's. There it is mapped itself, and nobody has read it to know its
    /// hash.
    pub place: Option<Box<Place>>,
}

/// What is behind a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backing {
    /// Nothing: pages not sent are zero.
    Anonymous,
    /// This file of the layout's list.
    File {
        /// Index in [`Layout::files`].
        file: u32,
        /// Offset of the region's start, bytes.
        offset: u64,
    },
    /// The kernel's own: vDSO or its data. Made by the kernel of each node, placed where it was.
    Kernel,
}

/// A part of the address space with one backing and one protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// First address.
    pub start: u64,
    /// Address behind the last.
    pub end: u64,
    /// PROT_READ, PROT_WRITE, PROT_EXEC.
    pub prot: u32,
    /// Mapped MAP_SHARED: a file that cannot be written, or a live one.
    pub shared: bool,
    /// MAP_GROWSDOWN.
    pub grows_down: bool,
    /// MAP_NORESERVE.
    pub no_reserve: bool,
    /// What was said about it.
    pub advice: Advice,
    /// What is behind it.
    pub backing: Backing,
    /// What the receiver has there of anonymous memory need not be kept, since all of it is sent ([`crate::pages`]):
    /// it is to be in one piece.
    pub anew: bool,
}

impl Region {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Never, in a sound layout.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.end <= self.start
    }

    /// Whether its pages can hold content of the process' own.
    #[must_use]
    pub fn is_private(&self) -> bool {
        !self.shared && self.backing != Backing::Kernel
    }

    /// The offset at which its file would be mapped at address 0 (wrapping); equal for two parts of one mapping.
    pub(crate) fn origin(&self) -> Option<(u32, u64)> {
        match self.backing {
            Backing::File { file, offset } => Some((file, offset.wrapping_sub(self.start))),
            _ => None,
        }
    }
}

/// A whole address space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Layout {
    /// Its regions in order of address.
    pub regions: Vec<Region>,
    /// The files that they map.
    pub files: Vec<FileRef>,
}

/// The most regions that a layout may have (the kernel's default limit is 65,530 mappings).
pub const MOST_REGIONS: usize = 70_000;
/// The most files that a layout may name.
pub const MOST_FILES: usize = 20_000;

/// Finds the record of a mapped file.
pub trait Files {
    /// The file behind a mapping; none behind a private one of /dev/zero, which is anonymous memory under that name.
    ///
    /// # Errors
    /// If its content cannot be had.
    fn identify(&mut self, mapping: &Mapping) -> Result<Option<FileRef>, Unmovable>;

    /// Whether what a shared mapping shows is memory that moves together with all who share it.
    fn is_live(&self, mapping: &Mapping) -> bool;
}

impl Layout {
    /// Describes an address space from its maps (with smaps' flags, or with those of `flags_from` where a
    /// region is the same), leaving out our own range.
    ///
    /// # Errors
    /// With the reason, if something in it cannot be moved.
    pub fn describe(
        maps: &[Mapping],
        reserve: Option<Reserve>,
        files: &mut dyn Files,
    ) -> Result<Self, Unmovable> {
        let mut layout = Self::default();
        let mut known: HashMap<(u64, u64), Option<u32>> = HashMap::new();
        // What is shared in one mapping and private in another is one file, and shared memory, whichever comes first.
        let live: HashMap<(u64, u64), &Mapping> =
            maps.iter().filter(|m| files.is_live(m)).map(|m| ((m.device, m.inode), m)).collect();
        for m in &Reserve::without(reserve, maps) {
            if m.name == b"[vsyscall]" {
                continue;
            }
            let backing = if m.is_kernels() {
                Backing::Kernel
            } else {
                check(m)?;
                // One that can never be written is as good as a private one.
                if is_shared_memory(m) && !files.is_live(m) {
                    return Err(Unmovable::SharedMemory(String::from_utf8_lossy(&m.name).into_owned()));
                }
                if m.is_anonymous() {
                    Backing::Anonymous
                } else {
                    let file = match known.get(&(m.device, m.inode)) {
                        Some(file) => *file,
                        None => {
                            let shared = live.get(&(m.device, m.inode)).copied();
                            let file = files.identify(shared.unwrap_or(m))?;
                            let at = file.is_some().then_some(layout.files.len() as u32);
                            layout.files.extend(file);
                            known.insert((m.device, m.inode), at);
                            at
                        }
                    };
                    file.map_or(Backing::Anonymous, |file| Backing::File { file, offset: m.offset })
                }
            };
            layout.regions.push(Region {
                start: m.start,
                end: m.end,
                prot: m.prot,
                shared: m.shared,
                grows_down: m.has(b"gd"),
                no_reserve: m.has(b"nr"),
                advice: Advice::of(m),
                backing,
                anew: false,
            });
        }
        Ok(layout)
    }

    /// Checks a layout that came from another node.
    ///
    /// # Errors
    /// With what is wrong.
    pub fn check(&self) -> Result<(), &'static str> {
        if self.regions.len() > MOST_REGIONS || self.files.len() > MOST_FILES {
            return Err("a layout of too many parts");
        }
        let mut last = 0;
        for r in &self.regions {
            let aligned = r.start % tern_tracee::PAGE == 0 && r.end % tern_tracee::PAGE == 0;
            if !aligned || r.start < last || r.end <= r.start || r.end > tern_tracee::TASK_END {
                return Err("a layout with misplaced regions");
            }
            last = r.end;
            match r.backing {
                Backing::File { file, offset }
                    if (file as usize >= self.files.len() || offset % tern_tracee::PAGE != 0) =>
                {
                    return Err("a layout with an unknown file");
                }
                Backing::Anonymous | Backing::Kernel if r.shared => {
                    return Err("a layout with shared memory");
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether this is the same address space, whatever of it the receiver is to map anew.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let plain = |r: &Region| Region { anew: false, ..*r };
        self.regions.iter().map(plain).eq(other.regions.iter().map(plain)) && self.files == other.files
    }

    /// The parts of the kernel's own, in order of address.
    pub fn kernels(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(|r| r.backing == Backing::Kernel)
    }
}

/// Whether a mapping can be moved at all (kernel.md section 8), whoever shares it.
///
/// # Errors
/// With the reason, if not.
pub fn check(m: &Mapping) -> Result<(), Unmovable> {
    let name = String::from_utf8_lossy(&m.name).into_owned();
    if m.has(b"io")
        || m.has(b"pf")
        || name.starts_with("/dev/") && !name.starts_with("/dev/zero") && !name.starts_with("/dev/shm/")
    {
        return Err(Unmovable::DeviceMapping(name));
    }
    if m.has(b"ht") {
        return Err(Unmovable::HugePages);
    }
    if m.has(b"ss") {
        return Err(Unmovable::ShadowStack);
    }
    if m.has(b"um") || m.has(b"ui") {
        return Err(Unmovable::Userfaultfd);
    }
    if name.starts_with("/secretmem") || name.starts_with("/[aio]") || name.starts_with("[uprobes") {
        return Err(Unmovable::SpecialMapping(name));
    }
    if m.end > tern_tracee::TASK_END {
        return Err(Unmovable::SpecialMapping(format!("{:#x}", m.start)));
    }
    Ok(())
}

/// Whether this is memory that others can see written, as smaps shows it.
#[must_use]
pub fn is_shared_memory(m: &Mapping) -> bool {
    m.shared && (m.is_anonymous() || m.has(b"mw"))
}
