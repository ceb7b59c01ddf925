//! The readiness of descriptors at home, for a guest that waits for them together with connections
//! of its node (docs/design/connections.md).
//!
//! The shim has the open files in an edge-triggered epoll set, and reports each event with the
//! file's readiness. An end of readiness is no event: the shim finds it when it looks at a descriptor
//! after a call of the process. If another process has taken the data meanwhile, the guest's wait may
//! still report it, as if that had happened right after the wait.

use crate::links::peer::Peer;
use crate::process::Process;
use crate::shim::Shim;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::collections::BTreeMap;
use std::fs::read_link;
use std::os::fd::OwnedFd;
use tern_ids::HomePid;
use tern_migrate::message::Message;

/// Maximum number of descriptors of a process that are watched at a time.
const MAX_WATCHES: usize = 1024;

/// Maximum number of descriptors of one open file that are watched.
const MAX_COPIES: usize = 16;

/// Maximum number of events that are reported at a time.
const MAX_EVENTS: usize = 64;

/// Maximum number of readable descriptors that are looked at after a call. The call may have read
/// from a copy of any of them.
const MAX_RECHECKED: usize = 16;

/// The events of poll(2) that a file may report.
const ALL: u32 = (libc::EPOLLIN
    | libc::EPOLLPRI
    | libc::EPOLLOUT
    | libc::EPOLLERR
    | libc::EPOLLHUP
    | libc::EPOLLRDNORM
    | libc::EPOLLRDBAND
    | libc::EPOLLWRNORM
    | libc::EPOLLWRBAND
    | libc::EPOLLRDHUP) as u32;

/// The kinds of files without a path that are watched. Not signalfd: its readiness depends on the
/// process that asks. Not epoll sets: a connection of the guest's node may be in one.
const WATCHABLE: [&str; 4] =
    ["anon_inode:[eventfd]", "anon_inode:[timerfd]", "anon_inode:inotify", "anon_inode:[pidfd]"];

/// Readiness by descriptor; none if it cannot be reported.
type Report = Vec<(i32, Option<u32>)>;

/// The watched descriptors of a process.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    /// Their open files. The set does not keep them open. A closed file leaves it.
    set: Option<OwnedFd>,
    by_fd: BTreeMap<i32, Watch>,
    /// The number of watches so far.
    count: u64,
}

#[derive(Debug)]
struct Watch {
    /// The data of its events.
    key: u64,
    /// The readiness that was last reported.
    reported: u32,
}

impl Watches {
    /// Watches descriptors of a process, and returns their readiness.
    pub(crate) fn watch(&mut self, pid: i32, fds: &[i32]) -> Report {
        fds.iter().take(MAX_WATCHES).map(|fd| (*fd, self.watch_one(pid, *fd))).collect()
    }

    fn watch_one(&mut self, pid: i32, fd: i32) -> Option<u32> {
        // A copy of another file would be closed again, which may ask a file server.
        if !is_watchable(pid, fd) {
            return None;
        }
        let file = copy(pid, fd)?;
        let readiness = readiness(&file)?;
        if !self.by_fd.contains_key(&fd) {
            self.add(pid, fd, file)?;
        }
        self.by_fd.get_mut(&fd)?.reported = readiness;
        Some(readiness)
    }

    /// Adds an open file to the set. A member of a set is known by its file and its number, so two
    /// descriptors of one file need copies with different numbers.
    fn add(&mut self, pid: i32, fd: i32, file: OwnedFd) -> Option<()> {
        if self.by_fd.len() >= MAX_WATCHES {
            return None;
        }
        if self.set.is_none() {
            self.set = epoll::create(CreateFlags::CLOEXEC).ok();
        }
        let set = self.set.as_ref()?;
        self.count += 1;
        let flags = EventFlags::from_bits_retain(ALL) | EventFlags::ET;
        let mut copies = vec![file];
        loop {
            match epoll::add(set, copies.last()?, EventData::new_u64(self.count), flags) {
                // A file that is always ready, such as /dev/null.
                Ok(()) | Err(Errno::PERM) => break,
                Err(Errno::EXIST) if copies.len() < MAX_COPIES => copies.push(copy(pid, fd)?),
                Err(_) => return None,
            }
        }
        self.by_fd.insert(fd, Watch { key: self.count, reported: 0 });
        Some(())
    }

