//! Looks at directories, and at the way to them, as a process would go it. In a thread of its own: a disk may be slow, and a shim that waits
//! for one is taken for dead.
//!
//! First each directory on the way is watched (inotify(7)), and then gone through. So of what is seen every change after that is told.

use super::eyes::Watched;
use super::who::{LIST, Place, SEARCH, Who};
use crate::begins::about;
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
use tern_migrate::names::Named;
use tern_migrate::opened::About;
use tern_syscall::ByteBuf;

/// What finds names by other ones is not told: without case, or by a key that comes and goes (linux/fs.h).
const STRANGE: u32 = 0x4000_0000 | 0x800;

/// File systems of which this kernel sees all changes, and by whose names nothing else is found: those of `direct.rs` but for ZFS, by what the mount table calls
/// them, since to ask a file system itself may wait for its server.
const LOCAL: [&str; 12] = [
    "ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "tmpfs", "devtmpfs", "ramfs", "rootfs",
    "overlay",
];
/// A way of more steps is not gone, nor one through so many links.
const MOST_STEPS: usize = 64;
/// So many directories of a family are watched: the user's watches are others' as well.
const MOST_WATCHES: usize = 4096;
/// Links that lead further are not told.
const LONGEST: usize = 255;
/// What was changed so many seconds ago, or more, is told.
const SETTLED: u64 = 1;

/// What may make another directory of one on the way.
const WAY: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::MASK_ADD);
/// What changes in what is said of names besides. To read a file changes its time of access.
const NAMES: WatchFlags = WAY.union(WatchFlags::MODIFY).union(WatchFlags::ACCESS);

/// A directory that is to be looked at.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) pid: HomePid,
    /// Where paths begin that do not begin at the root: where this thread is.
    pub(crate) tid: HomePid,
    pub(crate) directory: Vec<u8>,
    /// More names are too many.
    pub(crate) most: usize,
    /// Which life, and since when nothing has changed the way that it takes.
    pub(crate) turn: u64,
    /// How many changes had been heard of before.
    pub(crate) changes: u64,
}

#[derive(Debug)]
pub(super) enum Errand {
    Look(Ask),
    Leave(Vec<i32>),
}

/// What came of a look.
#[derive(Debug)]
pub(crate) struct Looked {
    pub(crate) ask: Ask,
    pub(crate) seen: Result<Seen, Why>,
}

/// Why a directory is not told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// It may be another time.
    Now,
    /// It never is.
    Never,
}

impl From<io::Error> for Why {
    fn from(_: io::Error) -> Self {
        Self::Now
    }
}

impl From<Errno> for Why {
    fn from(_: Errno) -> Self {
        Self::Now
    }
}

/// What a directory has been seen to hold.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) about: Box<About>,
    /// No link leads to it at the end of the way.
    pub(crate) direct: bool,
    pub(crate) names: Vec<(ByteBuf, Named)>,
    pub(crate) at: Instant,
    pub(crate) watched: Watched,
}

pub(super) struct Looker {
    pub(super) events: Arc<OwnedFd>,
    /// How often each watch is used: the kernel has one for each directory.
    pub(super) uses: HashMap<i32, u32>,
    pub(super) leave: Sender<Errand>,
}

/// The mounts of which this kernel sees all changes.
fn local_mounts() -> io::Result<HashSet<u64>> {
    let table = std::fs::read_to_string("/proc/self/mountinfo")?;
    let local = |line: &str| {
        let (mount, kind) = line.split_once(" - ")?;
        let is_local = LOCAL.contains(&kind.split(' ').next()?);
        mount.split(' ').next()?.parse().ok().filter(|_| is_local)
    };
    Ok(table.lines().filter_map(local).collect())
}

/// One look: as whom, and where.
struct Look<'a> {
    ask: &'a Ask,
    who: Who,
    local: HashSet<u64>,
    watched: Watched,
}

impl Looker {
    pub(super) fn leave(&mut self, watches: &[i32]) {
        for watch in watches {
            let Some(uses) = self.uses.get_mut(watch) else { continue };
            *uses -= 1;
            if *uses == 0 {
                self.uses.remove(watch);
                // It is gone by itself if its directory is.
                let _gone = inotify::remove_watch(&*self.events, *watch);
            }
        }
    }

