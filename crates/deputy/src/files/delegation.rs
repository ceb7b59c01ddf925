//! Granting file delegations. An open file that no other process shares is delegated to the guest,
//! so that its reads can be prefetched and its writes delayed there (docs/design/delegation.md).
//! This module decides what only home can know: whether an open file qualifies, and whether its
//! content has changed.

mod grant;
mod offer_shared;

use crate::files::connections::ConnectionOffers;
use crate::files::timed_worker::TimedWorker;
use crate::files::watches::Watches;
use rustix::fs::{Mode, OFlags, Stat, fstat, open};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tern_ids::Epoch;
use tern_image::node_file::{MfsMounts, NodeFile, allows_direct};
use tern_migrate::message::{FileDelegation, FileNotice, MAX_DELEGATED_IO};
use tern_migrate::prefetch::FileAttributes;
use tern_syscall::Call;

/// Two changes within this time may get the same timestamp; no tick of the kernel is longer.
const TIMESTAMP_GRANULARITY: Duration = Duration::from_millis(15);

/// Upper bound on the clock difference between nodes, which set the times of a file in MFS. Nodes
/// whose clocks differ more do not exchange processes.
const MAX_NODE_CLOCK_DIFFERENCE: Duration = Duration::from_millis(50);

/// Upper bound assumed for the clock error of a file server that nodes share.
const MAX_SERVER_CLOCK_ERROR: Duration = Duration::from_secs(300);

/// Granularity of a file system's coarsest timestamps, which have no fraction of a second.
const COARSE_GRANULARITY: Duration = Duration::from_secs(2);

/// A file that was open before its process left, or executed its program, is checked after this
/// many transfers. Proving that no other process has it takes a scan of all processes.
const TRANSFERS_BEFORE_CHECK: u32 = 4;

/// Upper bound on files delegated for reading; each costs an fstat with each call.
const MAX_READ_DELEGATIONS: usize = 16;

/// Files of at least this size are worth opening on their own node; opening one takes as long as
/// some twenty calls.
pub(crate) const MIN_LOCAL_OPEN_SIZE: u64 = 64 << 10;

/// Files are delegated for writing only while their file system has room for so many bytes. A program
/// has at most 256 KiB of delayed writes. So they fail only if this is used up within the second for
/// which they may be delayed.
const MIN_ROOM: u64 = 64 << 20;

/// Whether the file system of a file has room for delayed writes. Quotas of users are not considered.
fn has_room(file: &OwnedFd) -> bool {
    let found = rustix::fs::fstatvfs(file);
    // A tmpfs without a limit reports no blocks.
    found.is_ok_and(|fs| fs.f_blocks == 0 || fs.f_bavail.saturating_mul(fs.f_frsize) >= MIN_ROOM)
}

/// The delegated files of a process.
#[derive(Debug, Default)]
pub(crate) struct Delegations {
    /// The epoch that the delegations belong to.
    epoch: Epoch,
    /// Delegated for reading, by descriptor.
    pub(crate) read_delegations: BTreeMap<i32, ReadDelegation>,
    /// Makes the calls on files of MFS and of file systems that nodes share, which may wait.
    worker: TimedWorker,
    /// Delegated for writing, by descriptor.
    write_delegations: BTreeMap<i32, WriteDelegation>,
    /// The MFS trees in which the process has files open.
    trees: MfsMounts,
    /// Descriptors with delayed writes that were made since the room on their file systems was
    /// checked.
    flushed: BTreeSet<i32>,
    /// Errors of delayed writes that were not reported to the program yet, by descriptor.
    errors: BTreeMap<i32, i64>,
    /// Whether the process shares its descriptor table with no other process, once checked.
    has_own_descriptors: Option<bool>,
    /// Whether the process is in the shim's user namespace, once checked.
    in_same_user_ns: Option<bool>,
    /// Number of forwarded transfers, by descriptor.
    transfers: BTreeMap<i32, u32>,
    /// Descriptors that are not checked again: another process shares the open file, or may share
    /// it, or its file system is nearly full.
    pub(super) not_exclusive: BTreeSet<i32>,
    /// The connections that are offered to the guest's node.
    pub(crate) connections: ConnectionOffers,
    /// The descriptors whose readiness is reported to the guest.
    pub(crate) watches: Watches,
}

