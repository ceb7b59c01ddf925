//! Scans directories, and the path to them, as a process would traverse it. Runs in a thread of its
//! own, since a disk may be slow, and a shim that blocks would be taken for dead.
//!
//! Each directory on the path is first watched (inotify(7)) and then traversed. So every change
//! after the scan is reported.

use super::access::{DirHandle, LIST, LookupCredentials, SEARCH};
use super::watcher::DirWatch;
use crate::files::attributes::file_attributes;
use rustix::fs::inotify::{self, WatchFlags};
use rustix::fs::{Mode, OFlags, RawDir, ResolveFlags, ioctl_getflags, openat2, readlinkat};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tern_ids::HomePid;
use tern_image::node_file::{ZFS, is_local, parse_mount};
use tern_migrate::names::EntryKind;
use tern_migrate::prefetch::FileAttributes;
use tern_syscall::ByteBuf;

/// Inode flags of directories that are not cached: case-insensitive names, or names that need an
/// encryption key (linux/fs.h).
const UNSUPPORTED_INODE_FLAGS: u32 = 0x4000_0000 | 0x800;

/// Upper bound on steps of a path, links included.
const MAX_PATH_STEPS: usize = 64;
/// Upper bound on watches of a shim; the user's limit is shared with other programs.
const MAX_WATCHES: usize = 4096;
/// Longest link target that is cached, in bytes.
const MAX_LINK_TARGET: usize = 255;
/// Status is cached only if the last change is longer ago than this, in seconds.
const MIN_CHANGE_AGE: u64 = 1;

/// Events that may replace a directory on a path.
const PATH_EVENTS: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::MASK_ADD);
/// Events that change a listing. A read of a file changes its access time.
const LISTING_EVENTS: WatchFlags = PATH_EVENTS.union(WatchFlags::MODIFY).union(WatchFlags::ACCESS);

/// A request to scan a directory.
#[derive(Debug)]
pub(crate) struct ScanRequest {
    pub(crate) pid: HomePid,
    /// Relative paths start at the working directory of this thread.
    pub(crate) tid: HomePid,
    pub(crate) directory: Vec<u8>,
    /// Upper bound on names.
    pub(crate) max_names: usize,
    /// The generation of the process's names at the time of the request.
    pub(crate) generation: u64,
    /// The number of the last change handled before the request.
    pub(crate) changes: u64,
}

#[derive(Debug)]
pub(super) enum WatchCmd {
    Scan(ScanRequest),
    Release(Vec<i32>),
}

/// The outcome of a scan.
#[derive(Debug)]
pub(crate) struct ScanReply {
    pub(crate) request: ScanRequest,
    pub(crate) listing: Result<DirListing, ScanError>,
}

/// Why a directory is not cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScanError {
    /// A later scan may succeed.
    Retry,
    /// The directory is not scanned again.
    Never,
}

impl From<io::Error> for ScanError {
    fn from(_: io::Error) -> Self {
        Self::Retry
    }
}

impl From<Errno> for ScanError {
    fn from(_: Errno) -> Self {
        Self::Retry
    }
}

/// The result of a scan.
#[derive(Debug)]
pub(crate) struct DirListing {
    pub(crate) attributes: Box<FileAttributes>,
    /// The last component of the path is not a symbolic link.
    pub(crate) is_direct: bool,
    pub(crate) entries: Vec<(ByteBuf, EntryKind)>,
    pub(crate) at: Instant,
    pub(crate) watched: DirWatch,
}

pub(super) struct DirectoryScanner {
    pub(super) events: Arc<OwnedFd>,
    /// Number of users of each watch: the kernel has one watch for each directory.
    pub(super) uses: HashMap<i32, u32>,
    pub(super) release: Sender<WatchCmd>,
}

/// The mounts of which this kernel sees all changes, and which match names exactly. They are
/// identified by the mount table, since a statfs may wait for a server.
fn local_mounts() -> io::Result<HashSet<u64>> {
    let table = tern_control::procfs::read_text("/proc/self/mountinfo")?;
    let local =
        table.lines().filter_map(parse_mount).filter(|(_, fstype)| is_local(fstype) && *fstype != ZFS);
    Ok(local.map(|(mount, _)| mount).collect())
}

/// The state of one scan.
struct Scan<'a> {
    request: &'a ScanRequest,
    credentials: LookupCredentials,
    local: HashSet<u64>,
    watched: DirWatch,
}

impl DirectoryScanner {
    pub(super) fn release(&mut self, watches: &[i32]) {
        for watch in watches {
            let Some(uses) = self.uses.get_mut(watch) else { continue };
            *uses -= 1;
            if *uses == 0 {
                self.uses.remove(watch);
                // If its directory is gone, so is the watch.
                let _gone = inotify::remove_watch(&*self.events, *watch);
            }
        }
    }