    /// Watches a directory, if a process may look names up there, and all that changes in it is told.
    fn watch(&mut self, place: &Place, rights: u16, look: &Look<'_>) -> Result<(i32, OwnedFd), Why> {
        if !look.local.contains(&place.said.stx_mnt_id) || !look.who.may(place, rights) {
            return Err(Why::Never);
        }
        if self.uses.len() >= MOST_WATCHES {
            return Err(Why::Now);
        }
        let read = place.read()?;
        if ioctl_getflags(&read).is_ok_and(|flags| flags.bits() & STRANGE != 0) {
            return Err(Why::Never);
        }
        let path = format!("/proc/self/fd/{}", read.as_raw_fd());
        let what = if rights == LIST { NAMES } else { WAY };
        let watch = inotify::add_watch(&*self.events, path, what)?;
        *self.uses.entry(watch).or_default() += 1;
        Ok((watch, read))
    }

    pub(super) fn look(&mut self, ask: &Ask) -> Result<Seen, Why> {
        let is_relative = ask.directory.first() != Some(&b'/');
        if is_relative && tern_image::process::shares_place(ask.pid.0) {
            return Err(Why::Never);
        }
        let who = Who::of(ask.pid.0, ask.tid.0)?;
        let watched = Watched { here: -1, way: Vec::new(), leave: self.leave.clone() };
        let mut look = Look { ask, who, local: local_mounts()?, watched };
        let (at, direct) = self.go(&mut look)?;
        let (here, read) = self.watch(&at, LIST, &look)?;
        look.watched.here = here;
        let seen_at = Instant::now();
        let names = names_in(&read, ask.most)?;
        let about = about(&at.fd).map(Box::new).ok_or(Why::Now)?;
        Ok(Seen { about, direct, names, at: seen_at, watched: look.watched })
    }

    /// Goes the way to a directory, step by step; whether its last step is no link.
    fn go(&mut self, look: &mut Look<'_>) -> Result<(Place, bool), Why> {
        let Ask { pid, tid, directory, .. } = look.ask;
        let root = Place::open("/")?;
        let mut at = match directory.first() {
            Some(b'/') => Place::open("/")?,
            _ => Place::open(&format!("/proc/{pid}/task/{tid}/cwd"))?,
        };
        let steps = |path: &[u8]| -> Vec<Vec<u8>> {
            let parts = path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."));
            parts.map(<[u8]>::to_vec).collect()
        };
        let mut rest = VecDeque::from(steps(directory));
        let mut direct = true;
        while let Some(step) = rest.pop_front() {
            let (watch, _) = self.watch(&at, SEARCH, look)?;
            look.watched.way.push((watch, step.clone()));
            if look.watched.way.len() > MOST_STEPS {
                return Err(Why::Never);
            }
            if step == b".." && at.is(&root) {
                continue;
            }
            let next = at.step(&step)?;
            if !next.is_link() {
                at = next;
                continue;
            }
            direct &= !rest.is_empty();
            let to = readlinkat(&next.fd, "", Vec::new())?;
            if to.to_bytes().starts_with(b"/") {
                at = Place::open("/")?;
            }
            steps(to.to_bytes()).into_iter().rev().for_each(|step| rest.push_front(step));
        }
        Ok((at, direct))
    }
}

/// The names in a directory, if there are no more than so many.
fn names_in(read: &OwnedFd, most: usize) -> Result<Vec<(ByteBuf, Named)>, Why> {
    let mut room = [MaybeUninit::<u8>::uninit(); 16 << 10];
    let (mut entries, mut found) = (RawDir::new(read, &mut room), Vec::new());
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if found.len() == most {
            return Err(Why::Now);
        }
        found.push(name.to_owned());
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut names = Vec::with_capacity(found.len());
    for name in found {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let named = match openat2(read, &*name, flags, Mode::empty(), ResolveFlags::NO_XDEV) {
            Ok(file) => named(&file, now)?,
            // Gone by now, or something is mounted there.
            Err(Errno::NOENT | Errno::XDEV) => Named::Unknown,
            Err(error) => return Err(error.into()),
        };
        names.push((ByteBuf::from(name.into_bytes()), named));
    }
    Ok(names)
}

/// What a name is of. A file that has other names as well changes by what happens elsewhere; and one that has just been written may be written by a call that has
/// not ended: that is told when it has.
fn named(file: &OwnedFd, now: Duration) -> Result<Named, Why> {
    let about = about(file).ok_or(Why::Now)?;
    let [_, _, changed, modified] = about.times.map(|(seconds, _)| u64::try_from(seconds).unwrap_or(0));
    let is_settled = changed.max(modified) + SETTLED < now.as_secs();
    Ok(match u32::from(about.mode) & libc::S_IFMT {
        libc::S_IFLNK => match readlinkat(file, "", Vec::new())?.into_bytes() {
            to if to.len() <= LONGEST => Named::Link(ByteBuf::from(to)),
            _ => Named::Unknown,
        },
        libc::S_IFREG if about.nlink == 1 && is_settled => Named::File(Box::new(about)),
        _ => Named::Other,
    })
}
