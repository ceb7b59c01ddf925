//! The address space as a list of regions, and the files they map.

use crate::advice::MemoryAdvice;
use crate::node_file::NodeFile;
use crate::object::ObjectId;
use crate::reserve::Reserve;
use crate::unmovable::Unmovable;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use tern_ids::ContentHash;
use tern_tracee::procfs::Mapping;

/// Identifies a mapped file: its content, so that another node can map the same bytes, and the file
/// itself at home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRef {
    /// Device as in /proc/PID/maps at home.
    pub device: u64,
    /// Inode as in /proc/PID/maps at home.
    pub inode: u64,
    /// Path at home, as in /proc/PID/maps.
    pub path: Vec<u8>,
    /// Length in bytes.
    pub size: u64,
    /// Hash of the whole content. If `location` is set, a hash of the file's metadata instead,
    /// which changes with its content.
    pub hash: ContentHash,
    /// Every user at home may read it, so that a node's cache may hold it for all families.
    pub shareable: bool,
    /// A shared memory object ([`crate::object`]): it has no hash, and its content is sent with the
    /// processes that share it.
    pub is_object: bool,
    /// Where the file is stored, so that the guest's node can open it itself: directly if that node
    /// stores it, through MFS if home does. Such a file is mapped directly, and its content is not
    /// read to compute a hash.
    pub location: Option<Box<NodeFile>>,
}

/// The content behind a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backing {
    /// Anonymous memory: pages that are not sent are zero.
    Anonymous,
    /// A file.
    File {
        /// Index in [`Layout::files`].
        file: u32,
        /// File offset of the region's start, in bytes.
        offset: u64,
    },
    /// A mapping of the kernel: vDSO or vvar. Each node's kernel makes its own, which is moved to
    /// the same address.
    Kernel,
}

/// A range of the address space with one backing and one protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// First address.
    pub start: u64,
    /// The first address after it.
    pub end: u64,
    /// PROT_READ, PROT_WRITE, PROT_EXEC.
    pub prot: u32,
    /// MAP_SHARED: a file that cannot be written, or a shared memory object.
    pub shared: bool,
    /// MAP_GROWSDOWN.
    pub grows_down: bool,
    /// MAP_NORESERVE.
    pub no_reserve: bool,
    /// The program's advice.
    pub advice: MemoryAdvice,
    /// The content behind it.
    pub backing: Backing,
    /// At the receiver, this range may consist of pieces that would not merge into one mapping, and
    /// mremap(2) needs one mapping. So the receiver must map the range anew, in one mapping, and
    /// all content of the range is sent again ([`crate::pages`]).
    pub remap: bool,
}

impl Region {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Always false in a valid layout.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.end <= self.start
    }

    /// Whether its pages can have content that only this process sees.
    #[must_use]
    pub fn is_private(&self) -> bool {
        !self.shared && self.backing != Backing::Kernel
    }

    /// The (wrapping) file offset that address 0 would have. Equal for two parts of one mapping.
    pub(crate) fn origin(&self) -> Option<(u32, u64)> {
        match self.backing {
            Backing::File { file, offset } => Some((file, offset.wrapping_sub(self.start))),
            _ => None,
        }
    }
}

/// An address space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Layout {
    /// Its regions, by address.
    pub regions: Vec<Region>,
    /// The files that the regions map.
    pub files: Vec<FileRef>,
}

/// Maximum number of regions of a layout (the kernel's default limit is 65,530 mappings).
const MAX_REGIONS: usize = 70_000;
/// Maximum number of files of a layout.
const MAX_FILES: usize = 20_000;

/// Identifies mapped files.
pub trait FileIdentifier {
    /// The file behind a mapping. `None` for a private mapping of /dev/zero, which is anonymous
    /// memory with a name.
    ///
    /// # Errors
    /// If its content cannot be read.
    fn identify(&mut self, mapping: &Mapping) -> Result<Option<FileRef>, Unmovable>;

    /// Whether a mapping is of shared memory that moves together with all processes that share it.
    fn moves_with_sharers(&self, mapping: &Mapping) -> bool;
}

