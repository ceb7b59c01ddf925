//! Files in hand: open files that nobody but one process has, so that what it reads and writes may be read ahead and written
//! behind where it runs (`guest/direct.rs`, docs/design/direct.md). Here is what only home can know: whether an open file
//! is such a one, and whether its content has changed.

use crate::begins;
use crate::family::Family;
use crate::member::Member;
use crate::shared::{Looker, Shares};
use crate::thread::Current;
use rustix::fs::{Mode, OFlags, Stat, fstat, fstatfs, open};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tern_ids::{Epoch, HomePid};
use tern_image::place::{self, Place, Trees};
use tern_migrate::message::{CallResult, FileWord, InHand, MOST_IN_HAND};
use tern_migrate::opened::{About, Beginning};
use tern_syscall::{Call, Outcome};
use tern_tracee::procfs;

/// File systems whose files are what this kernel says of them, and whose times of change it sets.
const LOCAL: [u32; 9] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0xca45_1a4e, // bcachefs
    0xf2f5_2010, // F2FS
    0x2fc1_2fc1, // ZFS
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x794c_7630, // overlayfs
];

/// Of a file that was changed so short a time ago the next change may bear the same time: a tick at most.
const TICK: Duration = Duration::from_millis(15);

/// The times of a file of another node are its clock's: nodes whose clocks are further apart exchange no processes.
const APART: Duration = Duration::from_millis(50);

/// The clock of a server that nodes share may be off by so much, and not by more.
const FAR_APART: Duration = Duration::from_secs(300);

/// Some file systems write times in so long steps; they show no parts of a second.
const COARSE: Duration = Duration::from_secs(2);

/// A file that was open before its process left, or executed its program, is looked at after so many transfers: to prove that
/// nobody else has it takes a look at everybody's.
const TRANSFERS: u32 = 4;

/// So many files for reading are looked after; each costs a look with each call.
const MOST: usize = 16;

/// From so many bytes on it is worth having a file of its own node open there: that takes as long as some twenty calls.
pub(crate) const WORTH_OPENING: u64 = 64 << 10;

/// The files of a process of which home is to say if they change.
#[derive(Debug, Default)]
pub(crate) struct Direct {
    /// Where its program runs now: what another life was told is over.
    life: Epoch,
    /// For reading, by descriptor.
    pub(crate) watched: BTreeMap<i32, Watched>,
    /// Looks at those of file systems that nodes share.
    looker: Looker,
    /// In hand for writing.
    written: BTreeMap<i32, Written>,
    /// The trees of MFS that it has files of.
    trees: Trees,
    /// Writes behind that have failed, and of which the program has not been told.
    errors: BTreeMap<i32, i64>,
    /// Whether it shares its descriptors with nobody, if that has been looked at.
    alone: Option<bool>,
    /// Whether it is in our user namespace, likewise.
    same_users: Option<bool>,
    /// Transfers that were forwarded, by descriptor.
    transfers: BTreeMap<i32, u32>,
    /// Those that are not looked at again: somebody else had them.
    others: BTreeSet<i32>,
}

/// An open file that nobody but one process has.
struct Found {
    file: InHand,
    /// Where it is, if that is in MFS.
    place: Option<Place>,
    /// If it has been opened just now: what the kernel says of it.
    about: Option<About>,
}

/// A file in hand for writing.
#[derive(Debug, Default)]
struct Written {
    /// So many bytes were written behind.
    bytes: u64,
    /// Which file it is, if it is one of MFS and where it is has not been said.
    elsewhere: Option<(u64, u64)>,
}

#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) file: Arc<OwnedFd>,
    pub(crate) version: Version,
    /// Changes that are so close together may bear the same time.
    tick: Duration,
    /// Its device.
    pub(crate) device: u64,
    /// It is on a file system that nodes share: its times are its server's, whose clock nobody knows.
    pub(crate) is_shared: bool,
    /// Since when it is as it is, as far as we have seen.
    seen: SystemTime,
    /// Where it is has been said, in this version of it.
    pub(crate) offered: bool,
}

impl Watched {
    /// Whether every change since that moment has made another version of it. By a clock that is not the cluster's that is known once it
    /// has been seen as it is for longer than a time stamp may last.
    pub(crate) fn was_settled(&self, at: SystemTime) -> bool {
        let Self { version, tick, is_shared, .. } = self;
        if !is_shared {
            return version.was_settled(at, *tick);
        }
        let step = if version.is_coarse() { COARSE } else { *tick };
        version.was_settled(at, FAR_APART) || self.seen.checked_add(step).is_some_and(|until| until < at)
    }
}

