//! Files by the hash of their content, as home has them, and the [`cache`](Cache) of them that a guest's node has.
//!
//! A mapped file travels as its BLAKE3 hash; only a node that has no file with that hash asks for the bytes.
//! The cache holds files that everybody at their home may read (knowing a hash must not become a right to
//! read); others are kept for one family only, in memory, and vanish with it. A file written to within the
//! last seconds is treated like one of these: its timestamp could not tell a later change.
//!
//! A file of the node where the guest is (home sees it through MFS) is not read at all: the node opens it itself, and the guest maps that. So is a large
//! one of home's, if the guest's node can show it ([`Shows`]). They go by a hash of what changes whenever their content does; who takes their content under
//! that from another node cannot check it, and keeps it for the family.

mod cache;

pub use cache::{Cache, Holder, Open};

use crate::layout::{FileRef, Files, is_shared_memory};
use crate::object::{self, ObjectId};
use crate::place::{FUSE, Place, Trees};
use crate::process::Unmovable;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tern_ids::{ContentHash, NodeId};
use tern_tracee::procfs::Mapping;

/// A file changed so recently (seconds) is not cached by hash.
const FRESH: i64 = 2;

/// Of files up to this size that are being written a copy is sent: they may be something else by then.
const MOST_COPIED: u64 = 64 << 20;

/// A file of the guest's node is mapped there from this size on: less is sent as fast.
const WORTH_OPENING: u64 = 64 << 10;

/// A file of home's is mapped through MFS from this size on, by a guest whose node can. What is smaller is sent as fast, and kept there by its
/// hash for all who come with it.
const WORTH_SHOWING: u64 = 16 << 20;

/// Whether a guest's node shows it files of its home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Shows {
    /// It cannot, or home does not let it.
    #[default]
    Nothing,
    /// Those of this node, which is home.
    Of(NodeId),
}

/// What is read of a process' mapped files at its home.
#[derive(Debug, Default)]
pub struct HomeFiles {
    pid: i32,
    cache_dir: PathBuf,
    /// By device and inode.
    known: HashMap<(u64, u64), Known>,
    /// The memory that it shares with those that move with it.
    pub objects: HashSet<ObjectId>,
    /// Where its guest is, or is to be.
    guest: Option<NodeId>,
    shows: Shows,
    trees: Trees,
}

/// A file that has been identified.
#[derive(Debug)]
struct Known {
    file: FileRef,
    /// By which it is known whether it is the same still; of one that was written to just then that is not known.
    stamp: Option<String>,
    /// The content of such a one, which may be written to again.
    copy: Option<File>,
}

impl HomeFiles {
    /// For the process at home. Hashes already computed are remembered below `cache_dir`.
    #[must_use]
    pub fn new(pid: i32, cache_dir: &Path) -> Self {
        Self { pid, cache_dir: cache_dir.to_owned(), known: HashMap::new(), ..Self::default() }
    }

    /// From now on its guest is on this node, which shows it this, or on its way there.
    pub fn for_guest(&mut self, node: NodeId, shows: Shows) {
        let before = (self.guest.replace(node), std::mem::replace(&mut self.shows, shows));
        if before != (Some(node), shows) {
            self.known.retain(|_, known| known.file.place.is_none());
        }
    }

    /// For a child, which shares what its parent shares and is where that is.
    #[must_use]
    pub fn of_child(&self, pid: i32) -> Self {
        let objects = self.objects.clone();
        Self { objects, guest: self.guest, shows: self.shows, ..Self::new(pid, &self.cache_dir) }
    }

    /// From now on looks at it through this thread of it.
    pub fn look_through(&mut self, thread: i32) {
        self.pid = thread;
    }