impl Layout {
    /// Describes an address space from its mappings with their smaps flags, without Tern's own
    /// range.
    ///
    /// # Errors
    /// If something in it cannot be moved, with the reason.
    pub fn describe(
        maps: &[Mapping],
        reserve: Option<Reserve>,
        files: &mut dyn FileIdentifier,
    ) -> Result<Self, Unmovable> {
        let mut layout = Self::default();
        let mut indices: HashMap<(u64, u64), Option<u32>> = HashMap::new();
        // If one mapping of a file is a shared memory object, a private mapping of the same file
        // refers to that object too, even if the private one comes first.
        let objects: HashMap<(u64, u64), &Mapping> =
            maps.iter().filter(|m| files.moves_with_sharers(m)).map(|m| ((m.device, m.inode), m)).collect();
        for m in &Reserve::exclude(reserve, maps) {
            if m.name == b"[vsyscall]" {
                continue;
            }
            let backing = if m.is_kernel_mapping() {
                Backing::Kernel
            } else {
                check(m)?;
                // A shared mapping that can never be written is as good as a private one.
                if writes_are_visible_to_others(m) && !files.moves_with_sharers(m) {
                    return Err(Unmovable::SharedMemory(String::from_utf8_lossy(&m.name).into_owned()));
                }
                if m.is_anonymous() {
                    Backing::Anonymous
                } else {
                    let file = match indices.get(&(m.device, m.inode)) {
                        Some(file) => *file,
                        None => {
                            let shared = objects.get(&(m.device, m.inode)).copied();
                            let file = files.identify(shared.unwrap_or(m))?;
                            let at = file.is_some().then_some(layout.files.len() as u32);
                            layout.files.extend(file);
                            indices.insert((m.device, m.inode), at);
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
                advice: MemoryAdvice::of(m),
                backing,
                remap: false,
            });
        }
        Ok(layout)
    }

    /// The shared memory that its regions map. Its files may contain more, which is not mapped.
    #[must_use]
    pub fn mapped_objects(&self) -> HashSet<ObjectId> {
        let file = |region: &Region| match region.backing {
            Backing::File { file, .. } => self.files.get(file as usize),
            _ => None,
        };
        let objects = self.regions.iter().filter_map(file).filter(|file| file.is_object);
        objects.map(|file| (file.device, file.inode)).collect()
    }

    /// Whether the program has mapped all of this range, which is not empty.
    #[must_use]
    pub fn is_mapped(&self, start: u64, end: u64) -> bool {
        let from = self.regions.partition_point(|region| region.end <= start);
        let mut at = start;
        for region in &self.regions[from..] {
            if at >= end || region.start > at || region.backing == Backing::Kernel {
                break;
            }
            at = region.end;
        }
        start < end && at >= end
    }

    /// Checks a layout received from another node.
    ///
    /// # Errors
    /// With the defect found.
    pub fn check(&self) -> Result<(), &'static str> {
        if self.regions.len() > MAX_REGIONS || self.files.len() > MAX_FILES {
            return Err("a layout with too many regions or files");
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
                    return Err("a layout with anonymous shared memory");
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether this is the same address space, regardless of [`Region::remap`].
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let plain = |r: &Region| Region { remap: false, ..*r };
        self.regions.iter().map(plain).eq(other.regions.iter().map(plain)) && self.files == other.files
    }

    /// The kernel's own mappings, by address.
    pub fn kernel_regions(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(|r| r.backing == Backing::Kernel)
    }
}

/// Whether a mapping can be moved at all, regardless of sharing.
///
/// # Errors
/// If not, with the reason.
pub fn check(m: &Mapping) -> Result<(), Unmovable> {
    let name = String::from_utf8_lossy(&m.name).into_owned();
    // A shared mapping of the device that can never be written, while anonymous memory can. The kernel
    // names shared anonymous memory like a deleted file.
    let is_zero_device = name == "/dev/zero" && m.shared;
    let is_device =
        name.starts_with("/dev/") && !name.starts_with("/dev/zero") && !name.starts_with("/dev/shm/");
    if m.has(b"io") || m.has(b"pf") || is_device || is_zero_device {
        return Err(Unmovable::DeviceMapping(name));
    }
    if m.has(b"ht") {
        return Err(Unmovable::HugePages);
    }
    if m.has(b"sl") && !m.is_kernel_mapping() {
        return Err(Unmovable::SealedMemory);
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

/// Whether other processes can observe writes to this memory.
#[must_use]
pub fn writes_are_visible_to_others(m: &Mapping) -> bool {
    m.shared && (m.is_anonymous() || m.has(b"mw"))
}
