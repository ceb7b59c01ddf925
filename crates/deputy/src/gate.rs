//! Somebody opens for writing what processes away share: he waits until they are home. What he wrote before would be undone
//! when they bring their own, and none of them would see it.
//!
//! The kernel asks before it opens a watched file (fanotify(7), FAN_OPEN_PERM), and a thread of ours answers. These pass at
//! once: who only reads, since some look at the files of all others (each Java machine does when it starts); shims, which open
//! such files themselves while everything else waits for them; and whom we hold, since we may be about to stop him, and what
//! he does with it is seen (`touched`). All others pass when the family says so, or after [`MOST`]. If we end, the kernel lets everybody pass. It takes CAP_SYS_ADMIN: without it there is no gate.

use crate::family::Family;
use crate::mailbox::Bell;
use crate::member::{Member, State};
use crate::sharers::is_shim;
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

/// How long somebody waits at most: less than the time after which guests stand still that do not hear of their home, since
/// that may be waiting for him, to stop him.
const MOST: Duration = Duration::from_secs(3);
/// How long one whom another shim holds: that waits for him now and then, with all its family, and we perhaps for one whom it
/// does not let pass meanwhile.
const MOST_HELD: Duration = Duration::from_millis(300);
/// How often the thread looks who has waited long enough.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The gate.
#[derive(Debug)]
pub(crate) struct Gate {
    keeper: Arc<Keeper>,
    watched: HashMap<ObjectId, File>,
}

#[derive(Debug)]
struct Keeper {
    fanotify: Fanotify,
    waiting: Mutex<Vec<Waiting>>,
}

/// A thread in open(2).
#[derive(Debug)]
struct Waiting {
    event: FanotifyEvent,
    tid: HomePid,
    inode: (u64, u64),
    until: Instant,
}

impl Gate {
    /// One at which nobody waits.
    ///
    /// # Errors
    /// Without CAP_SYS_ADMIN, or if the kernel has no such questions.
    pub(crate) fn new(bell: Bell) -> io::Result<Self> {
        let init = InitFlags::FAN_CLASS_CONTENT
            | InitFlags::FAN_CLOEXEC
            | InitFlags::FAN_NONBLOCK
            | InitFlags::FAN_REPORT_TID;
        let fanotify = Fanotify::init(init, EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC)?;
        let keeper = Arc::new(Keeper { fanotify, waiting: Mutex::default() });
        let thread = Arc::clone(&keeper);
        std::thread::Builder::new().name("gate".into()).spawn(move || thread.keep(&bell))?;
        Ok(Self { keeper, watched: HashMap::new() })
    }

    /// Asks to be asked of an object that has a name.
    ///
    /// # Errors
    /// If the user's marks are used up, or its file system has none.
    pub(crate) fn add(&mut self, id: ObjectId, file: &File) -> io::Result<()> {
        let file = file.try_clone()?;
        self.keeper.fanotify.mark(MarkFlags::FAN_MARK_ADD, MaskFlags::FAN_OPEN_PERM, &file, None::<&str>)?;
        self.watched.insert(id, file);
        Ok(())
    }

    /// Leaves those that are of no use any more.
    pub(crate) fn retain(&mut self, of_use: impl Fn(&ObjectId) -> bool) {
        let fanotify = &self.keeper.fanotify;
        self.watched.retain(|id, file| {
            let kept = of_use(id);
            if !kept {
                let (remove, perm) = (MarkFlags::FAN_MARK_REMOVE, MaskFlags::FAN_OPEN_PERM);
                // Two objects may be of one file, of which the mark went with the first.
                let _gone = fanotify.mark(remove, perm, &*file, None::<&str>);
            }
            kept
        });
    }
}

impl Keeper {
    fn waiting(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers for as long as we live.
    fn keep(&self, bell: &Bell) {
        let own = std::process::id() as i32;
        loop {
            let look = Some(&LOOK).filter(|_| !self.waiting().is_empty());
            let _any = poll(&mut [PollFd::new(&self.fanotify, PollFlags::IN)], look);
            let mut new = Vec::new();
            for event in self.fanotify.read_events().unwrap_or_default() {
                let tid = HomePid(event.pid());
                let holder = procfs::status(tid.0).map_or(0, |status| status.tracer);
                let meta = event.fd().map(rustix::fs::fstat);
                match meta {
                    Some(Ok(meta)) if may_write(tid) && !is_shim(tid.0) && holder != own => {
                        let inode = (meta.st_dev, meta.st_ino);
                        let most = if holder == 0 { MOST } else { MOST_HELD };
                        new.push(Waiting { event, tid, inode, until: Instant::now() + most });
                    }
                    _ => self.let_pass(&event),
                }
            }
            let rings = !new.is_empty();
            let mut waiting = self.waiting();
            waiting.extend(new);
            waiting.retain(|one| {
                let long = one.until < Instant::now();
                if long {
                    tracing::info!(tid = %one.tid, "who opens what is shared away has waited for too long");
                    self.let_pass(&one.event);
                }
                !long
            });
            drop(waiting);
            if rings {
                bell.ring();
            }
        }
    }

    fn let_pass(&self, event: &FanotifyEvent) {
        if let Some(fd) = event.fd() {
            // He may be dead.
            let _gone = self.fanotify.write_response(FanotifyResponse::new(fd, Response::FAN_ALLOW));
        }
    }
}

/// Whether a thread that waits in open(2) may write then, as far as its call says.
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

impl Family {
    /// Has a gate stand before an object, if that can be.
    pub(crate) fn guard(&mut self, id: ObjectId, file: &File) {
        if self.gate.is_none() {
            match Gate::new(self.bell.clone()) {
                Ok(gate) => self.gate = Some(gate),
                Err(error) => return tracing::info!(%error, "nobody waits who opens what is shared"),
            }
        }
        if let Some(Err(error)) = self.gate.as_mut().map(|gate| gate.add(id, file)) {
            tracing::info!(%error, "who opens a file that is shared does not wait");
        }
    }

    /// Fetches those home for whom somebody waits, and lets him pass when they are there.
    pub(crate) fn open_the_gate(&mut self) {
        let Some(keeper) = self.gate.as_ref().map(|gate| Arc::clone(&gate.keeper)) else { return };
        let all: Vec<_> = keeper.waiting().iter().map(|one| (one.inode, one.tid)).collect();
        for (inode, tid) in all {
            let same = |id: &ObjectId| self.inodes.get(id) == Some(&inode);
            let sharers = || self.members.values().filter(|m| m.files.objects.iter().any(same));
            let is_home = |m: &Member| !m.is_away() && !matches!(m.state, State::Outbound(_));
            if sharers().all(is_home) {
                keeper.waiting().retain(|one| {
                    let his = (one.inode, one.tid) == (inode, tid);
                    if his {
                        keeper.let_pass(&one.event);
                    }
                    !his
                });
                continue;
            }
            // Those who are on the way are fetched when they have arrived.
            let there = sharers().find(|m| matches!(m.state, State::Away)).map(|m| m.pid);
            if let Some(pid) = there {
                self.fetch(pid, &format!("shared memory: process {tid} opens what it shares"));
            }
        }
    }
}
