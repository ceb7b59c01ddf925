//! Mapped files identified by a hash of their content at home, and the guest node's
//! [`cache`](ContentCache) of them.
//!
//! A mapped file is sent as its BLAKE3 hash. A node requests the content only if it has no file
//! with that hash. The cache holds files that every user at home may read, since knowing a hash
//! must not grant the right to read. All other files are kept in memory for one family, as long as
//! a guest of it maps them. Files written within the last seconds are kept in memory too, since a
//! time stamp would not show a later change.
//!
//! A file stored on the guest's own node, which home sees through MFS, is not read at all: the node
//! opens it, and the guest maps it directly. A large file of home is not read either if the guest's
//! node can mount home's files for its guests ([`ShowableFiles`]). In both cases the hash covers a
//! stamp that changes with the content, not the content. If the content has to be sent
//! nevertheless, the receiver cannot verify it against this hash, and keeps it for the family only.

mod cache;

pub use cache::{ContentCache, KeptContent, OpenFileConnection, OpenNodeFile};

use crate::layout::{FileIdentifier, FileRef, writes_are_visible_to_others};
use crate::node_file::{FUSE_SUPER_MAGIC, MfsMounts, NodeFile, allows_direct, fs_credentials};
use crate::object::{self, ObjectId};
use crate::process::Unmovable;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags};
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

/// A file changed within this many seconds is not cached by hash.
const SETTLED_SECONDS: i64 = 2;

/// Files up to this size, in bytes, that may still be written are copied before they are sent.
const MAX_COPY_BYTES: u64 = 64 << 20;

/// Minimum size, in bytes, of a file that is mapped directly on the node that stores it. Smaller
/// files are sent as fast.
const MIN_DIRECT_BYTES: u64 = 64 << 10;

/// Minimum size, in bytes, of a file of home that a guest maps through MFS. Smaller files are sent
/// as fast, and cached by hash for all guests.
const MIN_SHOWN_BYTES: u64 = 16 << 20;

/// Whether a guest's node can mount files of the guest's home for it, and from which node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShowableFiles {
    /// The node cannot, or home does not allow it.
    #[default]
    Nothing,
    /// It can mount files of home, which is this node.
    Of(NodeId),
}

/// The mapped files of a process at its home.
#[derive(Debug, Default)]
pub struct HomeFiles {
    pid: i32,
    cache_dir: PathBuf,
    /// By device and inode.
    identified: HashMap<(u64, u64), IdentifiedFile>,
    /// Shared memory objects that move together with the processes that share them.
    pub objects: HashSet<ObjectId>,
    /// The node where its guest is, or will be.
    guest: Option<NodeId>,
    showable: ShowableFiles,
    mounts: MfsMounts,
}

/// An identified file.
#[derive(Debug)]
struct IdentifiedFile {
    file: FileRef,
    /// The address range of a mapping of it.
    mapped_at: (u64, u64),
    /// Shows whether the file has changed. `None` if it was written too recently to tell.
    stamp: Option<String>,
    /// A copy of a file that may still be written.
    copy: Option<File>,
}

impl HomeFiles {
    /// For the process `pid` at home. Computed hashes are cached below `cache_dir`.
    #[must_use]
    pub fn new(pid: i32, cache_dir: &Path) -> Self {
        Self { pid, cache_dir: cache_dir.to_owned(), identified: HashMap::new(), ..Self::default() }
    }

    /// Sets the node where its guest is or is going, and which files that node can mount for it.
    pub fn set_guest(&mut self, node: NodeId, showable: ShowableFiles) {
        let before = (self.guest.replace(node), std::mem::replace(&mut self.showable, showable));
        if before != (Some(node), showable) {
            self.identified.retain(|_, identified| identified.file.location.is_none());
        }
    }

