//! Programs of this node that change what another one believes of a file: the kernel tells of it (fanotify(7)), and the leases
//! are asked back at once. Without that the change would be seen there when the term is over.
//!
//! ```text
//!  lease ─▶ watch: a mark on that inode ─▶ kernel ─event─▶ thread ─▶ Leases::noticed ─▶ ear of each session that has one
//! ```
//! Only files that somebody has a lease of have a mark, so nobody else pays: a mark on the whole file system costs each write of
//! the machine 0.6 to 2 µs, one on an inode only the writes to that. No program ever waits for us. What comes is read once a
//! millisecond at most: the kernel joins what is alike meanwhile, and whoever writes in a loop pays little for it.
//!
//! Marks are made in a [`Group`] that is closed, with all its marks, after every lease that began with it is over; the next
//! group is there by then. So nobody has to find a file again to take its mark away, and what is not looked at any more from
//! elsewhere costs nothing after [`LIFE`].
//!
//! A file that a guest of this node writes has no mark ([`Notices::ignore`]): nobody gets a lease of it meanwhile, and whoever gets one
//! afterwards marks it again.

mod event;
mod handle;

use super::leases::{Leases, TERM};
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

/// How long a group gets new marks; it is closed as much later. More than a lease's term.
const LIFE: Duration = Duration::from_secs(30);

/// The most marks of one group: each keeps an inode in memory. Further files are as without all this.
const MOST_MARKS: usize = 16_384;

/// How long events are left to come together.
const NAP: Duration = Duration::from_millis(1);

/// Bytes of events that are read at once.
const READ: usize = 16 << 10;

/// How many wait to be read at most, before the kernel says that it has lost some (`fanotify/max_queued_events`, by default).
const MOST_WAITING: usize = 16_384;

/// What is done to a file.
const OF_FILE: MaskFlags = MaskFlags::FAN_MODIFY
    .union(MaskFlags::FAN_ATTRIB)
    // What is stored into a mapping is no news by itself.
    .union(MaskFlags::FAN_CLOSE_WRITE)
    .union(MaskFlags::FAN_DELETE_SELF)
    .union(MaskFlags::FAN_MOVE_SELF);

/// What is done to a directory, and to names in it.
const OF_DIRECTORY: MaskFlags = MaskFlags::FAN_ATTRIB
    .union(MaskFlags::FAN_DELETE_SELF)
    .union(MaskFlags::FAN_MOVE_SELF)
    .union(MaskFlags::FAN_CREATE)
    .union(MaskFlags::FAN_DELETE)
    .union(MaskFlags::FAN_MOVED_FROM)
    .union(MaskFlags::FAN_MOVED_TO)
    .union(MaskFlags::FAN_ONDIR);

/// Marks that end together.
#[derive(Debug)]
struct Group {
    fanotify: Arc<Fanotify>,
    begun: Instant,
    /// Which file it was: a mark goes with its file, whose number may be another one's then.
    marked: HashMap<FileKey, Handle>,
    /// What the kernel calls them in its events.
    called: HashMap<Handle, FileKey>,
    /// File systems that cannot have such marks.
    without: HashSet<u64>,
}

#[derive(Debug)]
struct Groups {
    now: Group,
    /// Its marks are of use until the leases are over that it had when it was `now`.
    before: Option<Group>,
    /// Which file systems are this node's alone.
    local: HashMap<u64, bool>,
}

/// What is watched on this node.
#[derive(Debug)]
pub(crate) struct Notices {
    groups: Mutex<Groups>,
    /// One at a time reads what there is to hear, and has it asked back before the next one finds nothing.
    room: Mutex<Vec<u8>>,
}

impl Group {
    fn new() -> io::Result<Self> {
        // `nix` has no name for it: events say which file it is, instead of opening it for us.
        let fid = InitFlags::from_bits_retain(libc::FAN_REPORT_FID);
        let how = InitFlags::FAN_CLASS_NOTIF
            | InitFlags::FAN_CLOEXEC
            | InitFlags::FAN_NONBLOCK
            | InitFlags::FAN_UNLIMITED_MARKS
            | fid;
        Ok(Self {
            fanotify: Arc::new(Fanotify::init(how, EventFFlags::O_RDONLY)?),
            begun: Instant::now(),
            marked: HashMap::new(),
            called: HashMap::new(),
            without: HashSet::new(),
        })
    }