/// What changes if a file's content does, but for what happens within one [`TICK`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) changed: Duration,
    pub(crate) modified: Duration,
    pub(crate) size: i64,
}

impl Version {
    fn of(stat: &Stat) -> Self {
        let time = |seconds: i64, nanos: u64| {
            Duration::from_secs(u64::try_from(seconds).unwrap_or(0)) + Duration::from_nanos(nanos)
        };
        Self {
            changed: time(stat.st_ctime, stat.st_ctime_nsec),
            modified: time(stat.st_mtime, stat.st_mtime_nsec),
            size: stat.st_size,
        }
    }

    fn is_coarse(&self) -> bool {
        self.changed.subsec_nanos() == 0 && self.modified.subsec_nanos() == 0
    }

    /// Whether every change since that moment has made another version of it, where changes a tick apart do.
    fn was_settled(&self, at: SystemTime, tick: Duration) -> bool {
        let at = at.duration_since(UNIX_EPOCH).unwrap_or_default();
        self.changed + tick < at && self.modified + tick < at
    }
}

impl Family {
    /// Says with the result of this call what is to be said of open files; and what became of writes to them that were made
    /// behind the program's back, at the latest when it closes them.
    pub(crate) fn hear_of_files(&mut self, pid: HomePid, current: &Current, result: &mut CallResult) {
        // Who comes home brings what was shared: what is written meanwhile would be lost.
        let shared: Vec<(u64, u64)> = self.inodes.values().copied().collect();
        let Self { members, shares, .. } = self;
        let Some(member) = members.get_mut(&pid) else { return };
        member.direct.of_life(member.epoch);
        let (nr, args) = (i64::from(current.request.call.nr), current.request.call.values());
        if let Some(error) = member.direct.error(nr, &args, result.outcome.ret) {
            result.outcome.ret = error;
        }
        result.files = member.words_of_files(current, &result.outcome, &shared, shares);
    }
}

impl Member {
    fn words_of_files(
        &mut self,
        current: &Current,
        outcome: &Outcome,
        shared: &[(u64, u64)],
        shares: &mut Shares,
    ) -> Vec<(i32, FileWord)> {
        let (nr, args) = (i64::from(current.request.call.nr), current.request.call.values());
        self.direct.forget(nr, &args);
        let begun = SystemTime::now().checked_sub(current.since.elapsed()).unwrap_or(UNIX_EPOCH);
        let read = (nr == libc::SYS_pread64).then_some(args[0] as i32);
        let mut words = self.direct.look(read, begun);
        if let Some((fd, proven)) = self.direct.candidate(nr, &args, outcome.ret)
            && self.is_alone_with_its_files()
            // Only root sees everybody's descriptors.
            && (proven || rustix::process::geteuid().is_root())
            && let Some(Found { file, place, about }) = self.in_hand(fd, !proven, shares)
            && !shared.contains(&file.id)
        {
            let elsewhere = (!file.local && place.is_none()).then_some(file.id);
            words.extend(self.direct.give(fd, &file, elsewhere));
            words.push((fd, FileWord::InHand(file)));
            words.extend(place.map(|place| (fd, FileWord::Near(place))));
            let begins = about.map(|about| Beginning { about, content: None });
            words.extend(begins.map(|begins| (fd, FileWord::Begins(Box::new(begins)))));
        }
        words.extend(self.direct.place_of_much_written(self.memory.pid()));
        words.extend(self.direct.offer_shared(self.memory.pid(), shares));
        words
    }

    /// Whether its reads and writes come one after the other, from nowhere else. Who shares memory may learn through that, and
    /// of no call, that a file has changed.
    fn is_alone_with_its_files(&mut self) -> bool {
        if self.threads.len() > 1 || !self.files.objects.is_empty() || self.lent {
            return false;
        }
        // Who shares its descriptors has done so since before this life, or it is known where it runs.
        let pid = self.memory.pid();
        *self.direct.alone.get_or_insert_with(|| !tern_image::process::shares_descriptors(pid))
    }

