//! Blocks opens for writing of memory that is shared away, until the group is home. Otherwise what
//! is written would be overwritten when the group returns, and the group would never see it.
//!
//! The kernel asks before it opens a watched file (fanotify(7), FAN_OPEN_PERM), and a thread of the
//! shim answers. Three kinds of opens pass at once:
//!
//! * for reading only, since some programs open the files of all others (each Java machine does
//!   when it starts);
//! * by shims, since other processes wait for them;
//! * by processes that this shim traces: it may be about to stop them, and [`super::access`]
//!   checks their calls.
//!
//! All others pass when the main loop decides so, or after [`MAX_BLOCK_TIME`]. If the shim ends,
//! the kernel lets all of them pass. This needs CAP_SYS_ADMIN: without it nothing is blocked.

use crate::process::{Process, State};
use crate::shim::Shim;
use crate::shm::sharers::is_shim;
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
use tern_tracee::procfs;

/// How long an open is blocked at most. Less than the time after which a guest without contact to
/// home is suspended: home may be waiting for the blocked process, to stop it.
const MAX_BLOCK_TIME: Duration = Duration::from_secs(3);
/// The same for a process that another shim traces. That shim may be waiting for the process to
/// stop, and its whole family with it. And this shim may be waiting for a process that the other
/// shim blocks in the same way.
const MAX_TRACED_BLOCK_TIME: Duration = Duration::from_millis(300);
/// How often the thread checks for opens that were blocked long enough.
const EXPIRY_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The blocker, as seen by the main loop.
#[derive(Debug)]
pub(crate) struct OpenBlocker {
    thread_state: Arc<BlockerThread>,
    watched: HashMap<ObjectId, File>,
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
        std::thread::Builder::new().name("open-blocker".into()).spawn(move || thread.run(&waker))?;
        Ok(Self { thread_state, watched: HashMap::new() })
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
}

impl BlockerThread {
    fn waiting(&self) -> MutexGuard<'_, Vec<BlockedOpen>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the kernel for as long as the shim lives.
    fn run(&self, waker: &Waker) {
        let own = std::process::id() as i32;
        loop {
            let timeout = Some(&EXPIRY_CHECK_INTERVAL).filter(|_| !self.waiting().is_empty());
            let _any = poll(&mut [PollFd::new(&self.fanotify, PollFlags::IN)], timeout);
            let mut new = Vec::new();
            for event in self.fanotify.read_events().unwrap_or_default() {
                let tid = HomePid(event.pid());
                let holder = procfs::status(tid.0).map_or(0, |status| status.tracer);
                let meta = event.fd().map(rustix::fs::fstat);
                match meta {
                    Some(Ok(meta)) if may_write(tid) && !is_shim(tid.0) && holder != own => {
                        let inode = (meta.st_dev, meta.st_ino);
                        let most = if holder == 0 { MAX_BLOCK_TIME } else { MAX_TRACED_BLOCK_TIME };
                        new.push(BlockedOpen { event, tid, inode, until: Instant::now() + most });
                    }
                    _ => self.allow(&event),
                }
            }
            let any_new = !new.is_empty();
            let mut waiting = self.waiting();
            waiting.extend(new);
            waiting.retain(|one| {
                let long = one.until < Instant::now();
                if long {
                    tracing::info!(tid = %one.tid, "an open of shared memory was blocked for too long");
                    self.allow(&one.event);
                }
                !long
            });
            drop(waiting);
            if any_new {
                waker.wake();
            }
        }
    }

    fn allow(&self, event: &FanotifyEvent) {
        if let Some(fd) = event.fd() {
            // The process may have been killed.
            let _gone = self.fanotify.write_response(FanotifyResponse::new(fd, Response::FAN_ALLOW));
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

impl Shim {
    /// Blocks opens of an object, if possible.
    pub(crate) fn guard_object(&mut self, id: ObjectId, file: &File) {
        if self.open_blocker.is_none() {
            match OpenBlocker::new(self.waker.clone()) {
                Ok(open_blocker) => self.open_blocker = Some(open_blocker),
                Err(error) => return tracing::info!(%error, "opens of shared memory cannot be blocked"),
            }
        }
        if let Some(Err(error)) = self.open_blocker.as_mut().map(|open_blocker| open_blocker.add(id, file)) {
            tracing::info!(%error, "opens of this shared file cannot be blocked");
        }
    }

    /// Fetches home the processes for which blocked opens wait, and lets each open pass when they
    /// are home.
    pub(crate) fn release_blocked_opens(&mut self) {
        let Some(thread_state) =
            self.open_blocker.as_ref().map(|open_blocker| Arc::clone(&open_blocker.thread_state))
        else {
            return;
        };
        let all: Vec<_> = thread_state.waiting().iter().map(|one| (one.inode, one.tid)).collect();
        for (inode, tid) in all {
            let same = |id: &ObjectId| self.inodes.get(id) == Some(&inode);
            let sharers = || self.processes.values().filter(|process| process.files.objects.iter().any(same));
            let is_home =
                |process: &Process| !process.is_away() && !matches!(process.state, State::Outgoing(_));
            if sharers().all(is_home) {
                thread_state.waiting().retain(|one| {
                    let is_this = (one.inode, one.tid) == (inode, tid);
                    if is_this {
                        thread_state.allow(&one.event);
                    }
                    !is_this
                });
                continue;
            }
            // Processes that are moving are fetched when they have arrived.
            let there =
                sharers().find(|process| matches!(process.state, State::Away)).map(|process| process.pid);
            if let Some(pid) = there {
                self.fetch_home(pid, &format!("shared memory: process {tid} opens what it shares"));
            }
        }
    }
}
