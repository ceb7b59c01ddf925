//! Files that only report readiness. A program opens such a file, sets its readiness, and passes it
//! to another process, in which `poll`, `select` and `epoll` report exactly that readiness. So a
//! process can wait in one call for files of its own node and for files elsewhere.
//!
//! They are files of a FUSE file system that is mounted nowhere. The kernel requests the readiness of
//! an open file with FUSE_POLL. This program reports each change with FUSE_NOTIFY_POLL, after which the
//! kernel wakes the waiting processes and requests the readiness again.
#![forbid(unsafe_code)]

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags,
    PollEvents, PollFlags, PollNotifier, ReplyAttr, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyPoll, Request,
    Session, SessionACL,
};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen,
};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

/// Bytes of stack of the thread that runs the session.
const STACK_SIZE: usize = 256 << 10;

/// The root directory.
const ROOT: u64 = 1;

/// The FUSE device and the root of a new file system, for [`ReadinessFiles::serve`]. Needs root.
///
/// # Errors
/// If this kernel has no FUSE, or a privilege is missing; nothing remains then.
pub fn mount() -> io::Result<(OwnedFd, OwnedFd)> {
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let files = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let files = files.as_fd();
    fsconfig_set_string(files, "source", "tern-readiness")?;
    fsconfig_set_string(files, "fd", device.as_raw_fd().to_string())?;
    for (key, value) in [("rootmode", "40000"), ("user_id", "0"), ("group_id", "0")] {
        fsconfig_set_string(files, key, value)?;
    }
    fsconfig_set_flag(files, "allow_other")?;
    fsconfig_create(files)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_RDONLY;
    Ok((device, fsmount(files, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?))
}

/// A file system of such files, which threads of this process serve. It ends when this and all its
/// files are closed.
#[derive(Debug)]
pub struct ReadinessFiles {
    root: OwnedFd,
    next: AtomicU64,
    table: Arc<Table>,
}

/// An open file. Copies of its descriptor are ready as this one is; closing this leaves them as they
/// are.
#[derive(Debug)]
pub struct ReadinessFile {
    file: OwnedFd,
    number: u64,
    table: Arc<Table>,
}

/// The readiness of the open files, by number.
#[derive(Debug, Default)]
struct Table(Mutex<BTreeMap<u64, State>>);

#[derive(Debug)]
struct State {
    /// Events of poll(2).
    readiness: u32,
    /// Wakes the processes that wait, if one has waited.
    waiters: Option<PollNotifier>,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, State>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReadinessFiles {
    /// Serves a new file system.
    ///
    /// # Errors
    /// If the kernel does not answer, or no thread can be started.
    pub fn serve(device: OwnedFd, root: OwnedFd) -> io::Result<Self> {
        let table = Arc::new(Table::default());
        let session =
            Session::from_fd(Server(table.clone()), device, SessionACL::All, fuser::Config::default())?;
        let run = move || {
            if let Err(error) = session.run() {
                tracing::warn!(%error, "readiness is not reported any more");
            }
        };
        std::thread::Builder::new().name("readiness".into()).stack_size(STACK_SIZE).spawn(run)?;
        let files = Self { root, next: AtomicU64::new(ROOT + 1), table };
        // After the first close the kernel knows that it need not ask, so that later ones do not wait.
        drop(files.open(0)?);
        Ok(files)
    }

    /// Opens a file with this readiness, given by events of poll(2). Waits for the threads that
    /// serve it.
    ///
    /// # Errors
    /// If there are too many open files.
    pub fn open(&self, readiness: u32) -> io::Result<ReadinessFile> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.table.lock().insert(number, State { readiness, waiters: None });
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.root, number.to_string(), flags, Mode::empty()) {
            Ok(file) => Ok(ReadinessFile { file, number, table: self.table.clone() }),
            Err(error) => {
                self.table.lock().remove(&number);
                Err(error.into())
            }
        }
    }
}

impl ReadinessFile {
    /// Sets the readiness, and wakes the processes that wait unless there is only less of it. To set
    /// the same readiness again reports a new event, as `epoll` with EPOLLET shows it. Does not wait.
    pub fn set(&self, readiness: u32) {
        let waiters = self.table.lock().get_mut(&self.number).and_then(|state| {
            let before = std::mem::replace(&mut state.readiness, readiness);
            let is_event = readiness == before || readiness & !before != 0;
            state.waiters.clone().filter(|_| is_event)
        });
        // Without waiters the kernel knows no such file any more, and needs not know.
        let _nobody_waits = waiters.map(PollNotifier::notify);
    }
}