/// An open file that no other process shares.
struct Delegable {
    file: FileDelegation,
    /// Its location, if it is in MFS.
    location: Option<NodeFile>,
    /// It is in MFS or on a file system that nodes share.
    is_elsewhere: bool,
    /// Its status, if it has been opened just now.
    attributes: Option<FileAttributes>,
}

/// A file delegated for writing.
#[derive(Debug, Default)]
struct WriteDelegation {
    /// Number of bytes of delayed writes.
    bytes: u64,
    /// It is in MFS or on a file system that nodes share.
    is_elsewhere: bool,
    /// Its device and inode, if it may be in MFS and its location has not been looked up yet.
    elsewhere: Option<(u64, u64)>,
}

/// A file delegated for reading.
#[derive(Debug)]
pub(crate) struct ReadDelegation {
    pub(crate) file: Arc<OwnedFd>,
    pub(crate) version: FileVersion,
    /// Changes this close together may get the same timestamp.
    granularity: Duration,
    /// Its device number.
    pub(crate) device: u64,
    /// It is on a file system that nodes share, so its times are from a server's clock.
    pub(crate) is_shared: bool,
    /// A call on it may wait for another node or a server.
    may_wait: bool,
    /// When this version was first observed.
    observed_since: SystemTime,
    /// Its location has been sent for this version, or cannot be sent.
    pub(crate) location_sent: bool,
}

impl ReadDelegation {
    /// Whether every change since `at` has changed its version. If its times are from a server's
    /// clock, this holds if they are older than any error of that clock, or if, at `at`, this
    /// version had been observed for longer than the timestamp granularity.
    pub(crate) fn was_settled(&self, at: SystemTime) -> bool {
        let Self { version, granularity, is_shared, .. } = self;
        if !is_shared {
            return version.was_settled(at, *granularity);
        }
        let step = if version.is_coarse() { COARSE_GRANULARITY } else { *granularity };
        version.was_settled(at, MAX_SERVER_CLOCK_ERROR)
            || self.observed_since.checked_add(step).is_some_and(|until| until < at)
    }
}

/// Changes whenever a file's content does, except for changes within one [`TIMESTAMP_GRANULARITY`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileVersion {
    pub(crate) changed: Duration,
    pub(crate) modified: Duration,
    pub(crate) size: i64,
}

impl FileVersion {
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

    /// Whether every change since `at` has changed the version, if changes that are more than
    /// `granularity` apart get different timestamps.
    fn was_settled(&self, at: SystemTime, granularity: Duration) -> bool {
        let at = at.duration_since(UNIX_EPOCH).unwrap_or_default();
        self.changed + granularity < at && self.modified + granularity < at
    }
}

impl Delegations {
    /// Drops delegations of another epoch, but not the errors that are still to be reported.
    fn set_epoch(&mut self, epoch: Epoch) {
        if std::mem::replace(&mut self.epoch, epoch) != epoch {
            let errors = std::mem::take(&mut self.errors);
            let connections = self.connections.end_all();
            *self = Self { epoch, errors, connections, ..Self::default() };
        }
    }

    /// Ends the offers of connections and the watches of descriptors.
    fn end_offers(&mut self) {
        self.connections = self.connections.end_all();
        self.watches = Watches::default();
    }

    /// Watches descriptors of the process, and returns their readiness.
    pub(crate) fn watch(&mut self, epoch: Epoch, pid: i32, fds: &[i32]) -> Vec<(i32, Option<u32>)> {
        self.set_epoch(epoch);
        self.watches.watch(pid, fds)
    }

    /// Records the result of a prelude call: a close or a delayed write.
    pub(crate) fn prelude_call_done(&mut self, call: &Call, ret: i64) {
        let [fd, _, length, ..] = call.values();
        match i64::from(call.nr) {
            libc::SYS_close => self.forget_descriptors(libc::SYS_close, &call.values()),
            libc::SYS_pwrite64 if ret == length.cast_signed() => {
                if let Some(written) = self.write_delegations.get_mut(&(fd as i32)) {
                    written.bytes = written.bytes.saturating_add(length);
                    self.flushed.insert(fd as i32);
                }
            }
            libc::SYS_pwrite64 => {
                let error = if ret < 0 { ret } else { -i64::from(libc::ENOSPC) };
                tracing::warn!(fd, ret, length, "a delayed write failed");
                self.errors.insert(fd as i32, error);
            }
            _ => {}
        }
    }

