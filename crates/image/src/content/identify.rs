//! Opening and identifying the mapped files of a process at home. The files' file systems may delay
//! any of this, so it is done by a worker, unless said otherwise.

use super::leases::Leases;
use super::{
    At, MAX_COPY_BYTES, MIN_DIRECT_BYTES, MIN_REMOTE_MAP_BYTES, MountableFiles, SETTLED_SECONDS, unreadable,
};
use crate::layout::FileRef;
use crate::node_file::{FUSE_SUPER_MAGIC, MfsMounts, NodeFile, allows_direct, fs_credentials};
use crate::object::ObjectId;
use crate::unmovable::Unmovable;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tern_ids::{ContentHash, NodeId};
use tern_tracee::procfs::Mapping;

/// An identified file.
#[derive(Debug)]
pub(super) struct IdentifiedFile {
    pub(super) file: FileRef,
    /// The address range of a mapping of it.
    pub(super) mapped_at: (u64, u64),
    /// Shows whether the file has changed. `None` if it was written too recently to tell.
    pub(super) stamp: Option<String>,
    /// A copy of a file that may still be written.
    pub(super) copy: Option<File>,
}

/// Opens and identifies the mapped files of one process.
#[derive(Debug, Clone, Default)]
pub(super) struct Identifier {
    /// The process, or one of its threads.
    pub(super) pid: i32,
    /// The directory of computed hashes.
    pub(super) cache_dir: PathBuf,
    /// The node where its guest is, or will be.
    pub(super) guest: Option<NodeId>,
    pub(super) showable: MountableFiles,
    /// Used by workers only.
    mounts: Arc<Mutex<MfsMounts>>,
}

impl Identifier {
    /// For this process.
    pub(super) fn new(pid: i32, cache_dir: &Path) -> Self {
        Self { pid, cache_dir: cache_dir.to_owned(), ..Self::default() }
    }

    /// The link to the file that is mapped at these addresses.
    pub(super) fn map_file(&self, (start, end): (u64, u64)) -> String {
        format!("/proc/{}/map_files/{start:x}-{end:x}", self.pid)
    }

    /// Opens the file behind a mapping, even if it has been deleted.
    pub(super) fn open(&self, m: &Mapping, leases: &Leases) -> io::Result<File> {
        self.open_mapped((m.start, m.end), &m.name, (m.device, m.inode), leases)
    }

    /// # Errors
    /// `ResourceBusy` if the open would break a lease, and wait for its holder.
    pub(super) fn open_mapped(
        &self,
        at: (u64, u64),
        name: &[u8],
        file: ObjectId,
        leases: &Leases,
    ) -> io::Result<File> {
        leases.check(file)?;
        let direct = File::open(self.map_file(at));
        direct.or_else(|refused| match refused.kind() {
            // Without the privilege for map_files, open it by name.
            io::ErrorKind::PermissionDenied => self.open_named(name, file.1),
            _ => Err(refused),
        })
    }

    /// Opens a file by name in the process's root, if it is still the same file.
    pub(super) fn open_named(&self, name: &[u8], inode: u64) -> io::Result<File> {
        check_inode(self.open_in_root(name, OFlags::RDONLY)?, inode)
    }

    /// Opens the object behind a mapping of shared memory.
    /// Without CAP_CHECKPOINT_RESTORE it can be opened only by name.
    ///
    /// # Errors
    /// `ResourceBusy` if the open would break a lease, and wait for its holder.
    pub(super) fn open_object(&self, m: &Mapping, leases: &Leases) -> io::Result<File> {
        leases.check((m.device, m.inode))?;
        let mut how = File::options();
        how.read(true).write(true);
        let direct = how.open(self.map_file((m.start, m.end)));
        let opened = direct.or_else(|refused| match refused.kind() {
            // A shim that runs as root does not open by name: another user could have put a file of
            // that name there.
            io::ErrorKind::PermissionDenied if !rustix::process::geteuid().is_root() => {
                self.open_in_root(&m.name, OFlags::RDWR)
            }
            _ => Err(refused),
        });
        opened.and_then(|file| check_inode(file, m.inode))
    }

    /// Opens a path in the process's root. The kernel reported the name without symbolic links. So
    /// a symbolic link in the name now would lead to another file.
    fn open_in_root(&self, name: &[u8], how: OFlags) -> io::Result<File> {
        let root = File::open(format!("/proc/{}/root", self.pid))?;
        let how = how | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        Ok(rustix::fs::openat2(root, name, how, Mode::empty(), resolve)?.into())
    }