    /// Opens the file behind a mapping of the process, deleted or not.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(&self, m: &Mapping) -> io::Result<File> {
        let direct = File::open(format!("/proc/{}/map_files/{:x}-{:x}", self.pid, m.start, m.end));
        direct.or_else(|refused| match refused.kind() {
            // Without the privilege for map_files: by name.
            io::ErrorKind::PermissionDenied => self.open_named(&m.name, m.inode),
            _ => Err(refused),
        })
    }

    /// Opens a file that has been unmapped since it was identified.
    ///
    /// # Errors
    /// If its name does not lead to it any more.
    pub fn open_by_name(&self, file: &FileRef) -> io::Result<File> {
        self.open_named(&file.path, file.inode)
    }

    /// Opens a file of the process' root by name, if that still is the same file.
    fn open_named(&self, name: &[u8], inode: u64) -> io::Result<File> {
        of_inode(self.open_place(name, OFlags::RDONLY)?, inode)
    }

    /// The files with this content that have been identified.
    pub fn by_hash(&self, hash: ContentHash) -> impl Iterator<Item = &FileRef> {
        self.known.values().map(|known| &known.file).filter(move |file| file.hash == hash)
    }

    /// Opens what has this file's content, as it was when it was identified.
    ///
    /// # Errors
    /// If there is none any more.
    pub fn content(&self, file: &FileRef, maps: &[Mapping]) -> io::Result<File> {
        let copy =
            self.known.values().filter(|known| known.file.hash == file.hash).find_map(|k| k.copy.as_ref());
        copy.map_or_else(|| self.open_like(file, maps), File::try_clone)
    }

    /// Opens a file, or another with the same content: of those a node of its guest cannot tell one from the other, nor
    /// can its program. `maps` is what the process maps now.
    ///
    /// # Errors
    /// If there is none any more.
    pub fn open_like(&self, file: &FileRef, maps: &[Mapping]) -> io::Result<File> {
        let one = |file: &FileRef| {
            let is_it = |m: &&Mapping| (m.device, m.inode) == (file.device, file.inode);
            maps.iter().find(is_it).map_or_else(|| self.open_by_name(file), |m| self.open(m))
        };
        one(file).or_else(|error| self.by_hash(file.hash).find_map(|file| one(file).ok()).ok_or(error))
    }

    /// The process has mapped a file just now: what is known of that from before may not be true any more.
    pub fn mapped(&mut self, m: &Mapping) {
        let stamp = self.open(m).and_then(|file| Ok(stamp(&file.metadata()?))).ok();
        let known = self.known.get(&(m.device, m.inode)).and_then(|known| known.stamp.clone());
        if stamp.is_none() || known != stamp {
            self.known.remove(&(m.device, m.inode));
        }
    }

    /// Forgets all: the process has executed another program, and may map changed files.
    pub fn forget(&mut self) {
        self.known.clear();
        self.objects.clear();
    }

    /// From now on it is known to share these with those that move with it.
    pub fn share(&mut self, objects: &HashSet<ObjectId>) {
        self.objects.clone_from(objects);
        self.measure_again();
    }

    /// What it shares may have another size by now.
    pub fn measure_again(&mut self) {
        self.known.retain(|_, known| !known.file.live);
    }

    /// Opens what is behind a mapping of shared memory.
    ///
    /// # Errors
    /// If it cannot be opened: that needs CAP_CHECKPOINT_RESTORE, where its name does not lead to it.
    pub fn open_object(&self, m: &Mapping) -> io::Result<File> {
        let mut how = File::options();
        how.read(true).write(true);
        let direct = how.open(format!("/proc/{}/map_files/{:x}-{:x}", self.pid, m.start, m.end));
        let opened = direct.or_else(|refused| match refused.kind() {
            // What anybody has put in its place by now root could write all the same.
            io::ErrorKind::PermissionDenied if !rustix::process::geteuid().is_root() => {
                self.open_place(&m.name, OFlags::RDWR)
            }
            _ => Err(refused),
        });
        opened.and_then(|file| of_inode(file, m.inode))
    }

    /// Opens what bears this name in the process' root. The kernel has told the name without symbolic links: whoever has
    /// put one there since wants us to open something else.
    fn open_place(&self, name: &[u8], how: OFlags) -> io::Result<File> {
        let root = File::open(format!("/proc/{}/root", self.pid))?;
        let how = how | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        Ok(rustix::fs::openat2(root, name, how, Mode::empty(), resolve)?.into())
    }

    /// Where a file is that need not be sent: the guest's node's own, or a large one that it shows.
    fn place(&mut self, m: &Mapping, file: &File, meta: &fs::Metadata) -> Option<Place> {
        if meta.size() < WORTH_OPENING || self.guest.is_none() {
            return None;
        }
        if !self.trees.has(meta.dev()) {
            let kind = rustix::fs::fstatfs(file).ok()?.f_type as u32;
            if kind != FUSE {
                return self.place_at_home(m, file, meta);
            }
            if !self.trees.find(self.pid, meta.dev()) {
                return None;
            }
        }
        let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let place = self.trees.place(
            self.pid,
            (&link, OsStr::from_bytes(&m.name).as_ref()),
            (meta.dev(), meta.ino()),
        );
        place.filter(|place| Some(place.node) == self.guest)
    }

    /// Where a file is that is home's own, as the guest's node sees it.
    fn place_at_home(&self, m: &Mapping, file: &File, meta: &fs::Metadata) -> Option<Place> {
        let Shows::Of(node) = self.shows else { return None };
        if meta.size() < WORTH_SHOWING {
            return None;
        }
        // The way to it is ours as well, if it is not removed, nor in another root, nor mounted there alone.
        let named = fs::symlink_metadata(OsStr::from_bytes(&m.name)).ok()?;
        let path =
            m.name.strip_prefix(b"/").filter(|_| (named.dev(), named.ino()) == (meta.dev(), meta.ino()))?;
        let volume = rustix::fs::fstatvfs(file).ok()?.f_fsid;
        let status = tern_tracee::procfs::status(self.pid).ok()?;
        let who = (status.uid[3], status.gid[3], status.groups);
        let number = tern_ids::number::of(node, volume, meta.ino());
        Some(Place { node, path: path.to_vec(), number, who })
    }

    fn hash(&self, file: &File, meta: &fs::Metadata, settled: bool) -> io::Result<ContentHash> {
        let note = self.cache_dir.join("hashes").join(stamp(meta));
        if settled
            && let Ok(bytes) = fs::read(&note)
            && let Ok(hash) = bytes.try_into()
        {
            return Ok(ContentHash(hash));
        }
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; 256 << 10];
        let mut at = 0;
        loop {
            let n = file.read_at(&mut buffer, at)?;
            if n == 0 {
                break;
            }
            hasher.update(&buffer[..n]);
            at += n as u64;
        }
        let hash = ContentHash(*hasher.finalize().as_bytes());
        if settled {
            // Only to save time later; a cache that cannot be written to is no error.
            let _unwritable =
                fs::create_dir_all(self.cache_dir.join("hashes")).and_then(|()| fs::write(note, hash.0));
        }
        Ok(hash)
    }
}