    /// For a child, which shares its parent's objects and is on the same node.
    #[must_use]
    pub fn for_child(&self, pid: i32) -> Self {
        let objects = self.objects.clone();
        Self { objects, guest: self.guest, showable: self.showable, ..Self::new(pid, &self.cache_dir) }
    }

    /// Reads the process's /proc entries through this thread from now on.
    pub fn set_proc_thread(&mut self, thread: i32) {
        self.pid = thread;
    }

    /// Opens the file behind a mapping, even if it has been deleted.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(&self, m: &Mapping) -> io::Result<File> {
        self.open_mapped((m.start, m.end), &m.name, m.inode)
    }

    fn open_mapped(&self, (start, end): (u64, u64), name: &[u8], inode: u64) -> io::Result<File> {
        let direct = File::open(format!("/proc/{}/map_files/{start:x}-{end:x}", self.pid));
        direct.or_else(|refused| match refused.kind() {
            // Without the privilege for map_files, open it by name.
            io::ErrorKind::PermissionDenied => self.open_named(name, inode),
            _ => Err(refused),
        })
    }

    /// Opens a file that was unmapped after it was identified.
    ///
    /// # Errors
    /// If its name refers to another file now.
    pub fn open_by_name(&self, file: &FileRef) -> io::Result<File> {
        self.open_named(&file.path, file.inode)
    }

    /// Opens a file by name in the process's root, if it is still the same file.
    fn open_named(&self, name: &[u8], inode: u64) -> io::Result<File> {
        check_inode(self.open_in_root(name, OFlags::RDONLY)?, inode)
    }

    /// The identified files with this content.
    pub fn by_hash(&self, hash: ContentHash) -> impl Iterator<Item = &FileRef> {
        self.identified.values().map(|identified| &identified.file).filter(move |file| file.hash == hash)
    }

    /// Opens the content of a file, as it was when it was identified. `maps` reads the process's
    /// current mappings, which is not needed if the file is still mapped where it was then.
    ///
    /// # Errors
    /// If no file has it any more.
    pub fn content(
        &self,
        file: &FileRef,
        maps: impl FnOnce() -> io::Result<Vec<Mapping>>,
    ) -> io::Result<File> {
        if let Some(found) = self.unchanged_content(file) {
            return Ok(found);
        }
        let copy = self
            .identified
            .values()
            .filter(|identified| identified.file.hash == file.hash)
            .find_map(|k| k.copy.as_ref());
        copy.map_or_else(|| self.open_like(file, &by_file(&maps()?)), File::try_clone)
    }

    /// The content of a file that was copied, or whose mapping and stamp are still the same.
    fn unchanged_content(&self, file: &FileRef) -> Option<File> {
        let known = self.identified.get(&(file.device, file.inode)).filter(|k| k.file.hash == file.hash)?;
        if let Some(copy) = &known.copy {
            return copy.try_clone().ok();
        }
        let expected = known.stamp.as_ref()?;
        let found = self.open_mapped(known.mapped_at, &file.path, file.inode).ok()?;
        found.metadata().is_ok_and(|now| stamp(&now) == *expected).then_some(found)
    }

    /// Opens a file, or another one with the same content, which neither the guest's node nor the
    /// program can distinguish. `mapped` are the process's current mappings, by file.
    ///
    /// # Errors
    /// If no file has it any more.
    pub fn open_like(&self, file: &FileRef, mapped: &HashMap<(u64, u64), &Mapping>) -> io::Result<File> {
        let one = |file: &FileRef| {
            let mapping = mapped.get(&(file.device, file.inode));
            mapping.map_or_else(|| self.open_by_name(file), |m| self.open(m))
        };
        one(file).or_else(|error| self.by_hash(file.hash).find_map(|file| one(file).ok()).ok_or(error))
    }

    /// The process has just mapped a file: drops its cached record if the file may have changed.
    pub fn file_mapped(&mut self, m: &Mapping) {
        let stamp = self.open(m).and_then(|file| Ok(stamp(&file.metadata()?))).ok();
        let identified =
            self.identified.get(&(m.device, m.inode)).and_then(|identified| identified.stamp.clone());
        if stamp.is_none() || identified != stamp {
            self.identified.remove(&(m.device, m.inode));
        }
    }

    /// Drops the records of files that may have changed since their content was read. The process is
    /// stopped now; while it ran, it may have written to a file that it maps. Pages that it has not
    /// written itself must have the content that the file has at the stop.
    pub fn forget_changed(&mut self) {
        let pid = self.pid;
        self.identified.retain(|_, identified| {
            let is_read_elsewhere = identified.file.is_object || identified.file.location.is_some();
            let (start, end) = identified.mapped_at;
            is_read_elsewhere
                || identified.stamp.as_ref().is_some_and(|stamp| {
                    current_stamp(&format!("/proc/{pid}/map_files/{start:x}-{end:x}")).as_ref() == Some(stamp)
                })
        });
    }

    /// Drops all records: the process executed another program, and may map changed files.
    pub fn forget_all(&mut self) {
        self.identified.clear();
        self.objects.clear();
    }

    /// Sets the objects that move together with the processes that share them.
    pub fn set_objects(&mut self, objects: &HashSet<ObjectId>) {
        self.objects.clone_from(objects);
        self.forget_objects();
    }

    /// Drops the records of shared memory: its size may have changed.
    pub fn forget_objects(&mut self) {
        self.identified.retain(|_, identified| !identified.file.is_object);
    }

    /// Opens the object behind a mapping of shared memory.
    ///
    /// # Errors
    /// If it cannot be opened. Without CAP_CHECKPOINT_RESTORE that works only by name.
    pub fn open_object(&self, m: &Mapping) -> io::Result<File> {
        let mut how = File::options();
        how.read(true).write(true);
        let direct = how.open(format!("/proc/{}/map_files/{:x}-{:x}", self.pid, m.start, m.end));
        let opened = direct.or_else(|refused| match refused.kind() {
            // A shim of root does not do this: it could be led to open a file that another user has
            // put there.
            io::ErrorKind::PermissionDenied if !rustix::process::geteuid().is_root() => {
                self.open_in_root(&m.name, OFlags::RDWR)
            }
            _ => Err(refused),
        });
        opened.and_then(|file| check_inode(file, m.inode))
    }

    /// Opens a path in the process's root. The kernel reported the name without symbolic links. So
    /// if there is a link in it now, it would lead to another file.
    fn open_in_root(&self, name: &[u8], how: OFlags) -> io::Result<File> {
        let root = File::open(format!("/proc/{}/root", self.pid))?;
        let how = how | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        Ok(rustix::fs::openat2(root, name, how, Mode::empty(), resolve)?.into())
    }

    /// The location of a file that need not be sent: it is stored on the guest's node, or it is
    /// large and that node can mount it.
    fn location(&mut self, m: &Mapping, file: &File, meta: &fs::Metadata) -> Option<NodeFile> {
        if meta.size() < MIN_DIRECT_BYTES || self.guest.is_none() {
            return None;
        }
        if !self.mounts.is_cached(meta.dev()) {
            let kind = rustix::fs::fstatfs(file).ok()?.f_type as u32;
            if kind != FUSE_SUPER_MAGIC {
                return self.location_at_home(m, file, meta);
            }
            if !self.mounts.find(self.pid, meta.dev()) {
                return None;
            }
        }
        let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let location = self.mounts.locate(
            self.pid,
            (&link, OsStr::from_bytes(&m.name).as_ref()),
            (meta.dev(), meta.ino()),
            |link| Some(allows_direct(&link)),
        );
        location.filter(|location| Some(location.node) == self.guest)
    }

    /// The location of a file of home, as the guest's node sees it.
    fn location_at_home(&self, m: &Mapping, file: &File, meta: &fs::Metadata) -> Option<NodeFile> {
        let ShowableFiles::Of(node) = self.showable else { return None };
        if meta.size() < MIN_SHOWN_BYTES {
            return None;
        }
        // Its path must lead to the same file from Tern's own root: not deleted, not in another
        // root or mount namespace.
        let named = fs::symlink_metadata(OsStr::from_bytes(&m.name)).ok()?;
        let path =
            m.name.strip_prefix(b"/").filter(|_| (named.dev(), named.ino()) == (meta.dev(), meta.ino()))?;
        let volume = rustix::fs::fstatvfs(file).ok()?.f_fsid;
        let credentials = fs_credentials(self.pid)?;
        let number = tern_ids::inode_number::of(node, volume, meta.ino());
        Some(NodeFile { node, path: path.to_vec(), number, credentials })
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
            // A failure to write the cache only costs time later.
            let _unwritable =
                fs::create_dir_all(self.cache_dir.join("hashes")).and_then(|()| fs::write(note, hash.0));
        }
        Ok(hash)
    }
}