    /// Whether it has a mark now, and why not.
    fn mark(&mut self, fd: impl AsFd, key: FileKey, kind: FileType) -> io::Result<bool> {
        let handle = Handle::of(&fd, key.volume)?;
        if self.marked.get(&key) == Some(&handle) {
            return Ok(true);
        }
        if self.marked.len() >= MOST_MARKS {
            return Ok(false);
        }
        let mask = if kind == FileType::Directory { OF_DIRECTORY } else { OF_FILE };
        // What is held by a descriptor of `O_PATH` can be marked by a path only.
        let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
        self.fanotify.mark(MarkFlags::FAN_MARK_ADD, mask, rustix::fs::CWD, Some(path.as_str()))?;
        self.called.insert(handle.clone(), key);
        self.marked.insert(key, handle);
        Ok(true)
    }

    fn unmark(&mut self, path: &str, key: FileKey) {
        if self.marked.remove(&key).is_some() {
            // It may have gone by itself, with the file.
            let _gone = self.fanotify.mark(MarkFlags::FAN_MARK_REMOVE, OF_FILE, rustix::fs::CWD, Some(path));
        }
    }
}

impl Notices {
    fn of(groups: Groups) -> Self {
        Self { groups: Mutex::new(groups), room: Mutex::new(vec![0; READ]) }
    }

    /// Has the leases of a file asked back whenever a program of this node changes it, for the term at least. To be called
    /// before it is looked at.
    ///
    /// Where it cannot be, nothing is said: the term tells. A caller who may not read the file is one such case, since the
    /// calling thread is that by now.
    /// Whether it is watched now, and nobody changes it but programs of this node.
    pub(crate) fn watch(&self, fd: impl AsFd, key: FileKey, kind: FileType) -> bool {
        let Groups { now: group, local, .. } = &mut *lock(&self.groups);
        let is_local = *local.entry(key.volume).or_insert_with(|| is_local(&fd));
        if group.without.contains(&key.volume) {
            return false;
        }
        let error = match group.mark(fd, key, kind) {
            Ok(marked) => return marked && is_local,
            Err(error) => error,
        };
        let never = [libc::EOPNOTSUPP, libc::ENODEV, libc::EXDEV, libc::EINVAL, libc::EOVERFLOW];
        if error.raw_os_error().is_some_and(|errno| never.contains(&errno)) {
            tracing::info!(%error, volume = key.volume, "a file system without notices");
            group.without.insert(key.volume);
        }
        false
    }

    /// Hears no more of what is done to this file, which is none of the directories, until it is watched again: as long as nobody can have a lease of it there
    /// is nobody to be told, and each write would cost its program twice what it costs otherwise.
    pub(crate) fn ignore(&self, fd: impl AsFd, key: FileKey) {
        let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
        let mut groups = lock(&self.groups);
        let Groups { now, before, .. } = &mut *groups;
        before.iter_mut().chain([now]).for_each(|group| group.unmark(&path, key));
    }

    /// Hears all that there is, and asks back what it is about, before this returns: also if another thread has begun with that.
    pub(crate) fn catch_up(&self, leases: &Leases) {
        let mut room = lock(&self.room);
        for source in self.sources() {
            // As many as the kernel lets wait at most.
            for _ in 0..MOST_WAITING.div_ceil(READ / 64) {
                if !self.read(&source, &mut room, leases) {
                    break;
                }
            }
        }
    }

    /// Reads what there is, if it is not too much, and asks back what it is about; whether there was any.
    fn read(&self, source: &Fanotify, room: &mut [u8], leases: &Leases) -> bool {
        let own = std::process::id().cast_signed();
        let Ok(length) = rustix::io::read(source, &mut *room) else { return false };
        for event in event::events(room.get(..length).unwrap_or_default()) {
            if event.mask.contains(MaskFlags::FAN_Q_OVERFLOW) {
                tracing::info!("notices were lost: all leases are asked back");
                leases.noticed_all();
            } else if let Some(key) = self.file_of(&event)
                // We may be who has let go last of one that a program has removed: no news, but it is gone.
                && event.process != own
            {
                leases.noticed(key);
            }
        }
        length > 0
    }