    /// The location of a file that need not be sent: it is stored on the guest's node, or it is
    /// large and that node can mount it.
    fn location(&self, m: &Mapping, file: &File, meta: &fs::Metadata) -> Option<NodeFile> {
        if meta.size() < MIN_DIRECT_BYTES || self.guest.is_none() {
            return None;
        }
        let mut mounts = self.mounts.lock().unwrap_or_else(PoisonError::into_inner);
        if !mounts.is_cached(meta.dev()) {
            let kind = rustix::fs::fstatfs(file).ok()?.f_type as u32;
            if kind != FUSE_SUPER_MAGIC {
                return self.location_at_home(m, file, meta);
            }
            if !mounts.find(self.pid, meta.dev()) {
                return None;
            }
        }
        let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let location = mounts.locate(
            self.pid,
            (&link, OsStr::from_bytes(&m.name).as_ref()),
            (meta.dev(), meta.ino()),
            |link| Some(allows_direct(&link)),
        );
        location.filter(|location| Some(location.node) == self.guest)
    }

    /// The location of a file of home, as the guest's node sees it.
    fn location_at_home(&self, m: &Mapping, file: &File, meta: &fs::Metadata) -> Option<NodeFile> {
        let MountableFiles::Of(node) = self.showable else { return None };
        if meta.size() < MIN_REMOTE_MAP_BYTES {
            return None;
        }
        // Its path must lead to the same file from Tern's own root. It does not if the file was
        // deleted, or if the process has another root or mount namespace.
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

    /// Identifies the file of a mapping. `is_object` is whether the mapping is shared memory.
    /// Returns `None` for a private mapping of /dev/zero.
    pub(super) fn identify(
        &self,
        m: &Mapping,
        is_object: bool,
        leases: &Leases,
    ) -> Result<Option<IdentifiedFile>, Unmovable> {
        let file = if is_object { self.open_object(m, leases) } else { self.open(m, leases) };
        let unreadable = |error: io::Error| match error.kind() {
            io::ErrorKind::ResourceBusy => Unmovable::Leased(String::from_utf8_lossy(&m.name).into_owned()),
            _ => unreadable(&m.name),
        };
        let file = file.map_err(unreadable)?;
        let meta = file.metadata().map_err(unreadable)?;
        let mapped_at = (m.start, m.end);
        let reference = |size, hash, shareable, location| FileRef {
            device: m.device,
            inode: m.inode,
            path: m.name.clone(),
            size,
            hash,
            shareable,
            is_object,
            location,
        };
        if is_object {
            let file = reference(meta.size(), ContentHash([0; 32]), false, None);
            return Ok(Some(IdentifiedFile { file, mapped_at, stamp: None, copy: None }));
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
            let hash = version_hash(location.node, stamped.as_deref());
            let file = reference(meta.size(), hash, false, Some(Box::new(location)));
            return Ok(Some(IdentifiedFile { file, mapped_at, stamp: stamped, copy: None }));
        }
        let copied = !settled && meta.size() <= MAX_COPY_BYTES;
        let copy = if copied { Some(copy(&file).map_err(unreadable)?) } else { None };
        let size = copy.as_ref().map_or(Ok(meta.size()), |copy| copy.metadata().map(|m| m.size()));
        let size = size.map_err(unreadable)?;
        let hash = self.hash(copy.as_ref().unwrap_or(&file), &meta, settled).map_err(unreadable)?;
        let shareable = settled && meta.permissions().mode() & 0o004 != 0;
        let file = reference(size, hash, shareable, None);
        Ok(Some(IdentifiedFile { file, mapped_at, stamp: stamped, copy }))
    }
}

pub(super) fn check_inode(file: File, inode: u64) -> io::Result<File> {
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
pub(super) fn stamp(meta: &fs::Metadata) -> String {
    let (changed, status_changed) = ((meta.mtime(), meta.mtime_nsec()), (meta.ctime(), meta.ctime_nsec()));
    stamp_of((meta.dev(), meta.ino(), meta.size()), changed, status_changed)
}

fn stamp_of((dev, ino, size): (u64, u64, u64), mtime: (i64, i64), ctime: (i64, i64)) -> String {
    format!("{dev:x}-{ino:x}-{size:x}-{:x}.{:x}-{:x}.{:x}", mtime.0, mtime.1, ctime.0, ctime.1)
}

/// The stamp of the file at this path, as far as this machine knows it: no server is asked,
/// and the caller does not wait.
pub(super) fn current_stamp(path: &str) -> Option<String> {
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
