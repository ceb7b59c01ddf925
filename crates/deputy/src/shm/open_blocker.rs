//! Blocks opens for writing of memory that processes away share, until their group is home.
//! Otherwise the group would overwrite such writes when it returns, without having seen them.
//!
//! The kernel asks before it opens a watched file (fanotify(7), FAN_OPEN_PERM), and a thread of the
//! shim answers. Read-only opens pass at once: some programs open the files of all others (each
//! Java machine does when it starts). An openat2 may be read-only too, but its flags are in the
//! program's memory, so it is blocked. Opens by shims pass at once: other processes wait for shims.
//! The main loop lets opens by the group itself pass at once, since [`super::access`] checks the
//! use of the descriptor, and all other opens when the group is home.
//!
//! A blocked thread sleeps in state D (killable). A shim that stops a process does not wait for
//! threads in that state ([`crate::stops::quiesce`]). So a blocked thread blocks no shim, whichever
//! shim traces it. Two groups can block each other for ever if a process of each group opens what
//! the other group shares. So an open fails with EPERM after [`MAX_BLOCK_TIME`]. If the kernel let
//! it pass instead, its writes would be lost without an error.
//!
//! If the shim ends, the kernel lets all opens pass. All of this needs CAP_SYS_ADMIN: without it
//! nothing is blocked.

use super::openers::is_shim;
use crate::waker::Waker;
use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyEvent, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_image::object::ObjectId;
use tern_tracee::{procfs, threads};

/// How long an open is blocked at most. The kernel waits as long for the holder of a lease
/// (lease-break-time, fcntl(2)).
const MAX_BLOCK_TIME: Duration = Duration::from_secs(45);
/// How often the thread checks for opens that were blocked long enough.
const EXPIRY_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Within this time after an open was allowed, its descriptor appears in the process, where a scan
/// finds it. This module does not look for the descriptor itself: a process outside the group may
/// have very many descriptors.
const MAX_OPENING_TIME: Duration = Duration::from_secs(1);

/// The blocker, as seen by the main loop.
#[derive(Debug)]
pub(crate) struct OpenBlocker {
    thread_state: Arc<BlockerThread>,
    watched: HashMap<ObjectId, File>,
    /// The opens by threads outside the group that were allowed at these times, and may not be
    /// finished: device and inode, thread, time.
    opening: Vec<((u64, u64), HomePid, Instant)>,
}

#[derive(Debug)]
struct BlockerThread {
    fanotify: Fanotify,
    waiting: Mutex<Vec<BlockedOpen>>,
}

/// A thread in open(2).
#[derive(Debug)]
struct BlockedOpen {
    event: FanotifyEvent,
    tid: HomePid,
    inode: (u64, u64),
    until: Instant,
}

impl OpenBlocker {
    /// A blocker that watches nothing yet.
    ///
    /// # Errors
    /// Without CAP_SYS_ADMIN, or if the kernel does not support permission events.
    pub(crate) fn new(waker: Waker) -> io::Result<Self> {
        let init = InitFlags::FAN_CLASS_CONTENT
            | InitFlags::FAN_CLOEXEC
            | InitFlags::FAN_NONBLOCK
            | InitFlags::FAN_REPORT_TID;
        let fanotify = Fanotify::init(init, EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC)?;
        let thread_state = Arc::new(BlockerThread { fanotify, waiting: Mutex::default() });
        let thread = Arc::clone(&thread_state);
        threads::spawn("open-blocker", 256 << 10, move || thread.run(&waker))?;
        Ok(Self { thread_state, watched: HashMap::new(), opening: Vec::new() })
    }

    /// Watches an object that has a name.
    ///
    /// # Errors
    /// If the user's marks are used up, or its file system does not support them.
    pub(crate) fn add(&mut self, id: ObjectId, file: &File) -> io::Result<()> {
        let file = file.try_clone()?;
        self.thread_state.fanotify.mark(
            MarkFlags::FAN_MARK_ADD,
            MaskFlags::FAN_OPEN_PERM,
            &file,
            None::<&str>,
        )?;
        self.watched.insert(id, file);
        Ok(())
    }