/// The first mapping of each file, by device and inode.
#[must_use]
pub fn by_file(maps: &[Mapping]) -> HashMap<(u64, u64), &Mapping> {
    let mut mapped = HashMap::new();
    for m in maps.iter().filter(|m| !m.is_anonymous()) {
        mapped.entry((m.device, m.inode)).or_insert(m);
    }
    mapped
}

fn check_inode(file: File, inode: u64) -> io::Result<File> {
    if file.metadata()?.ino() == inode { Ok(file) } else { Err(io::ErrorKind::NotFound.into()) }
}

/// Copies a file into a memfd.
fn copy(file: &File) -> io::Result<File> {
    let mut copy = File::from(rustix::fs::memfd_create("tern-copy", rustix::fs::MemfdFlags::CLOEXEC)?);
    io::copy(&mut At { file, offset: 0 }.take(MAX_COPY_BYTES), &mut copy)?;
    Ok(copy)
}

/// A text that changes whenever a file's content does, except within the granularity of time
/// stamps.
fn stamp(meta: &fs::Metadata) -> String {
    let (changed, status_changed) = ((meta.mtime(), meta.mtime_nsec()), (meta.ctime(), meta.ctime_nsec()));
    stamp_of((meta.dev(), meta.ino(), meta.size()), changed, status_changed)
}