    /// The error of an earlier delayed write, if this call, which has succeeded, reports such
    /// errors.
    fn take_write_error(&mut self, nr: i64, args: &[u64; 6], ret: i64) -> Option<i64> {
        let reporting_calls = [
            libc::SYS_write,
            libc::SYS_writev,
            libc::SYS_pwrite64,
            libc::SYS_fsync,
            libc::SYS_fdatasync,
            libc::SYS_close,
        ];
        if ret < 0 || !reporting_calls.contains(&nr) { None } else { self.errors.remove(&(args[0] as i32)) }
    }

    /// Forgets descriptors that this call has closed or reused.
    fn forget_descriptors(&mut self, nr: i64, args: &[u64; 6]) {
        let one = match nr {
            libc::SYS_close => args[0] as i32,
            libc::SYS_dup2 | libc::SYS_dup3 => args[1] as i32,
            libc::SYS_close_range | libc::SYS_execve | libc::SYS_execveat => {
                let Self { epoch, has_own_descriptors, in_same_user_ns, .. } = *self;
                let connections = self.connections.end_all();
                *self = Self { epoch, has_own_descriptors, in_same_user_ns, connections, ..Self::default() };
                return;
            }
            _ => return,
        };
        self.connections.forget(one);
        self.watches.forget(one);
        self.read_delegations.remove(&one);
        self.write_delegations.remove(&one);
        self.transfers.remove(&one);
        self.not_exclusive.remove(&one);
        self.flushed.remove(&one);
        self.errors.remove(&one);
    }

    /// Records a new delegation. If there are too many delegations for reading, another is
    /// recalled.
    fn grant(
        &mut self,
        fd: i32,
        file: &FileDelegation,
        (is_elsewhere, elsewhere): (bool, Option<(u64, u64)>),
    ) -> Option<(i32, FileNotice)> {
        if file.can_write {
            self.write_delegations.insert(fd, WriteDelegation { bytes: 0, is_elsewhere, elsewhere });
        }
        if self.read_delegations.len() <= MAX_READ_DELEGATIONS {
            return None;
        }
        let other = self.read_delegations.keys().copied().find(|other| *other != fd)?;
        self.read_delegations.remove(&other);
        self.not_exclusive.insert(other);
        Some((other, FileNotice::Changed))
    }