    /// Forgets a descriptor that was closed or replaced.
    pub(crate) fn forget(&mut self, fd: i32) {
        self.by_fd.remove(&fd);
    }

    /// The readiness that a call with these arguments has changed.
    fn changed_by(&mut self, pid: i32, args: &[u64; 6]) -> Report {
        if self.by_fd.is_empty() {
            return Vec::new();
        }
        let named = [args[0] as i32, args[1] as i32];
        let may_end = |watch: &Watch| watch.reported & (libc::POLLIN | libc::POLLPRI) as u32 != 0;
        let mut rechecked = 0;
        let mut report = Vec::new();
        for (fd, watch) in &mut self.by_fd {
            if !named.contains(fd) {
                if rechecked >= MAX_RECHECKED || !may_end(watch) {
                    continue;
                }
                rechecked += 1;
            }
            let Some(now) = copy(pid, *fd).and_then(|file| readiness(&file)) else { continue };
            if std::mem::replace(&mut watch.reported, now) != now {
                report.push((*fd, Some(now)));
            }
        }
        report
    }

    /// The events since the last time.
    fn events(&mut self) -> Report {
        let Some(set) = &self.set else { return Vec::new() };
        let mut events = Vec::with_capacity(MAX_EVENTS);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if epoll::wait(set, rustix::buffer::spare_capacity(&mut events), Some(&now)).is_err() {
            return Vec::new();
        }
        let mut report = Vec::new();
        for event in events {
            let (key, readiness) = ({ event.data }.u64(), { event.flags }.bits());
            if let Some((fd, watch)) = self.by_fd.iter_mut().find(|(_, watch)| watch.key == key) {
                watch.reported = readiness;
                report.push((*fd, Some(readiness)));
            }
        }
        report
    }
}

/// A copy of a process's descriptor.
pub(super) fn copy(pid: i32, fd: i32) -> Option<OwnedFd> {
    let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    pidfd_getfd(process, fd, PidfdGetfdFlags::empty()).ok()
}

/// The present readiness of a file.
fn readiness(file: &OwnedFd) -> Option<u32> {
    let mut fds = [PollFd::new(file, PollFlags::from_bits_retain(ALL as u16))];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).ok()?;
    Some(u32::from(fds[0].revents().bits()))
}

/// Whether a file reports its readiness without waiting for others, and to all processes alike.
pub(super) fn is_watchable(pid: i32, fd: i32) -> bool {
    let at = format!("/proc/{pid}/fd/{fd}");
    let Ok(target) = read_link(&at) else { return false };
    if target.to_str().is_some_and(|target| WATCHABLE.contains(&target)) {
        return true;
    }
    // Without DONT_SYNC this might ask a file server.
    let Ok(found) = statx(CWD, at, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE) else { return false };
    match FileType::from_raw_mode(u32::from(found.stx_mode)) {
        FileType::Socket | FileType::Fifo => true,
        // Memory devices and terminals.
        FileType::CharacterDevice => matches!(found.stx_rdev_major, 1 | 4 | 5 | 136..=143),
        _ => false,
    }
}