fn stamp_of((dev, ino, size): (u64, u64, u64), mtime: (i64, i64), ctime: (i64, i64)) -> String {
    format!("{dev:x}-{ino:x}-{size:x}-{:x}.{:x}-{:x}.{:x}", mtime.0, mtime.1, ctime.0, ctime.1)
}

/// The stamp of the file at this path, as far as this machine knows it: no server is asked.
fn current_stamp(path: &str) -> Option<String> {
    let stat =
        rustix::fs::statx(CWD, path, AtFlags::STATX_DONT_SYNC, rustix::fs::StatxFlags::BASIC_STATS).ok()?;
    let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    let time = |time: rustix::fs::StatxTimestamp| (time.tv_sec, i64::from(time.tv_nsec));
    Some(stamp_of((device, stat.stx_ino, stat.stx_size), time(stat.stx_mtime), time(stat.stx_ctime)))
}

/// The hash of a file that `node` stores and that is not read: a hash of the node's number and the
/// file's stamp. Without a stamp the hash is unique to each call.
fn version_hash(node: NodeId, stamp: Option<&str>) -> ContentHash {
    let mut hasher = blake3::Hasher::new_derive_key("tern 2026-11-26 a version of a file");
    let once = || format!("{:?}", std::time::Instant::now());
    hasher.update(&node.0.to_le_bytes()).update(stamp.map_or_else(once, str::to_owned).as_bytes());
    ContentHash(*hasher.finalize().as_bytes())
}

/// The device number of /dev/zero: 1, 5.
const DEV_ZERO: u64 = 1 << 8 | 5;