fn of_inode(file: File, inode: u64) -> io::Result<File> {
    if file.metadata()?.ino() == inode { Ok(file) } else { Err(io::ErrorKind::NotFound.into()) }
}

/// Copies a file into memory.
fn copy(file: &File) -> io::Result<File> {
    let mut copy = File::from(rustix::fs::memfd_create("tern-copy", rustix::fs::MemfdFlags::CLOEXEC)?);
    io::copy(&mut At { file, offset: 0 }.take(MOST_COPIED), &mut copy)?;
    Ok(copy)
}

/// What changes whenever a file's content does, but within a timestamp's granularity.
fn stamp(meta: &fs::Metadata) -> String {
    format!(
        "{:x}-{:x}-{:x}-{:x}.{:x}-{:x}.{:x}",
        meta.dev(),
        meta.ino(),
        meta.size(),
        meta.mtime(),
        meta.mtime_nsec(),
        meta.ctime(),
        meta.ctime_nsec()
    )
}

/// By what a file of this node goes that is not read; one without a stamp is another one each time.
fn version(node: NodeId, stamp: Option<&str>) -> ContentHash {
    let mut hasher = blake3::Hasher::new_derive_key("tern 2026-11-26 a version of a file");
    let once = || format!("{:?}", std::time::Instant::now());
    hasher.update(&node.0.to_le_bytes()).update(stamp.map_or_else(once, str::to_owned).as_bytes());
    ContentHash(*hasher.finalize().as_bytes())
}