    /// The descriptors that events come from.
    fn sources(&self) -> Vec<Arc<Fanotify>> {
        let groups = lock(&self.groups);
        let before = groups.before.iter();
        before.chain([&groups.now]).map(|group| group.fanotify.clone()).collect()
    }

    /// Which file an event is about, if it is one that has a mark.
    fn file_of(&self, event: &Event) -> Option<FileKey> {
        let mut groups = lock(&self.groups);
        let Groups { now, before, .. } = &mut *groups;
        let handle = event.handle.as_ref()?;
        let key = *before.iter().chain([&*now]).find_map(|group| group.called.get(handle))?;
        if event.mask.contains(MaskFlags::FAN_DELETE_SELF) {
            for group in before.iter_mut().chain([now]) {
                // Another file with its number may have one by now.
                if group.marked.get(&key) == Some(handle) {
                    group.marked.remove(&key);
                }
            }
        }
        Some(key)
    }

    /// Begins a new group when this one is old enough, or full; gives back the one that is over, and which files have a mark in that only.
    fn turn(&self) -> (Option<Group>, Vec<FileKey>) {
        let mut groups = lock(&self.groups);
        let least = if groups.now.marked.len() < MOST_MARKS { LIFE } else { TERM };
        if groups.now.begun.elapsed() < least.max(2 * TERM) || groups.now.marked.is_empty() {
            return (None, Vec::new());
        }
        match Group::new() {
            Ok(new) => {
                let now = std::mem::replace(&mut groups.now, new);
                let last = groups.before.replace(now);
                let still = |key: &FileKey| groups.before.iter().any(|group| group.marked.contains_key(key));
                let gone = last.iter().flat_map(|group| group.marked.keys()).filter(|key| !still(key));
                let gone = gone.copied().collect();
                (last, gone)
            }
            Err(error) => {
                // The old one goes on, and ends with its marks full.
                tracing::info!(%error, "no new group of notices");
                (None, Vec::new())
            }
        }
    }
}

/// Whether this is of a file system that no other machine changes: of what those do the kernel tells nobody. These are known to be so
/// (`linux/magic.h`): ext, XFS, Btrfs, F2FS, bcachefs, ZFS, overlayfs, tmpfs, ramfs, squashfs, EROFS, ISO 9660, FAT, exFAT.
pub(super) fn is_local(fd: impl AsFd) -> bool {
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
    rustix::fs::fstatfs(fd).is_ok_and(|is| LOCAL.iter().any(|magic| i64::from(*magic) == is.f_type))
}

/// Begins to listen, for as long as these leases are there.
///
/// # Errors
/// Without CAP_SYS_ADMIN, before Linux 5.1, or if the user has no more groups.
pub(crate) fn listen(leases: &Weak<Leases>) -> io::Result<Arc<Notices>> {
    let groups = Groups { now: Group::new()?, before: None, local: HashMap::new() };
    let notices = Arc::new(Notices::of(groups));
    let (all, leases) = (notices.clone(), leases.clone());
    // Tests want to see who asks for what there is to hear, and who only hears of it by chance.
    let late = std::env::var("TERN_LATE_NOTICES").ok().and_then(|millis| millis.parse().ok());
    let late = late.map(Duration::from_millis);
    let keep = move || {
        while let Some(leases) = leases.upgrade() {
            if hear(&all, &leases, late) {
                std::thread::sleep(NAP);
            }
            let (last, gone) = all.turn();
            // What lasts has a mark in the new group before that in the old one goes.
            leases.watch_again(&gone);
            drop(last);
        }
    };
    std::thread::Builder::new().name("notices".into()).spawn(keep)?;
    Ok(notices)
}

/// Waits for events, and asks back what they are about; whether there were any.
fn hear(notices: &Notices, leases: &Leases, late: Option<Duration>) -> bool {
    let sources = notices.sources();
    let mut ready: Vec<_> = sources.iter().map(|source| PollFd::new(&**source, PollFlags::IN)).collect();
    let life = Timespec { tv_sec: LIFE.as_secs().cast_signed(), tv_nsec: 0 };
    let _none = poll(&mut ready, Some(&life));
    late.into_iter().for_each(std::thread::sleep);
    let mut room = lock(&notices.room);
    // Each but once, so that who changes much cannot keep us at one.
    sources.iter().filter(|source| notices.read(source, &mut room, leases)).count() > 0
}

#[cfg(test)]
mod tests;
