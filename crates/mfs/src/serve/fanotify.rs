//! Watches leased files with fanotify(7): when a program of this node changes one, its leases are
//! recalled at once. Without this, other nodes would see the change only when the term has ended.
//!
//! ```text
//!  lease ─▶ mark on the inode ─▶ kernel ─event─▶ thread ─▶ recall ─▶ callback channels
//! ```
//! Only leased files are marked, so access to other files costs nothing extra: a mark on a whole
//! file system delays each write of the machine by 0.6 to 2 µs, whereas a mark on an inode delays
//! only writes to that inode. No program waits for the server. Events are read at most once a
//! millisecond: meanwhile the kernel merges equal ones, so that a program that writes in a loop
//! causes few.
//!
//! Marks belong to a [`Group`], which is closed, with all its marks, when every lease granted while
//! it was current has ended. By then there is a newer group, in which files with renewable leases
//! have been marked again. So the server need not find a file again to remove its mark, and a file
//! that is not accessed from elsewhere any more costs nothing after twice [`GROUP_LIFETIME`].
//!
//! A file that a guest of this node writes has no mark ([`ChangeWatcher::unwatch`]): no session
//! gets a lease of it meanwhile, and the next lease marks it again.

mod event;
mod handle;

use super::leases::{LeaseTable, TERM};
use crate::lock;
use crate::message::FileKey;
use event::Event;
use handle::Handle;
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// How long new marks are added to a group; the group is closed after twice this time. Longer than
/// a lease's term.
const GROUP_LIFETIME: Duration = Duration::from_secs(30);

/// Maximum number of marks per group, since each pins an inode in memory. Further files are not
/// watched.
const MAX_MARKS: usize = 16_384;

/// Minimum interval between reads, so that the kernel can merge events.
const READ_INTERVAL: Duration = Duration::from_millis(1);

/// Size in bytes of the read buffer.
const READ_SIZE: usize = 16 << 10;

/// Maximum number of queued events before the kernel reports an overflow (default of
/// `fanotify/max_queued_events`).
const MAX_QUEUED_EVENTS: usize = 16_384;

/// Events of a file.
const FILE_EVENTS: MaskFlags = MaskFlags::FAN_MODIFY
    .union(MaskFlags::FAN_ATTRIB)
    // A store into a mapping causes no other event.
    .union(MaskFlags::FAN_CLOSE_WRITE)
    .union(MaskFlags::FAN_DELETE_SELF)
    .union(MaskFlags::FAN_MOVE_SELF);

/// Events of a directory and of its entries.
const DIRECTORY_EVENTS: MaskFlags = MaskFlags::FAN_ATTRIB
    .union(MaskFlags::FAN_DELETE_SELF)
    .union(MaskFlags::FAN_MOVE_SELF)
    .union(MaskFlags::FAN_CREATE)
    .union(MaskFlags::FAN_DELETE)
    .union(MaskFlags::FAN_MOVED_FROM)
    .union(MaskFlags::FAN_MOVED_TO)
    .union(MaskFlags::FAN_ONDIR);

/// Marks that are removed together.
#[derive(Debug)]
struct Group {
    fanotify: Arc<Fanotify>,
    created: Instant,
    /// Handle of each marked file: a mark is removed with its file, and the inode number may then
    /// be reused.
    handles: HashMap<FileKey, Handle>,
    /// File of each handle, as the kernel's events report it.
    keys: HashMap<Handle, FileKey>,
    /// File systems that do not support such marks.
    unsupported: HashSet<u64>,
}

#[derive(Debug)]
struct Groups {
    current: Group,
    /// Its marks are needed until the leases have ended that were granted while it was current.
    previous: Option<Group>,
    /// By file system: whether only this node can change it.
    is_local: HashMap<u64, bool>,
}

/// The watched files of this node.
#[derive(Debug)]
pub(crate) struct ChangeWatcher {
    groups: Mutex<Groups>,
    /// Read buffer. Its lock is held until the leases are recalled: the next reader must not find
    /// the queue empty before that.
    buffer: Mutex<Vec<u8>>,
}

impl Group {
    fn new() -> io::Result<Self> {
        // With this flag, which `nix` does not define, events identify the file instead of opening
        // it.
        let fid = InitFlags::from_bits_retain(libc::FAN_REPORT_FID);
        let flags = InitFlags::FAN_CLASS_NOTIF
            | InitFlags::FAN_CLOEXEC
            | InitFlags::FAN_NONBLOCK
            | InitFlags::FAN_UNLIMITED_MARKS
            | fid;
        Ok(Self {
            fanotify: Arc::new(Fanotify::init(flags, EventFFlags::O_RDONLY)?),
            created: Instant::now(),
            handles: HashMap::new(),
            keys: HashMap::new(),
            unsupported: HashSet::new(),
        })
    }

