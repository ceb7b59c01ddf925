//! Opening and identifying the mapped files of a process at home. The files' file systems may delay
//! any of this, so it is done by a worker, unless said otherwise.

use super::untraced::{Descriptors, FileContent, open_unleased, would_break_lease};
use super::{
    At, MAX_COPY_BYTES, MIN_DIRECT_BYTES, MIN_REMOTE_MAP_BYTES, MountableFiles, PIECE_BYTES, SETTLED_SECONDS,
    unreadable,
};
use crate::layout::FileRef;
use crate::node_file::{FUSE_SUPER_MAGIC, MfsMounts, NodeFile, allows_direct, fs_credentials};
use crate::process::Unmovable;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, open, openat2};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tern_ids::{ContentHash, NodeId};
use tern_tracee::procfs::Mapping;

/// An identified file.
#[derive(Debug)]
pub(super) struct IdentifiedFile {
    pub(super) file: FileRef,
    /// A mapping of it.
    pub(super) mapping: Mapping,
    /// A descriptor of it in the process, if there was one.
    pub(super) descriptor: Option<i32>,
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

    /// Opens the file behind a mapping, even if it has been deleted. Others notice that
    /// ([`super::untraced`]).
    pub(super) fn open(&self, m: &Mapping) -> io::Result<File> {
        let direct = open_unleased(&self.map_file((m.start, m.end)), OFlags::RDONLY);
        direct.or_else(|refused| match refused.kind() {
            // Without the privilege for map_files, open it by name.
            io::ErrorKind::PermissionDenied => self.open_named(&m.name, m.inode, OFlags::RDONLY),
            _ => Err(refused),
        })
    }

    /// Opens a file by name in the process's root, if it is still the same file.
    pub(super) fn open_named(&self, name: &[u8], inode: u64, how: OFlags) -> io::Result<File> {
        let found = self.look_up(name, inode)?;
        open_unleased(&format!("/proc/self/fd/{}", found.as_raw_fd()), how)
    }

    /// Finds a file by name in the process's root, if it is still the same file (`O_PATH`). The
    /// kernel reported the name without symbolic links. So a symbolic link in the name now would
    /// lead to another file.
    pub(super) fn look_up(&self, name: &[u8], inode: u64) -> io::Result<File> {
        let how = OFlags::PATH | OFlags::CLOEXEC;
        let root = open(format!("/proc/{}/root", self.pid), how, Mode::empty())?;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        check_inode(openat2(root, name, how, Mode::empty(), resolve)?.into(), inode)
    }

    /// Opens the object behind a mapping of shared memory.
    /// Without CAP_CHECKPOINT_RESTORE it can be opened only by name.
    pub(super) fn open_object(&self, m: &Mapping) -> io::Result<File> {
        let direct = open_unleased(&self.map_file((m.start, m.end)), OFlags::RDWR);
        let opened = direct.or_else(|refused| match refused.kind() {
            // A shim that runs as root does not open by name: another user could have put a file of
            // that name there.
            io::ErrorKind::PermissionDenied if !rustix::process::geteuid().is_root() => {
                self.open_named(&m.name, m.inode, OFlags::RDWR)
            }
            _ => Err(refused),
        });
        opened.and_then(|file| check_inode(file, m.inode))
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
        // The guest's node would open the file through home's file server.
        if meta.size() < MIN_REMOTE_MAP_BYTES || would_break_lease(meta, OFlags::RDONLY) {
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

    /// The file in which the hash of a file's content is kept.
    fn hash_note(&self, meta: &fs::Metadata) -> PathBuf {
        self.cache_dir.join("hashes").join(stamp(meta))
    }

    /// The hash of content that was computed before.
    fn known_hash(&self, meta: &fs::Metadata) -> Option<ContentHash> {
        fs::read(self.hash_note(meta)).ok()?.try_into().ok().map(ContentHash)
    }

    /// Computes the hash of a file's content, and keeps it for other processes if `is_kept`.
    fn hash(&self, file: &FileContent, meta: &fs::Metadata, is_kept: bool) -> io::Result<ContentHash> {
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; PIECE_BYTES];
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
        if is_kept {
            // A failure to write the cache only costs time later.
            let _unwritable = fs::create_dir_all(self.cache_dir.join("hashes"))
                .and_then(|()| fs::write(self.hash_note(meta), hash.0));
        }
        Ok(hash)
    }

    /// Identifies the file of a mapping. `is_object` is whether the mapping is shared memory, and
    /// `descriptors` returns those of the process. Returns `None` for a private mapping of
    /// /dev/zero.
    pub(super) fn identify<'a>(
        &self,
        m: &Mapping,
        is_object: bool,
        descriptors: impl FnOnce() -> &'a Descriptors,
    ) -> Result<Option<IdentifiedFile>, Unmovable> {
        let unreadable = |_e: io::Error| unreadable(&m.name);
        let found = self.look(m).map_err(unreadable)?;
        let meta = found.metadata().map_err(unreadable)?;
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
        let identified = |file, stamp, descriptor, copy| {
            Ok(Some(IdentifiedFile { file, mapping: m.clone(), descriptor, stamp, copy }))
        };
        if is_object {
            return identified(reference(meta.size(), ContentHash([0; 32]), false, None), None, None, None);
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
        if let Some(location) = self.location(m, &found, &meta) {
            let hash = version_hash(location.node, stamped.as_deref());
            return identified(
                reference(meta.size(), hash, false, Some(Box::new(location))),
                stamped,
                None,
                None,
            );
        }
        let descriptor = descriptors().get(&meta);
        let shareable = settled && meta.permissions().mode() & 0o004 != 0;
        if settled && let Some(hash) = self.known_hash(&meta) {
            return identified(reference(meta.size(), hash, shareable, None), stamped, descriptor, None);
        }
        let content = self.content(m, &found, descriptor).map_err(unreadable)?;
        let is_proven = !matches!(content, FileContent::ShownByProcess(_));
        let shareable = shareable && is_proven;
        if settled || meta.size() > MAX_COPY_BYTES {
            let hash = self.hash(&content, &meta, settled && is_proven).map_err(unreadable)?;
            return identified(reference(meta.size(), hash, shareable, None), stamped, descriptor, None);
        }
        let copy = copy(&content).map_err(unreadable)?;
        let size = copy.metadata().map_err(unreadable)?.size();
        let content = copy.try_clone().map_err(unreadable)?.into();
        let hash = self.hash(&content, &meta, false).map_err(unreadable)?;
        identified(reference(size, hash, shareable, None), stamped, descriptor, Some(copy))
    }
}

pub(super) fn check_inode(file: File, inode: u64) -> io::Result<File> {
    if file.metadata()?.ino() == inode { Ok(file) } else { Err(io::ErrorKind::NotFound.into()) }
}

/// Copies a file into a memfd.
fn copy(content: &FileContent) -> io::Result<File> {
    let mut copy = File::from(rustix::fs::memfd_create("tern-copy", rustix::fs::MemfdFlags::CLOEXEC)?);
    io::copy(&mut At { content, offset: 0 }.take(MAX_COPY_BYTES), &mut copy)?;
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