    /// An open file of it, if nobody but it has that; and where it may be opened as well, if it is in MFS. One that it has opened just now nobody can
    /// have.
    fn in_hand(&mut self, fd: i32, prove: bool, shares: &mut Shares) -> Option<Found> {
        const SPECIAL: u64 = (libc::O_APPEND | libc::O_DIRECT | libc::O_SYNC | libc::O_PATH) as u64;
        let pid = self.memory.pid();
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = open(&*path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let stat = fstat(&file).ok()?;
        if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
            return None;
        }
        let id = (stat.st_dev, stat.st_ino);
        let is_shared = shares.find(pid, fd, stat.st_dev).is_some();
        let mut elsewhere = is_shared || self.direct.trees.has(stat.st_dev);
        if !elsewhere {
            let kind = fstatfs(&file).ok()?.f_type as u32;
            elsewhere = kind == place::FUSE && self.direct.trees.find(pid, stat.st_dev);
            if !elsewhere && !LOCAL.contains(&kind) {
                return None;
            }
        }
        let (offset, flags) = procfs::descriptor(pid, fd).ok()?;
        let access = (flags & libc::O_ACCMODE as u64) as i32;
        // O_SYNC includes O_DSYNC.
        if flags & SPECIAL != 0 {
            return None;
        }
        let (reads, writes) = (access != libc::O_WRONLY, access != libc::O_RDONLY);
        // Beyond a limit it would have to be told at once; and shared memory is written by nobody's call.
        let bound =
            || tern_tracee::limit::get(pid, libc::RLIMIT_FSIZE).map_or(true, |(soft, _)| soft != u64::MAX);
        let memory = || {
            std::fs::read_link(&path)
                .map_or(true, |to| to.starts_with("/dev/shm") || to.starts_with("/memfd:"))
        };
        if !elsewhere && memory() || writes && bound() {
            return None;
        }
        if prove && tern_image::process::others_have(pid, fd, id) {
            self.direct.others.insert(fd);
            return None;
        }
        // What is read and written is not read ahead; and a long file is worth it at once.
        let much = reads && writes || u64::try_from(stat.st_size).is_ok_and(|size| size >= WORTH_OPENING);
        let place =
            if elsewhere && much && !is_shared { self.direct.trees.place_of(pid, fd, id) } else { None };
        let about = if !prove && place.is_none() && !is_shared && self.sees_users_as_we() {
            begins::about(&file)
        } else {
            None
        };
        if !writes {
            let tick = if elsewhere { TICK + APART } else { TICK };
            let (file, version, device) = (Arc::new(file), Version::of(&stat), stat.st_dev);
            let seen = SystemTime::now();
            let watched = Watched { file, version, tick, device, is_shared, seen, offered: false };
            self.direct.watched.insert(fd, watched);
        }
        let file = InHand { id, offset, reads, writes, local: !elsewhere && !prove };
        Some(Found { file, place, about })
    }

    /// Whether users and groups have the same numbers for it as for us.
    pub(crate) fn sees_users_as_we(&mut self) -> bool {
        let users = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/user")).ok();
        let pid = self.memory.pid().to_string();
        // What changes that is done at home only.
        *self
            .direct
            .same_users
            .get_or_insert_with(|| users(&pid).is_some_and(|own| users("self") == Some(own)))
    }
}

impl Direct {
    /// What another life was told is over; not what it is still to be told.
    fn of_life(&mut self, life: Epoch) {
        if std::mem::replace(&mut self.life, life) != life {
            let errors = std::mem::take(&mut self.errors);
            *self = Self { life, errors, ..Self::default() };
        }
    }

    /// A call that came first has returned this: the end of a file, or a write behind.
    pub(crate) fn came_first(&mut self, call: &Call, ret: i64) {
        let [fd, _, length, ..] = call.values();
        if i64::from(call.nr) == libc::SYS_close {
            self.forget(libc::SYS_close, &call.values());
        } else if i64::from(call.nr) == libc::SYS_pwrite64 && ret != length.cast_signed() {
            let error = if ret < 0 { ret } else { -i64::from(libc::ENOSPC) };
            tracing::warn!(fd, ret, length, "what was written behind could not be written");
            self.errors.insert(fd as i32, error);
        } else if let Some(written) = self.written.get_mut(&(fd as i32)) {
            written.bytes += length;
        }
    }

    /// Why an earlier write could not be made, if this call, which has succeeded, is one that tells it.
    fn error(&mut self, nr: i64, args: &[u64; 6], ret: i64) -> Option<i64> {
        let tells = [
            libc::SYS_write,
            libc::SYS_writev,
            libc::SYS_pwrite64,
            libc::SYS_fsync,
            libc::SYS_fdatasync,
            libc::SYS_close,
        ];
        if ret < 0 || !tells.contains(&nr) { None } else { self.errors.remove(&(args[0] as i32)) }
    }

    /// Descriptors that have become others'.
    fn forget(&mut self, nr: i64, args: &[u64; 6]) {
        let one = match nr {
            libc::SYS_close => args[0] as i32,
            libc::SYS_dup2 | libc::SYS_dup3 => args[1] as i32,
            libc::SYS_close_range | libc::SYS_execve | libc::SYS_execveat => {
                let Self { life, alone, same_users, .. } = *self;
                *self = Self { life, alone, same_users, ..Self::default() };
                return;
            }
            _ => return,
        };
        self.watched.remove(&one);
        self.written.remove(&one);
        self.transfers.remove(&one);
        self.others.remove(&one);
        self.errors.remove(&one);
    }