    /// Watches a directory, if the process may look up names there and all its changes are
    /// reported.
    fn watch(
        &mut self,
        directory: &DirHandle,
        rights: u16,
        scan: &Scan<'_>,
    ) -> Result<(i32, OwnedFd), ScanError> {
        if !scan.local.contains(&directory.status.stx_mnt_id) || !scan.credentials.permits(directory, rights)
        {
            return Err(ScanError::Never);
        }
        if self.uses.len() >= MAX_WATCHES {
            return Err(ScanError::Retry);
        }
        let read = directory.read()?;
        if ioctl_getflags(&read).is_ok_and(|flags| flags.bits() & UNSUPPORTED_INODE_FLAGS != 0) {
            return Err(ScanError::Never);
        }
        let path = format!("/proc/self/fd/{}", read.as_raw_fd());
        let what = if rights == LIST { LISTING_EVENTS } else { PATH_EVENTS };
        let watch = inotify::add_watch(&*self.events, path, what)?;
        *self.uses.entry(watch).or_default() += 1;
        Ok((watch, read))
    }

    pub(super) fn scan(&mut self, request: &ScanRequest) -> Result<DirListing, ScanError> {
        let is_relative = request.directory.first() != Some(&b'/');
        if is_relative && tern_image::sharing::shares_fs(request.pid.0) {
            return Err(ScanError::Never);
        }
        let credentials = LookupCredentials::of(request.pid.0, request.tid.0)?;
        let watched = DirWatch { dir: -1, path: Vec::new(), release: self.release.clone() };
        let mut scan = Scan { request, credentials, local: local_mounts()?, watched };
        let (at, direct) = self.walk(&mut scan)?;
        let (dir, read) = self.watch(&at, LIST, &scan)?;
        scan.watched.dir = dir;
        let seen_at = Instant::now();
        let names = list_names(&read, request.max_names)?;
        let attributes = file_attributes(&at.fd).map(Box::new).ok_or(ScanError::Retry)?;
        Ok(DirListing { attributes, is_direct: direct, entries: names, at: seen_at, watched: scan.watched })
    }

    /// Traverses the path to a directory. Also returns whether its last step is not a link.
    fn walk(&mut self, scan: &mut Scan<'_>) -> Result<(DirHandle, bool), ScanError> {
        let ScanRequest { pid, tid, directory, .. } = scan.request;
        let root = DirHandle::open("/")?;
        let mut at = match directory.first() {
            Some(b'/') => DirHandle::open("/")?,
            _ => DirHandle::open(&format!("/proc/{pid}/task/{tid}/cwd"))?,
        };
        let steps = |path: &[u8]| -> Vec<Vec<u8>> {
            let parts = path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."));
            parts.map(<[u8]>::to_vec).collect()
        };
        let mut rest = VecDeque::from(steps(directory));
        let mut direct = true;
        while let Some(step) = rest.pop_front() {
            let (watch, _) = self.watch(&at, SEARCH, scan)?;
            scan.watched.path.push((watch, step.clone()));
            if scan.watched.path.len() > MAX_PATH_STEPS {
                return Err(ScanError::Never);
            }
            if step == b".." && at.is_same_as(&root) {
                continue;
            }
            let next = at.lookup(&step)?;
            if !next.is_link() {
                at = next;
                continue;
            }
            direct &= !rest.is_empty();
            let to = readlinkat(&next.fd, "", Vec::new())?;
            if to.to_bytes().starts_with(b"/") {
                at = DirHandle::open("/")?;
            }
            steps(to.to_bytes()).into_iter().rev().for_each(|step| rest.push_front(step));
        }
        Ok((at, direct))
    }
}

/// The names in a directory, if there are no more than `max_names`.
fn list_names(read: &OwnedFd, max_names: usize) -> Result<Vec<(ByteBuf, EntryKind)>, ScanError> {
    let mut buffer = [MaybeUninit::<u8>::uninit(); 16 << 10];
    let (mut entries, mut found) = (RawDir::new(read, &mut buffer), Vec::new());
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if found.len() == max_names {
            return Err(ScanError::Retry);
        }
        found.push(name.to_owned());
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut names = Vec::with_capacity(found.len());
    for name in found {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let named = match openat2(read, &*name, flags, Mode::empty(), ResolveFlags::NO_XDEV) {
            Ok(file) => describe_name(&file, now)?,
            // Gone by now, or a mount point.
            Err(Errno::NOENT | Errno::XDEV) => EntryKind::Unknown,
            Err(error) => return Err(error.into()),
        };
        names.push((ByteBuf::from(name.into_bytes()), named));
    }
    Ok(names)
}

/// The object that a name refers to. The status of a file with several names is not cached, since
/// it can change through a name in another directory. The status of a recently changed file is not
/// cached either, since a call that is still running may be writing the file.
fn describe_name(file: &OwnedFd, now: Duration) -> Result<EntryKind, ScanError> {
    let attributes = file_attributes(file).ok_or(ScanError::Retry)?;
    let [_, _, changed, modified] = attributes.times.map(|(seconds, _)| u64::try_from(seconds).unwrap_or(0));
    let is_settled = changed.max(modified) + MIN_CHANGE_AGE < now.as_secs();
    Ok(match u32::from(attributes.mode) & libc::S_IFMT {
        libc::S_IFLNK => match readlinkat(file, "", Vec::new())?.into_bytes() {
            to if to.len() <= MAX_LINK_TARGET => EntryKind::Link(ByteBuf::from(to)),
            _ => EntryKind::Unknown,
        },
        libc::S_IFREG if attributes.nlink == 1 && is_settled => EntryKind::File(Box::new(attributes)),
        _ => EntryKind::Other,
    })
}
