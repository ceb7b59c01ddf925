//! Looks at directories, and at the way to them, as a process would go it. In a thread of its own: a disk may be slow, and a shim that waits
//! for one is taken for dead.
//!
//! First each directory on the way is watched (inotify(7)), and then gone through. So of what is seen every change after that is told.

use crate::begins::about;
use crate::direct::LOCAL;
use crate::mailbox::Bell;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{
    AtFlags, Mode, OFlags, RawDir, StatxFlags, fstatfs, ioctl_getflags, open, openat, readlinkat, statx,
};
use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;
use tern_ids::HomePid;
use tern_migrate::names::{MOST_NAMES, Named};
use tern_migrate::opened::About;
use tern_syscall::ByteBuf;
use tern_tracee::procfs;

/// So many changes are taken at once.
const MOST_AT_ONCE: usize = 4096;

/// To compare more threads takes too long.
const MOST_THREADS: usize = 64;

/// What finds names by other ones is not told: without case, or by a key that comes and goes (linux/fs.h).
const STRANGE: u32 = 0x4000_0000 | 0x800;
/// ZFS, which may do that as a whole.
const ZFS: u32 = 0x2fc1_2fc1;

/// From linux/capability.h.
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_DAC_READ_SEARCH: u32 = 2;

/// More symbolic links the kernel does not follow either (path_resolution(7)).
const MOST_LINKS: u32 = 40;

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
enum Errand {
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

impl From<rustix::io::Errno> for Why {
    fn from(_: rustix::io::Errno) -> Self {
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

/// A watched directory, and the way to it. The watches end with this.
#[derive(Debug)]
pub(crate) struct Watched {
    here: i32,
    way: Vec<(i32, Vec<u8>)>,
    leave: Sender<Errand>,
}

/// What an event is to a directory that is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Meets {
    Nothing,
    /// Of this name something is not as it was.
    Name(Vec<u8>),
    /// It, or the way to it, may be another one.
    Directory,
}

/// What the kernel tells of a watched directory.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    watch: i32,
    /// None if it is about the directory itself.
    name: Option<Vec<u8>>,
    /// Something may have been lost: it is about all.
    lost: bool,
}

impl Event {
    pub(crate) const ALL: Self = Self { watch: -1, name: None, lost: true };
}

impl Watched {
    /// Whether the kernel tells this because of it.
    pub(crate) fn is_told(&self, event: &Event) -> bool {
        event.watch == self.here || self.way.iter().any(|(watch, _)| *watch == event.watch)
    }