    /// A file goes in hand; what is to be said of another that cannot be looked after any more.
    fn give(&mut self, fd: i32, file: &InHand, elsewhere: Option<(u64, u64)>) -> Option<(i32, FileWord)> {
        if file.writes {
            self.written.insert(fd, Written { bytes: 0, elsewhere });
        }
        if self.watched.len() <= MOST {
            return None;
        }
        let other = self.watched.keys().copied().find(|other| *other != fd)?;
        self.watched.remove(&other);
        self.others.insert(other);
        Some((other, FileWord::Changed))
    }

    /// Where a file is of which so much was written by now that it is worth having it open there.
    fn place_of_much_written(&mut self, pid: i32) -> Option<(i32, FileWord)> {
        let Self { written, trees, .. } = self;
        let (fd, written) = written
            .iter_mut()
            .find(|(_, written)| written.bytes >= WORTH_OPENING && written.elsewhere.is_some())?;
        let place = trees.place_of(pid, *fd, written.elsewhere.take()?)?;
        Some((*fd, FileWord::Near(place)))
    }

    /// How long a file for reading is, if the next change of it will be seen.
    pub(crate) fn length_if_settled(&self, fd: i32, now: SystemTime) -> Option<u64> {
        let watched = self.watched.get(&fd)?;
        watched.was_settled(now).then(|| u64::try_from(watched.version.size).unwrap_or_default())
    }

    /// How long it is, if it has not changed since it was looked at.
    pub(crate) fn length_if_unchanged(&self, fd: i32) -> Option<u64> {
        let Watched { file, version, .. } = self.watched.get(&fd)?;
        let same = fstat(file).is_ok_and(|stat| Version::of(&stat) == *version);
        same.then(|| u64::try_from(version.size).unwrap_or_default())
    }

    /// Looks which files have changed, and which are as they were: what was read of them is good. What this very call, begun
    /// then, has read of one may be kept if that was not being changed in that moment: so it is what the file is now.
    fn look(&mut self, read: Option<i32>, begun: SystemTime) -> Vec<(i32, FileWord)> {
        let mut words = Vec::new();
        let Self { watched, looker, .. } = self;
        for (fd, watched) in watched {
            let looked =
                if watched.is_shared { looker.look(&watched.file) } else { Some(fstat(&watched.file).ok()) };
            // Its server says nothing: so nothing is said of it either.
            let Some(found) = looked else { continue };
            let Some(stat) = found else {
                words.push((*fd, FileWord::Changed));
                continue;
            };
            let now = Version::of(&stat);
            let changed = std::mem::replace(&mut watched.version, now) != now;
            if changed {
                (watched.seen, watched.offered) = (SystemTime::now(), false);
                words.push((*fd, FileWord::Changed));
            }
            let steady = if read == Some(*fd) { watched.was_settled(begun) } else { !changed };
            if steady {
                words.push((*fd, FileWord::Steady));
            }
        }
        words
    }

    /// A descriptor that this call shows to be worth a look, and whether nobody else can have what is behind it.
    fn candidate(&mut self, nr: i64, args: &[u64; 6], ret: i64) -> Option<(i32, bool)> {
        match nr {
            libc::SYS_open | libc::SYS_openat | libc::SYS_openat2 | libc::SYS_creat if ret >= 0 => {
                let fd = ret as i32;
                self.forget(libc::SYS_close, &[fd as u64, 0, 0, 0, 0, 0]);
                Some((fd, true))
            }
            libc::SYS_read | libc::SYS_write | libc::SYS_pread64 | libc::SYS_pwrite64 if ret >= 0 => {
                let fd = args[0] as i32;
                // What is in hand and small is not asked for: so it has been put down.
                let small = args[2] <= MOST_IN_HAND;
                if small && nr == libc::SYS_read {
                    self.watched.remove(&fd);
                } else if small && nr == libc::SYS_write {
                    self.written.remove(&fd);
                }
                if self.others.contains(&fd)
                    || self.watched.contains_key(&fd)
                    || self.written.contains_key(&fd)
                {
                    return None;
                }
                let transfers = self.transfers.entry(fd).or_default();
                *transfers += 1;
                if *transfers < TRANSFERS {
                    return None;
                }
                *transfers = 0;
                Some((fd, false))
            }
            _ => None,
        }
    }
}