    /// Stops watching objects that are not needed any more.
    pub(crate) fn retain(&mut self, in_use: impl Fn(&ObjectId) -> bool) {
        let fanotify = &self.thread_state.fanotify;
        self.watched.retain(|id, file| {
            let kept = in_use(id);
            if !kept {
                let (remove, perm) = (MarkFlags::FAN_MARK_REMOVE, MaskFlags::FAN_OPEN_PERM);
                // Two objects may be the same file. Its mark was then removed with the first.
                let _gone = fanotify.mark(remove, perm, &*file, None::<&str>);
            }
            kept
        });
    }

    /// The blocked opens: device and inode of the file, and the thread that opens it.
    pub(crate) fn blocked(&self) -> Vec<((u64, u64), HomePid)> {
        self.thread_state.waiting().iter().map(|one| (one.inode, one.tid)).collect()
    }

    /// Lets the blocked opens of a file by a thread pass.
    pub(crate) fn pass(&mut self, inode: (u64, u64), tid: HomePid) {
        self.thread_state.waiting().retain(|one| {
            let is_this = (one.inode, one.tid) == (inode, tid);
            if is_this {
                self.thread_state.respond(&one.event, Response::FAN_ALLOW);
            }
            !is_this
        });
    }

    /// As [`pass`](Self::pass), for a thread outside the group. The group does not move again until
    /// this open is finished.
    pub(super) fn pass_outsider(&mut self, inode: (u64, u64), tid: HomePid) {
        self.forget_opened();
        self.opening.push((inode, tid, Instant::now()));
        self.pass(inode, tid);
    }

    fn forget_opened(&mut self) {
        self.opening.retain(|(_, tid, since)| since.elapsed() < MAX_OPENING_TIME && procfs::is_alive(tid.0));
    }

    /// A thread that was allowed to open this file and does not have it open yet: no scan finds it.
    pub(crate) fn opening_thread(&mut self, inode: (u64, u64)) -> Option<HomePid> {
        self.forget_opened();
        self.opening.iter().find(|(opened, ..)| *opened == inode).map(|(_, tid, _)| *tid)
    }
}

impl BlockerThread {
    fn waiting(&self) -> MutexGuard<'_, Vec<BlockedOpen>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the kernel for as long as the shim lives.
    fn run(&self, waker: &Waker) {
        loop {
            let timeout = Some(&EXPIRY_CHECK_INTERVAL).filter(|_| !self.waiting().is_empty());
            let _any = poll(&mut [PollFd::new(&self.fanotify, PollFlags::IN)], timeout);
            let mut new = Vec::new();
            for event in self.fanotify.read_events().unwrap_or_default() {
                let tid = HomePid(event.pid());
                let meta = event.fd().map(rustix::fs::fstat);
                match meta {
                    Some(Ok(meta)) if may_write(tid) && !is_shim(tid.0) => {
                        let inode = (meta.st_dev, meta.st_ino);
                        new.push(BlockedOpen { event, tid, inode, until: Instant::now() + MAX_BLOCK_TIME });
                    }
                    _ => self.respond(&event, Response::FAN_ALLOW),
                }
            }
            let any_new = !new.is_empty();
            let mut waiting = self.waiting();
            waiting.extend(new);
            waiting.retain(|one| {
                let long = one.until < Instant::now();
                if long {
                    tracing::warn!(tid = %one.tid, "an open of shared memory was refused: its group does not come home");
                    self.respond(&one.event, Response::FAN_DENY);
                }
                !long
            });
            drop(waiting);
            if any_new {
                waker.wake();
            }
        }
    }

    fn respond(&self, event: &FanotifyEvent, response: Response) {
        if let Some(fd) = event.fd() {
            // The process may have been killed.
            let _gone = self.fanotify.write_response(FanotifyResponse::new(fd, response));
        }
    }
}

/// Whether a thread in open(2) may write to the file later, as far as its arguments show.
fn may_write(tid: HomePid) -> bool {
    let call = std::fs::read_to_string(format!("/proc/{tid}/syscall")).unwrap_or_default();
    let mut words = call.split_whitespace();
    let nr: Option<i64> = words.next().and_then(|word| word.parse().ok());
    let flags = |mut rest: std::str::SplitWhitespace<'_>, at: usize| {
        let word = rest.nth(at).and_then(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
        word.is_none_or(|flags| flags as i32 & (libc::O_ACCMODE | libc::O_TRUNC) != libc::O_RDONLY)
    };
    match nr {
        Some(libc::SYS_open) => flags(words, 1),
        Some(libc::SYS_openat) => flags(words, 2),
        Some(libc::SYS_execve | libc::SYS_execveat) => false,
        _ => true,
    }
}