impl FileIdentifier for HomeFiles {
    /// The check that all processes that share it move together is made when they are stopped.
    fn moves_with_sharers(&self, m: &Mapping) -> bool {
        writes_are_visible_to_others(m) || m.shared && self.objects.contains(&object::id(m))
    }

    fn identify(&mut self, m: &Mapping) -> Result<Option<FileRef>, Unmovable> {
        let is_object = self.moves_with_sharers(m);
        if let Some(identified) = self.identified.get(&(m.device, m.inode))
            && (identified.file.is_object || !is_object)
        {
            return Ok(Some(identified.file.clone()));
        }
        let unreadable =
            |_e: io::Error| Unmovable::UnreadableFile(String::from_utf8_lossy(&m.name).into_owned());
        let file = if is_object { self.open_object(m) } else { self.open(m) }.map_err(unreadable)?;
        let meta = file.metadata().map_err(unreadable)?;
        let mapped_at = (m.start, m.end);
        if is_object {
            let (path, hash) = (m.name.clone(), ContentHash([0; 32]));
            let (device, inode) = object::id(m);
            let file = FileRef {
                device,
                inode,
                path,
                size: meta.size(),
                hash,
                shareable: false,
                is_object,
                location: None,
            };
            let identified = IdentifiedFile { file: file.clone(), mapped_at, stamp: None, copy: None };
            self.identified.insert((device, inode), identified);
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
        let settled = now.cast_signed() - meta.mtime().max(meta.ctime()) > SETTLED_SECONDS;
        let stamped = settled.then(|| stamp(&meta));
        if let Some(location) = self.location(m, &file, &meta) {
            let (path, hash) = (m.name.clone(), version_hash(location.node, stamped.as_deref()));
            let (device, inode, location) = (m.device, m.inode, Some(Box::new(location)));
            let file = FileRef {
                device,
                inode,
                path,
                size: meta.size(),
                hash,
                shareable: false,
                is_object,
                location,
            };
            let identified = IdentifiedFile { file: file.clone(), mapped_at, stamp: stamped, copy: None };
            self.identified.insert((device, inode), identified);
            return Ok(Some(file));
        }
        let copied = !settled && meta.size() <= MAX_COPY_BYTES;
        let copy = if copied { Some(copy(&file).map_err(unreadable)?) } else { None };
        let size = copy.as_ref().map_or(Ok(meta.size()), |copy| copy.metadata().map(|m| m.size()));
        let size = size.map_err(unreadable)?;
        let hash = self.hash(copy.as_ref().unwrap_or(&file), &meta, settled).map_err(unreadable)?;
        let shareable = settled && meta.permissions().mode() & 0o004 != 0;
        let path = m.name.clone();
        let file = FileRef {
            device: m.device,
            inode: m.inode,
            path,
            size,
            hash,
            shareable,
            is_object,
            location: None,
        };
        let identified = IdentifiedFile { file: file.clone(), mapped_at, stamp: stamped, copy };
        self.identified.insert((m.device, m.inode), identified);
        Ok(Some(file))
    }
}

/// Reads a piece of a file for sending. A file with a location (`may_shrink`) may have become
/// shorter where it is stored: pages behind its end are then sent as zeroes.
///
/// # Errors
/// Those of the file; `InvalidData` if a file without a location has become shorter.
pub fn read_piece(
    file: &File,
    offset: u64,
    max_len: usize,
    (size, may_shrink): (u64, bool),
) -> io::Result<Vec<u8>> {
    let want = usize::try_from(size - offset).unwrap_or(usize::MAX).min(max_len);
    let mut piece = Vec::with_capacity(want);
    let mut reader = At { file, offset };
    (&mut reader).take(want as u64).read_to_end(&mut piece)?;
    if piece.len() < want && may_shrink {
        piece.resize(want, 0);
    }
    if piece.len() < want {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a mapped file was truncated"));
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