    /// Marks a file. False if the group is full.
    fn mark(&mut self, fd: impl AsFd, key: FileKey, kind: FileType) -> io::Result<bool> {
        let handle = Handle::of(&fd, key.volume)?;
        if self.handles.get(&key) == Some(&handle) {
            return Ok(true);
        }
        if self.handles.len() >= MAX_MARKS {
            return Ok(false);
        }
        let mask = if kind == FileType::Directory { DIRECTORY_EVENTS } else { FILE_EVENTS };
        // A file held by an `O_PATH` descriptor can be marked only by path.
        let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
        self.fanotify.mark(MarkFlags::FAN_MARK_ADD, mask, rustix::fs::CWD, Some(path.as_str()))?;
        self.keys.insert(handle.clone(), key);
        self.handles.insert(key, handle);
        Ok(true)
    }

    fn unmark(&mut self, path: &str, key: FileKey) {
        if self.handles.remove(&key).is_some() {
            // The kernel may have removed the mark with the file.
            let _gone =
                self.fanotify.mark(MarkFlags::FAN_MARK_REMOVE, FILE_EVENTS, rustix::fs::CWD, Some(path));
        }
    }
}

impl ChangeWatcher {
    fn new(groups: Groups) -> Self {
        Self { groups: Mutex::new(groups), buffer: Mutex::new(vec![0; READ_SIZE]) }
    }

    /// Watches a file for at least a term, and recalls its leases when a program of this node
    /// changes it. Must be called before the file's attributes are read.
    ///
    /// Returns true if the file is watched and only programs of this node can change it. It is no
    /// error if the file cannot be marked: its leases then end with their term. For example, the
    /// thread has the caller's identity, and the caller may not read the file.
    pub(crate) fn watch(&self, fd: impl AsFd, key: FileKey, kind: FileType) -> bool {
        let Groups { current: group, is_local: local, .. } = &mut *lock(&self.groups);
        let is_local = *local.entry(key.volume).or_insert_with(|| is_local(&fd));
        if group.unsupported.contains(&key.volume) {
            return false;
        }
        let error = match group.mark(fd, key, kind) {
            Ok(marked) => return marked && is_local,
            Err(error) => error,
        };
        let permanent = [libc::EOPNOTSUPP, libc::ENODEV, libc::EXDEV, libc::EINVAL, libc::EOVERFLOW];
        if error.raw_os_error().is_some_and(|errno| permanent.contains(&errno)) {
            tracing::info!(%error, volume = key.volume, "a file system does not support fanotify marks");
            group.unsupported.insert(key.volume);
        }
        false
    }

    /// Stops watching a regular file until [`watch`](Self::watch) is called again: while no session
    /// can have a lease of it, there is nothing to recall, and each write would cost its program
    /// twice as much.
    pub(crate) fn unwatch(&self, fd: impl AsFd, key: FileKey) {
        let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
        let mut groups = lock(&self.groups);
        let Groups { current, previous, .. } = &mut *groups;
        previous.iter_mut().chain([current]).for_each(|group| group.unmark(&path, key));
    }

    /// Reads all queued events and recalls the leases that they concern. First waits for a thread
    /// that is already processing events.
    pub(crate) fn drain_events(&self, leases: &LeaseTable) {
        let mut buffer = lock(&self.buffer);
        for source in self.sources() {
            // The limit covers all events that the kernel queues.
            for _ in 0..MAX_QUEUED_EVENTS.div_ceil(READ_SIZE / 64) {
                if !self.read(&source, &mut buffer, leases) {
                    break;
                }
            }
        }
    }

    /// Reads events once, and recalls the leases that they concern. Returns whether there were any.
    fn read(&self, source: &Fanotify, buffer: &mut [u8], leases: &LeaseTable) -> bool {
        let own = std::process::id().cast_signed();
        let Ok(length) = rustix::io::read(source, &mut *buffer) else { return false };
        for event in event::events(buffer.get(..length).unwrap_or_default()) {
            if event.mask.contains(MaskFlags::FAN_Q_OVERFLOW) {
                tracing::info!("fanotify events were lost: all leases are recalled");
                leases.recall_all_changed();
            } else if let Some(key) = self.file_of(&event)
                // The server's own events cause no recall. But they are passed to `file_of` first,
                // since one may report that a removed file's mark is gone, if the server dropped
                // the last descriptor.
                && event.process != own
            {
                leases.recall_changed(key);
            }
        }
        length > 0
    }

    /// The fanotify descriptors.
    fn sources(&self) -> Vec<Arc<Fanotify>> {
        let groups = lock(&self.groups);
        let previous = groups.previous.iter();
        previous.chain([&groups.current]).map(|group| group.fanotify.clone()).collect()
    }