impl Shim {
    /// Watches descriptors of a process for its guest.
    pub(crate) fn watch_descriptors(&mut self, pid: HomePid, fds: &[i32]) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let report = process.delegations.watch(process.epoch, process.memory.pid(), fds);
        self.send(pid, &Message::Readiness(report));
    }

    /// Reports what a call of a process has changed. Called before its result is sent.
    pub(crate) fn report_changed_readiness(&mut self, pid: HomePid, args: &[u64; 6]) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let report = process.delegations.watches.changed_by(process.memory.pid(), args);
        if !report.is_empty() {
            self.send(pid, &Message::Readiness(report));
        }
    }

    /// Reports the events of the watched descriptors of a process, unless the link to its guest is
    /// full: the events then stay in the set. Called before each message by which the program could
    /// learn of their cause.
    pub(crate) fn report_events(&mut self, pid: HomePid) {
        // Most processes have no watches, and this precedes each result and each signal.
        let may_have_events =
            |process: &&mut Process| process.delegations.watches.set.is_some() && process.is_away();
        let Some(process) = self.processes.get_mut(&pid).filter(may_have_events) else { return };
        if !self.peers.get(process.peer).is_some_and(Peer::is_ready) {
            return;
        }
        let report = process.delegations.watches.events();
        if !report.is_empty() {
            self.send(pid, &Message::Readiness(report));
        }
    }

    /// Reports the events of all watched descriptors.
    pub(crate) fn report_readiness(&mut self) {
        let watches = |process: &&Process| process.delegations.watches.set.is_some();
        let pids: Vec<HomePid> = self.processes.values().filter(watches).map(|process| process.pid).collect();
        pids.into_iter().for_each(|pid| self.report_events(pid));
    }

    /// The sets of watched descriptors whose events can be reported, readable if there are any.
    pub(crate) fn watched_sets(&self) -> impl Iterator<Item = &OwnedFd> {
        let may_report = |process: &&Process| {
            process.is_away() && self.peers.get(process.peer).is_some_and(Peer::is_ready)
        };
        let away = self.processes.values().filter(may_report);
        away.filter_map(|process| process.delegations.watches.set.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    const IN: u32 = libc::POLLIN as u32;

    fn me() -> i32 {
        std::process::id() as i32
    }

    fn is_readable(report: &Report, fd: i32) -> bool {
        matches!(report[..], [(found, Some(readiness))] if found == fd && readiness & IN != 0)
    }

    #[test]
    fn events_and_ends_of_readiness_are_reported() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        let (fd, mut watches) = (one.as_raw_fd(), Watches::default());
        let first = watches.watch(me(), &[fd]);
        assert!(matches!(first[..], [(found, Some(readiness))] if found == fd && readiness & IN == 0));
        // The event of the addition, since it can be written to.
        watches.events();
        assert!(watches.events().is_empty());
        for _ in 0..2 {
            other.write_all(b"ab").unwrap();
            assert!(is_readable(&watches.events(), fd), "each arrival is an event");
        }
        one.read_exact(&mut [0; 3]).unwrap();
        assert!(watches.changed_by(me(), &[fd as u64; 6]).is_empty(), "there is more");
        one.read_exact(&mut [0; 1]).unwrap();
        let unrelated = [u64::MAX; 6];
        let ended = watches.changed_by(me(), &unrelated);
        assert!(matches!(ended[..], [(found, Some(readiness))] if found == fd && readiness & IN == 0));
        assert!(watches.changed_by(me(), &unrelated).is_empty() && watches.events().is_empty());
    }

    #[test]
    fn watching_keeps_no_file_open() {
        let (one, mut other) = UnixStream::pair().unwrap();
        let (fd, mut watches) = (one.as_raw_fd(), Watches::default());
        watches.watch(me(), &[fd]);
        drop(one);
        assert_eq!(other.read(&mut [0]).unwrap(), 0, "the other end sees the close");
        watches.forget(fd);
        assert!(watches.events().is_empty());
    }

    #[test]
    fn descriptor_that_is_used_again_is_watched_again() {
        let (first, _other) = UnixStream::pair().unwrap();
        let (fd, mut watches) = (first.as_raw_fd(), Watches::default());
        watches.watch(me(), &[fd]);
        let (second, mut other) = UnixStream::pair().unwrap();
        watches.forget(fd);
        let mut first = OwnedFd::from(first);
        rustix::io::dup2(&second, &mut first).unwrap();
        watches.watch(me(), &[fd]);
        watches.events();
        other.write_all(b"a").unwrap();
        assert!(is_readable(&watches.events(), fd));
    }

    #[test]
    fn two_descriptors_of_one_file_are_watched() {
        let (one, mut other) = UnixStream::pair().unwrap();
        let (copy, mut watches) = (one.try_clone().unwrap(), Watches::default());
        let report = watches.watch(me(), &[one.as_raw_fd(), copy.as_raw_fd()]);
        assert!(report.iter().all(|(_, readiness)| readiness.is_some()), "{report:?}");
        watches.events();
        other.write_all(b"a").unwrap();
        assert_eq!(watches.events().len(), 2);
    }

    #[test]
    fn files_that_may_wait_are_not_watched() {
        let regular = std::fs::File::open("/proc/self/exe").unwrap();
        let directory = std::fs::File::open("/").unwrap();
        let (pipe, _end) = rustix::pipe::pipe().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let watch = |fd| Watches::default().watch(me(), &[fd])[0].1.is_some();
        assert!(!watch(regular.as_raw_fd()) && !watch(directory.as_raw_fd()) && !watch(9999));
        assert!(watch(pipe.as_raw_fd()) && watch(null.as_raw_fd()));
    }
}