impl AsFd for ReadinessFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The file system.
struct Server(Arc<Table>);

impl Server {
    fn attributes(&self, number: u64) -> Option<FileAttr> {
        let kind = match number {
            ROOT => FileType::Directory,
            _ if self.0.lock().contains_key(&number) => FileType::RegularFile,
            _ => return None,
        };
        Some(FileAttr {
            ino: INodeNo(number),
            size: 0,
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: 0o555,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Filesystem for Server {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let number = name.to_str().and_then(|name| name.parse().ok());
        match number.and_then(|number| self.attributes(number)) {
            Some(attributes) => reply.entry(&Duration::ZERO, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(number.0) {
            Some(attributes) => reply.attr(&Duration::ZERO, &attributes),
            None => reply.error(Errno::ESTALE),
        }
    }

    fn open(&self, _: &Request, number: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(number.0), FopenFlags::empty());
    }

    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        waiters: PollNotifier,
        _: PollEvents,
        _: PollFlags,
        reply: ReplyPoll,
    ) {
        // The kernel has added the caller to those that it wakes before it sent this request. So a
        // change that is made after this readiness is read wakes the caller.
        let readiness = self.0.lock().get_mut(&handle.0).map(|state| {
            state.waiters = Some(waiters);
            state.readiness
        });
        reply.poll(PollEvents::from_bits_retain(readiness.unwrap_or(libc::POLLERR as u32)));
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.0.lock().remove(&handle.0);
        reply.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
    use rustix::event::{PollFd, Timespec, poll};

    fn files() -> ReadinessFiles {
        let (device, root) = mount().unwrap();
        ReadinessFiles::serve(device, root).unwrap()
    }

    fn ready(set: &OwnedFd, seconds: i64) -> Vec<u32> {
        let mut events = Vec::with_capacity(8);
        let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
        epoll::wait(set, rustix::buffer::spare_capacity(&mut events), Some(&timeout)).unwrap();
        // A copy, since the structure is packed.
        events.iter().map(|event| { event.flags }.bits()).collect()
    }

    const ALL: u32 = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLPRI | libc::EPOLLRDHUP) as u32;

    #[test]
    fn each_readiness_is_reported_as_it_was_set() {
        let files = files();
        for bits in
            [libc::EPOLLIN, libc::EPOLLOUT, libc::EPOLLPRI, libc::EPOLLRDHUP, libc::EPOLLHUP, libc::EPOLLERR]
        {
            let (bits, file) = (bits as u32, files.open(0).unwrap());
            let set = epoll::create(CreateFlags::CLOEXEC).unwrap();
            epoll::add(&set, &file, EventData::new_u64(1), EventFlags::from_bits_retain(ALL)).unwrap();
            assert!(ready(&set, 0).is_empty());
            file.set(bits);
            assert_eq!((ready(&set, 60), ready(&set, 0)), (vec![bits], vec![bits]), "level-triggered");
            file.set(0);
            assert!(ready(&set, 0).is_empty(), "{bits:x}");
        }
    }

    #[test]
    fn each_change_is_an_edge() {
        let (files, set) = (files(), epoll::create(CreateFlags::CLOEXEC).unwrap());
        let file = files.open(libc::POLLIN as u32).unwrap();
        let flags = EventFlags::from_bits_retain(ALL) | EventFlags::ET;
        epoll::add(&set, &file, EventData::new_u64(1), flags).unwrap();
        let readable = vec![libc::POLLIN as u32];
        assert_eq!((ready(&set, 60), ready(&set, 0)), (readable.clone(), vec![]));
        file.set(libc::POLLIN as u32);
        assert_eq!((ready(&set, 60), ready(&set, 0)), (readable, vec![]), "the same readiness again");
    }

    #[test]
    fn waiting_process_is_woken() {
        let files = files();
        let file = files.open(0).unwrap();
        let copy = file.as_fd().try_clone_to_owned().unwrap();
        let waiting = std::thread::spawn(move || {
            let mut fds = [PollFd::new(&copy, rustix::event::PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })).unwrap()
        });
        // Whether the other thread waits already makes no difference.
        file.set(libc::POLLIN as u32);
        assert_eq!(waiting.join().unwrap(), 1);
    }

    #[test]
    fn closed_files_are_forgotten() {
        let files = files();
        let table = files.table.clone();
        for _ in 0..100 {
            drop(files.open(0).unwrap());
        }
        let until = std::time::Instant::now() + Duration::from_secs(60);
        while !table.lock().is_empty() {
            assert!(std::time::Instant::now() < until, "the kernel reports each close");
            std::thread::yield_now();
        }
    }
}