    pub(crate) fn meets(&self, event: &Event) -> Meets {
        let on_way = |(watch, taken): &(i32, Vec<u8>)| {
            *watch == event.watch && event.name.as_ref().is_none_or(|name| name == taken)
        };
        if event.lost || self.way.iter().any(on_way) {
            return Meets::Directory;
        }
        match &event.name {
            _ if event.watch != self.here => Meets::Nothing,
            Some(name) => Meets::Name(name.clone()),
            None => Meets::Directory,
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let all = self.way.iter().map(|(watch, _)| *watch).chain([self.here]);
        let _nobody_watches = self.leave.send(Errand::Leave(all.filter(|watch| *watch >= 0).collect()));
    }
}

/// The thread that looks, and what the kernel tells of what it has seen.
#[derive(Debug)]
pub(crate) struct Eyes {
    events: Arc<OwnedFd>,
    /// Says so when anything has been mounted.
    mounts: OwnedFd,
    ask: Sender<Errand>,
    looked: Receiver<Looked>,
}

impl Eyes {
    /// Begins the thread, which rings when it has looked.
    ///
    /// # Errors
    /// If the user has too many threads, or instances of inotify.
    pub(crate) fn open(bell: Bell) -> io::Result<Self> {
        let events = Arc::new(inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?);
        let mounts = open("/proc/self/mounts", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let (ask, asked) = channel();
        let (say, looked) = channel();
        let mut looker = Looker { events: Arc::clone(&events), uses: HashMap::new(), leave: ask.clone() };
        let work = move || {
            while let Ok(errand) = asked.recv() {
                match errand {
                    Errand::Leave(watches) => looker.leave(&watches),
                    Errand::Look(ask) => {
                        let seen = looker.look(&ask);
                        if say.send(Looked { ask, seen }).is_err() {
                            break;
                        }
                        bell.ring();
                    }
                }
            }
        };
        std::thread::Builder::new().name("names".into()).stack_size(256 << 10).spawn(work)?;
        let eyes = Self { events, mounts, ask, looked };
        // That there are mounts is no news.
        eyes.has_news();
        Ok(eyes)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Whether anything has changed.
    fn has_news(&self) -> (bool, bool) {
        let mut fds = [PollFd::new(&*self.events, PollFlags::IN), PollFd::new(&self.mounts, PollFlags::PRI)];
        match poll(&mut fds, Some(&Timespec::default())) {
            Ok(_) => (!fds[0].revents().is_empty(), !fds[1].revents().is_empty()),
            Err(_) => (true, true),
        }
    }

    pub(crate) fn ask(&self, ask: Ask) {
        let _thread_is_gone = self.ask.send(Errand::Look(ask));
    }

    pub(crate) fn looked(&self) -> Option<Looked> {
        self.looked.try_recv().ok()
    }

    /// What has changed. Whoever has changed it has not returned from his call before it is told here.
    pub(crate) fn events(&self) -> Vec<Event> {
        let (has_changed, has_mounted) = self.has_news();
        let mut events = Vec::new();
        if has_mounted {
            events.push(Event::ALL);
        }
        let mut room = [MaybeUninit::<u8>::uninit(); 4096];
        let mut reader = Reader::new(&*self.events, &mut room);
        while has_changed && let Ok(event) = reader.next() {
            if events.len() >= MOST_AT_ONCE {
                // Somebody is faster than we: all is forgotten, and watched no more.
                events.push(Event::ALL);
                break;
            }
            let what = event.events();
            let lost = what.contains(ReadFlags::QUEUE_OVERFLOW);
            let name = event.file_name().map(|name| name.to_bytes().to_vec());
            // Of directories it is said that they are there, and not when they were read; who reads them for us tells this too.
            let of_content = (ReadFlags::ACCESS | ReadFlags::MODIFY).contains(what - ReadFlags::ISDIR);
            let of_directory = name.is_none() || what.contains(ReadFlags::ISDIR);
            if !(of_content && of_directory) {
                events.push(Event { watch: event.wd(), name, lost });
            }
        }
        events
    }
}

struct Looker {
    events: Arc<OwnedFd>,
    /// How often each watch is used: the kernel has one for each directory.
    uses: HashMap<i32, u32>,
    leave: Sender<Errand>,
}

fn directory(at: impl AsFd, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(at, CString::new(name)?, flags, Mode::empty())?)
}

/// What identifies a directory, as part of a mount.
fn identity(fd: &OwnedFd) -> io::Result<(u32, u32, u64, u64)> {
    let said = statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::INO | StatxFlags::MNT_ID)?;
    Ok((said.stx_dev_major, said.stx_dev_minor, said.stx_ino, said.stx_mnt_id))
}

fn kind(mode: u32) -> u32 {
    mode & libc::S_IFMT
}

/// As whom a process looks for names.
struct Who {
    /// They may look everywhere.
    may: bool,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

impl Who {
    /// All threads of a process, if they are the same, with the same root as we and where one of them is.
    fn of(pid: i32, tid: i32) -> Result<Self, Why> {
        let link = |of: i32, what: &str| std::fs::read_link(format!("/proc/{pid}/task/{of}/{what}"));
        let same = |[first, rest @ ..]: [u32; 4]| rest.iter().all(|id| *id == first);
        let ours = std::fs::read_link("/proc/self/ns/mnt")?;
        // A security module may let them see less.
        let label = |of: &str| std::fs::read(format!("/proc/{of}/attr/current")).ok();
        if label(&pid.to_string()) != label("self") {
            return Err(Why::Never);
        }
        let (place, mut who) = (link(tid, "cwd")?, None);
        let threads = procfs::threads(pid).map_err(|_gone| Why::Now)?;
        if threads.len() > MOST_THREADS {
            return Err(Why::Now);
        }
        for thread in threads {
            let status = procfs::status(thread).map_err(|_gone| Why::Now)?;
            let this = (status.uid, status.gid, status.groups, status.effective);
            let first = who.get_or_insert_with(|| this.clone());
            let alike = *first == this && link(thread, "cwd")? == place;
            if !alike || !same(this.0) || !same(this.1) || link(thread, "ns/mnt")? != ours {
                return Err(Why::Never);
            }
        }
        let root = open(format!("/proc/{pid}/root"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let own = open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let (uid, gid, groups, may) =
            who.filter(|_| identity(&root).ok() == identity(&own).ok()).ok_or(Why::Never)?;
        let may = may & (1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH) != 0;
        Ok(Self { may, uid: uid[0], gid: gid[0], groups })
    }

    /// Whether they may list this directory, and look up names in it. What they may do by an access list is not looked at.
    fn may_list(&self, of: &OwnedFd) -> Result<bool, Why> {
        let stat = rustix::fs::fstat(of)?;
        let shift = match () {
            () if self.may => return Ok(true),
            () if stat.st_uid == self.uid => 6,
            () if stat.st_gid == self.gid || self.groups.contains(&stat.st_gid) => 3,
            () => 0,
        };
        let open = format!("/proc/self/fd/{}", of.as_raw_fd());
        let listed = rustix::fs::getxattr(&*open, "system.posix_acl_access", &mut [0u8; 0][..]);
        Ok(stat.st_mode >> shift & 5 == 5 && listed.is_err())
    }
}

impl Looker {
    fn leave(&mut self, watches: &[i32]) {
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

    fn watch(&mut self, directory: &OwnedFd, what: WatchFlags) -> Result<i32, Why> {
        let kind = fstatfs(directory)?.f_type as u32;
        if !LOCAL.contains(&kind) || kind == ZFS {
            return Err(Why::Never);
        }
        let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
        let watch = inotify::add_watch(&*self.events, path, what)?;
        *self.uses.entry(watch).or_default() += 1;
        Ok(watch)
    }

    fn look(&mut self, ask: &Ask) -> Result<Seen, Why> {
        let who = Who::of(ask.pid.0, ask.tid.0)?;
        let mut watched = Watched { here: -1, way: Vec::new(), leave: self.leave.clone() };
        let (at, direct) = self.go(ask, &mut watched)?;
        watched.here = self.watch(&at, NAMES)?;
        if !who.may_list(&at)? {
            return Err(Why::Never);
        }
        let seen_at = Instant::now();
        let names = names_in(&at, ask.most.min(MOST_NAMES))?;
        // We have read it, and so its time of access is what it stays for who reads it next.
        let about = about(&at).map(Box::new).ok_or(Why::Now)?;
        Ok(Seen { about, direct, names, at: seen_at, watched })
    }

    /// Goes the way to a directory, step by step; whether its last step is no link.
    fn go(&mut self, ask: &Ask, watched: &mut Watched) -> Result<(OwnedFd, bool), Why> {
        let begin =
            |path: &str| open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let root = begin("/")?;
        let mut at = match ask.directory.first() {
            Some(b'/') => begin("/")?,
            _ => begin(&format!("/proc/{}/task/{}/cwd", ask.pid.0, ask.tid.0))?,
        };
        let steps = |path: &[u8]| -> Vec<Vec<u8>> {
            let parts = path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."));
            parts.map(<[u8]>::to_vec).collect()
        };
        let mut rest = VecDeque::from(steps(&ask.directory));
        let (mut links, mut direct) = (0, true);
        while let Some(step) = rest.pop_front() {
            let watch = self.watch(&at, WAY)?;
            watched.way.push((watch, step.clone()));
            if step == b".." && identity(&at)? == identity(&root)? {
                continue;
            }
            let next = directory(&at, &step)?;
            let mode = rustix::fs::fstat(&next)?.st_mode;
            if kind(mode) != libc::S_IFLNK {
                at = next;
                continue;
            }
            (links, direct) = (links + 1, direct && !rest.is_empty());
            let to = readlinkat(&next, "", Vec::new())?;
            if links > MOST_LINKS {
                return Err(Why::Now);
            }
            if to.to_bytes().starts_with(b"/") {
                at = begin("/")?;
            }
            steps(to.to_bytes()).into_iter().rev().for_each(|step| rest.push_front(step));
        }
        Ok((at, direct))
    }
}

/// The names in a directory, if there are no more than so many.
fn names_in(at: &OwnedFd, most: usize) -> Result<Vec<(ByteBuf, Named)>, Why> {
    let listed = openat(at, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    if ioctl_getflags(&listed).is_ok_and(|flags| flags.bits() & STRANGE != 0) {
        return Err(Why::Never);
    }
    let (_, _, _, mount) = identity(at)?;
    let mut room = [MaybeUninit::<u8>::uninit(); 16 << 10];
    let (mut entries, mut found) = (RawDir::new(&listed, &mut room), Vec::new());
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
    let mut names = Vec::with_capacity(found.len());
    for name in found {
        // Of what is gone by now it is told that it has changed.
        let named = directory(&listed, name.to_bytes()).and_then(|file| named(&file, mount));
        names.push((ByteBuf::from(name.into_bytes()), named.unwrap_or(Named::Other)));
    }
    Ok(names)
}

/// What a name is of. What is mounted on it, has other names as well, or changes by what happens elsewhere, home is asked for.
fn named(file: &OwnedFd, mount: u64) -> io::Result<Named> {
    let about = about(file).ok_or(io::ErrorKind::NotFound)?;
    Ok(match kind(about.mode.into()) {
        libc::S_IFLNK => Named::Link(ByteBuf::from(readlinkat(file, "", Vec::new())?.into_bytes())),
        libc::S_IFREG if about.nlink == 1 && about.mnt_id == mount => Named::File(Box::new(about)),
        _ => Named::Other,
    })
}