    /// Recalls the delegations of files that were written, if their file system is nearly full. Until
    /// they are closed, home makes each write, and the program gets the error.
    fn recall_without_room(&mut self, pid: i32) -> Vec<(i32, FileNotice)> {
        let Self { flushed, write_delegations, not_exclusive, .. } = self;
        let is_full = |fd: &i32| {
            // A server is not asked: it might not answer.
            let is_local = write_delegations.get(fd).is_some_and(|written| !written.is_elsewhere);
            let opened =
                || open(format!("/proc/{pid}/fd/{fd}"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
            is_local && opened().is_ok_and(|file| !has_room(&file))
        };
        let full: Vec<i32> = std::mem::take(flushed).into_iter().filter(is_full).collect();
        for fd in &full {
            write_delegations.remove(fd);
            not_exclusive.insert(*fd);
        }
        full.into_iter().map(|fd| (fd, FileNotice::Recalled)).collect()
    }

    /// The location of a file that is worth opening on its own node because so much was written to
    /// it.
    fn offer_written_location(&mut self, pid: i32) -> Option<(i32, FileNotice)> {
        let Self { write_delegations, trees, worker, .. } = self;
        let (fd, written) = write_delegations
            .iter_mut()
            .find(|(_, written)| written.bytes >= MIN_LOCAL_OPEN_SIZE && written.elsewhere.is_some())?;
        let ask = |link: std::path::PathBuf| worker.run(move || allows_direct(&link));
        let location = trees.locate_fd(pid, *fd, written.elsewhere.take()?, ask)?;
        Some((*fd, FileNotice::LocalFile(location)))
    }

    /// The size of a file delegated for reading, if its next change will be noticed.
    pub(crate) fn length_if_settled(&self, fd: i32, now: SystemTime) -> Option<u64> {
        let watched = self.read_delegations.get(&fd)?;
        watched.was_settled(now).then(|| u64::try_from(watched.version.size).unwrap_or_default())
    }

    /// The size of a file delegated for reading, if it has not changed since it was last checked.
    pub(crate) fn length_if_unchanged(&mut self, fd: i32) -> Option<u64> {
        let ReadDelegation { file, version, may_wait, .. } = self.read_delegations.get(&fd)?;
        let file = Arc::clone(file);
        let check = move || fstat(&*file).ok();
        let stat = if *may_wait { self.worker.run(check)? } else { check() };
        let same = stat.is_some_and(|stat| FileVersion::of(&stat) == *version);
        same.then(|| u64::try_from(version.size).unwrap_or_default())
    }

    /// Checks which delegated files have changed. The guest's cached data of unchanged files
    /// remains valid. If this call, which began at `began_at`, has read the descriptor `read`, the
    /// data may be cached if the file was not changing then.
    fn revalidate(&mut self, read: Option<i32>, began_at: SystemTime) -> Vec<(i32, FileNotice)> {
        let mut notices = Vec::new();
        let Self { read_delegations, worker, .. } = self;
        // One job for all, since it costs a wake-up of the worker.
        let waiting = read_delegations.iter().filter(|(_, watched)| watched.may_wait);
        let waiting: Vec<_> = waiting.map(|(fd, watched)| (*fd, Arc::clone(&watched.file))).collect();
        let is_any_waiting = !waiting.is_empty();
        let stat_all = move || -> BTreeMap<i32, Option<Stat>> {
            waiting.into_iter().map(|(fd, file)| (fd, fstat(&*file).ok())).collect()
        };
        let answers = if is_any_waiting { worker.run(stat_all) } else { None };
        for (fd, watched) in read_delegations {
            let found = if watched.may_wait {
                answers.as_ref().and_then(|answers| answers.get(fd).copied())
            } else {
                Some(fstat(&*watched.file).ok())
            };
            // A server has not answered, so no notice is sent.
            let Some(found) = found else { continue };
            let Some(stat) = found else {
                notices.push((*fd, FileNotice::Changed));
                continue;
            };
            let now = FileVersion::of(&stat);
            let changed = std::mem::replace(&mut watched.version, now) != now;
            if changed {
                (watched.observed_since, watched.location_sent) = (SystemTime::now(), false);
                notices.push((*fd, FileNotice::Changed));
            }
            let is_unchanged = if read == Some(*fd) { watched.was_settled(began_at) } else { !changed };
            if is_unchanged {
                notices.push((*fd, FileNotice::Unchanged));
            }
        }
        notices
    }

    /// A descriptor that is worth checking after this call, and whether the call has opened it, so
    /// that no other process can share its file.
    fn candidate(&mut self, nr: i64, args: &[u64; 6], ret: i64) -> Option<(i32, bool)> {
        match nr {
            libc::SYS_open | libc::SYS_openat | libc::SYS_openat2 | libc::SYS_creat if ret >= 0 => {
                let fd = ret as i32;
                self.forget_descriptors(libc::SYS_close, &[fd as u64, 0, 0, 0, 0, 0]);
                Some((fd, true))
            }
            libc::SYS_read | libc::SYS_write | libc::SYS_pread64 | libc::SYS_pwrite64 if ret >= 0 => {
                let fd = args[0] as i32;
                // A guest requests a small transfer from home only after it has returned the
                // delegation of the file.
                let small = args[2] <= MAX_DELEGATED_IO;
                if small && nr == libc::SYS_read {
                    self.read_delegations.remove(&fd);
                } else if small && nr == libc::SYS_write {
                    self.write_delegations.remove(&fd);
                }
                if self.not_exclusive.contains(&fd)
                    || self.read_delegations.contains_key(&fd)
                    || self.write_delegations.contains_key(&fd)
                {
                    return None;
                }
                let transfers = self.transfers.entry(fd).or_default();
                *transfers += 1;
                if *transfers < TRANSFERS_BEFORE_CHECK {
                    return None;
                }
                *transfers = 0;
                Some((fd, false))
            }
            _ => None,
        }
    }
}