    /// The file that an event concerns, if it has a mark.
    fn file_of(&self, event: &Event) -> Option<FileKey> {
        let mut groups = lock(&self.groups);
        let Groups { current, previous, .. } = &mut *groups;
        let handle = event.handle.as_ref()?;
        let key = *previous.iter().chain([&*current]).find_map(|group| group.keys.get(handle))?;
        if event.mask.contains(MaskFlags::FAN_DELETE_SELF) {
            for group in previous.iter_mut().chain([current]) {
                // A new file may have its inode number and a mark by now.
                if group.handles.get(&key) == Some(handle) {
                    group.handles.remove(&key);
                }
            }
        }
        Some(key)
    }

    /// Starts a new group if the current one is old enough; a full one need not be as old. Returns
    /// the group to close, and the files that have a mark only in that group.
    fn rotate(&self) -> (Option<Group>, Vec<FileKey>) {
        let mut groups = lock(&self.groups);
        let min_age = if groups.current.handles.len() < MAX_MARKS { GROUP_LIFETIME } else { TERM };
        if groups.current.created.elapsed() < min_age.max(2 * TERM) || groups.current.handles.is_empty() {
            return (None, Vec::new());
        }
        match Group::new() {
            Ok(new) => {
                let current = std::mem::replace(&mut groups.current, new);
                let closing = groups.previous.replace(current);
                let is_marked =
                    |key: &FileKey| groups.previous.iter().any(|group| group.handles.contains_key(key));
                let unmarked =
                    closing.iter().flat_map(|group| group.handles.keys()).filter(|key| !is_marked(key));
                let unmarked = unmarked.copied().collect();
                (closing, unmarked)
            }
            Err(error) => {
                // The old group stays current, until it is full.
                tracing::info!(%error, "no new fanotify group");
                (None, Vec::new())
            }
        }
    }
}

/// Whether no other machine can change this file system: the kernel would not report such changes.
/// These file systems are known to be local (`linux/magic.h`): ext, XFS, Btrfs, F2FS, bcachefs,
/// ZFS, overlayfs, tmpfs, ramfs, squashfs, EROFS, ISO 9660, FAT, exFAT.
pub(crate) fn is_local(fd: impl AsFd) -> bool {
    const LOCAL: [u32; 14] = [
        0xef53,
        0x5846_5342,
        0x9123_683e,
        0xf2f5_2010,
        0xca45_1a4e,
        0x2fc1_2fc1,
        0x794c_7630,
        0x0102_1994,
        0x8584_58f6,
        0x7371_7368,
        0xe0f5_e1e2,
        0x9660,
        0x4d44,
        0x2011_bab0,
    ];
    rustix::fs::fstatfs(fd).is_ok_and(|stat| LOCAL.iter().any(|magic| i64::from(*magic) == stat.f_type))
}

/// Starts the watching thread, which runs for as long as the lease table exists.
///
/// # Errors
/// Without CAP_SYS_ADMIN, before Linux 5.1, or if the user's limit of groups is reached.
pub(crate) fn start(leases: &Weak<LeaseTable>) -> io::Result<Arc<ChangeWatcher>> {
    let groups = Groups { current: Group::new()?, previous: None, is_local: HashMap::new() };
    let watcher = Arc::new(ChangeWatcher::new(groups));
    let (watching, leases) = (watcher.clone(), leases.clone());
    // Set by tests, to distinguish code that drains the events from code that works only because
    // the thread has read them in time.
    let delay = std::env::var("TERN_LATE_NOTICES").ok().and_then(|millis| millis.parse().ok());
    let delay = delay.map(Duration::from_millis);
    let run = move || {
        while let Some(leases) = leases.upgrade() {
            if wait_and_read(&watching, &leases, delay) {
                std::thread::sleep(READ_INTERVAL);
            }
            let (closing, unmarked) = watching.rotate();
            // Renewable leases get a mark in the new group before the one in the old group is
            // removed.
            leases.rewatch(&unmarked);
            drop(closing);
        }
    };
    std::thread::Builder::new().name("fanotify".into()).spawn(run)?;
    Ok(watcher)
}

/// Waits for events, and recalls the leases that they concern. Returns whether there were any.
fn wait_and_read(watcher: &ChangeWatcher, leases: &LeaseTable, delay: Option<Duration>) -> bool {
    let sources = watcher.sources();
    let mut ready: Vec<_> = sources.iter().map(|source| PollFd::new(&**source, PollFlags::IN)).collect();
    let timeout = Timespec { tv_sec: GROUP_LIFETIME.as_secs().cast_signed(), tv_nsec: 0 };
    let _error = poll(&mut ready, Some(&timeout));
    delay.into_iter().for_each(std::thread::sleep);
    let mut buffer = lock(&watcher.buffer);
    // Reads each source once, so that a program that writes much cannot keep the thread at one of
    // them.
    sources.iter().filter(|source| watcher.read(source, &mut buffer, leases)).count() > 0
}

#[cfg(test)]
mod tests;