/// The number of /dev/zero: 1, 5.
const DEV_ZERO: u64 = 1 << 8 | 5;

impl Files for HomeFiles {
    /// Whether those who share it move together is seen to when they stand.
    fn is_live(&self, m: &Mapping) -> bool {
        is_shared_memory(m) || m.shared && self.objects.contains(&object::id(m))
    }

    fn identify(&mut self, m: &Mapping) -> Result<Option<FileRef>, Unmovable> {
        let live = self.is_live(m);
        if let Some(known) = self.known.get(&(m.device, m.inode))
            && (known.file.live || !live)
        {
            return Ok(Some(known.file.clone()));
        }
        let unreadable =
            |_e: io::Error| Unmovable::UnreadableFile(String::from_utf8_lossy(&m.name).into_owned());
        let file = if live { self.open_object(m) } else { self.open(m) }.map_err(unreadable)?;
        let meta = file.metadata().map_err(unreadable)?;
        if live {
            let (path, hash) = (m.name.clone(), ContentHash([0; 32]));
            let (device, inode) = object::id(m);
            let file =
                FileRef { device, inode, path, size: meta.size(), hash, shareable: false, live, place: None };
            self.known.insert((device, inode), Known { file: file.clone(), stamp: None, copy: None });
            return Ok(Some(file));
        }
        if meta.file_type().is_char_device() && meta.rdev() == DEV_ZERO {
            return Ok(None);
        }
        if !meta.is_file() {
            return Err(Unmovable::SpecialMapping(String::from_utf8_lossy(&m.name).into_owned()));
        }
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let settled = now.cast_signed() - meta.mtime().max(meta.ctime()) > FRESH;
        let stamped = settled.then(|| stamp(&meta));
        if let Some(place) = self.place(m, &file, &meta) {
            let (path, hash) = (m.name.clone(), version(place.node, stamped.as_deref()));
            let (device, inode, place) = (m.device, m.inode, Some(Box::new(place)));
            let file =
                FileRef { device, inode, path, size: meta.size(), hash, shareable: false, live, place };
            let known = Known { file: file.clone(), stamp: stamped, copy: None };
            self.known.insert((device, inode), known);
            return Ok(Some(file));
        }
        let copied = !settled && meta.size() <= MOST_COPIED;
        let copy = if copied { Some(copy(&file).map_err(unreadable)?) } else { None };
        let size = copy.as_ref().map_or(Ok(meta.size()), |copy| copy.metadata().map(|m| m.size()));
        let size = size.map_err(unreadable)?;
        let hash = self.hash(copy.as_ref().unwrap_or(&file), &meta, settled).map_err(unreadable)?;
        let shareable = settled && meta.permissions().mode() & 0o004 != 0;
        let path = m.name.clone();
        let file =
            FileRef { device: m.device, inode: m.inode, path, size, hash, shareable, live, place: None };
        self.known.insert((m.device, m.inode), Known { file: file.clone(), stamp: stamped, copy });
        Ok(Some(file))
    }
}

/// Reads a file piece by piece to send it. One that has a place (`may_shrink`) may have become shorter where it is: whoever maps it meets nothing behind its
/// end, and what is sent for that is zero.
///
/// # Errors
/// Those of the file; `InvalidData` if another one is shorter than it was.
pub fn read_piece(
    file: &File,
    offset: u64,
    most: usize,
    (size, may_shrink): (u64, bool),
) -> io::Result<Vec<u8>> {
    let want = usize::try_from(size - offset).unwrap_or(usize::MAX).min(most);
    let mut piece = Vec::with_capacity(want);
    let mut reader = At { file, offset };
    (&mut reader).take(want as u64).read_to_end(&mut piece)?;
    if piece.len() < want && may_shrink {
        piece.resize(want, 0);
    }
    if piece.len() < want {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a mapped file has become shorter"));
    }
    Ok(piece)
}

struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(buffer, self.offset)?;
        self.offset += n as u64;
        Ok(n)
    }
}
