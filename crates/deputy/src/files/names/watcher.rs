//! The inotify(7) instance that watches directories, and its events.

use super::scanner::{DirectoryScanner, ScanReply, ScanRequest, WatchCmd};
use crate::waker::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{ReadFlags, Reader};
use rustix::fs::{Mode, OFlags, open};
use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use tern_tracee::threads;

/// Upper bound on events read at once.
const MAX_EVENTS_PER_READ: usize = 4096;
/// Number of further inotify instances that must be available.
const SPARE_INOTIFY_INSTANCES: usize = 8;

/// The watches on a directory and on each directory of the path to it. They are released on drop.
#[derive(Debug)]
pub(crate) struct DirWatch {
    pub(super) dir: i32,
    pub(super) path: Vec<(i32, Vec<u8>)>,
    pub(super) release: Sender<WatchCmd>,
}

/// The effect of an event on a watched directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Impact {
    Nothing,
    /// This name has changed.
    Name(Vec<u8>),
    /// The directory, or the path to it, may be another one now.
    Directory,
}

/// An event of a watched directory.
#[derive(Debug, Clone)]
pub(crate) struct DirEvent {
    pub(crate) watch: i32,
    /// None if it is about the directory itself.
    name: Option<Vec<u8>>,
    /// It applies to all directories: events may have been lost, or the mount table has changed.
    pub(crate) events_lost: bool,
}

impl DirEvent {
    pub(crate) const ALL: Self = Self { watch: -1, name: None, events_lost: true };

    #[cfg(test)]
    pub(crate) fn is_of(&self, name: &[u8]) -> bool {
        self.name.as_deref() == Some(name)
    }
}

impl DirWatch {
    /// All its watches.
    pub(crate) fn watches(&self) -> impl Iterator<Item = i32> {
        self.path.iter().map(|(watch, _)| *watch).chain([self.dir])
    }

    pub(crate) fn impact_of(&self, event: &DirEvent) -> Impact {
        let on_path = |(watch, taken): &(i32, Vec<u8>)| {
            *watch == event.watch && event.name.as_ref().is_none_or(|name| name == taken)
        };
        if event.events_lost || self.path.iter().any(on_path) {
            return Impact::Directory;
        }
        match &event.name {
            _ if event.watch != self.dir => Impact::Nothing,
            Some(name) => Impact::Name(name.clone()),
            None => Impact::Directory,
        }
    }
}

impl Drop for DirWatch {
    fn drop(&mut self) {
        let all = self.watches().filter(|watch| *watch >= 0).collect();
        let _nobody_watches = self.release.send(WatchCmd::Release(all));
    }
}

/// The scanner thread, and the inotify instance for the directories that it has scanned.
#[derive(Debug)]
pub(crate) struct Watcher {
    events: Arc<OwnedFd>,
    /// Polled for changes of the mount table.
    mounts: OwnedFd,
    request: Sender<WatchCmd>,
    scanned: Receiver<ScanReply>,
}

impl Watcher {
    /// Starts the scanner thread, which wakes the main loop after each scan. The kernel counts the
    /// inotify instance for the user `uid`.
    ///
    /// # Errors
    /// If the user has too many threads or inotify instances.
    pub(crate) fn open(waker: Waker, uid: u32) -> io::Result<Self> {
        // inotify instances are limited per user: leave spares. Closing one may take seconds, since
        // the kernel first waits for RCU, and then frees the marks of all instances closed by any
        // program (fsnotify_destroy_group). So a thread closes them.
        let mut spares = Vec::with_capacity(SPARE_INOTIFY_INSTANCES);
        let made = loop {
            match crate::inotify::new_instance(uid) {
                Ok(spare) if spares.len() < SPARE_INOTIFY_INSTANCES => spares.push(spare),
                made => break made,
            }
        };
        let events = match made {
            Ok(events) => Arc::new(events),
            Err(error) => {
                threads::spawn("names", 64 << 10, move || drop(spares))?;
                return Err(error);
            }
        };
        let mounts = open("/proc/self/mounts", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let (request, commands) = channel();
        let (replies, scanned) = channel();
        let mut scanner =
            DirectoryScanner { events: Arc::clone(&events), uses: HashMap::new(), release: request.clone() };
        let work = move || {
            drop(spares);
            while let Ok(command) = commands.recv() {
                match command {
                    WatchCmd::Release(watches) => scanner.release(&watches),
                    WatchCmd::Scan(request) => {
                        let listing = scanner.scan(&request);
                        if replies.send(ScanReply { request, listing }).is_err() {
                            break;
                        }
                        waker.wake();
                    }
                }
            }
        };
        threads::spawn("names", 256 << 10, work)?;
        let watcher = Self { events, mounts, request, scanned };
        // The first poll reports the existing mounts: consume that.
        watcher.poll_changes();
        Ok(watcher)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Whether a directory, and whether the mount table, has changed.
    fn poll_changes(&self) -> (bool, bool) {
        let mut fds = [PollFd::new(&*self.events, PollFlags::IN), PollFd::new(&self.mounts, PollFlags::PRI)];
        match poll(&mut fds, Some(&Timespec::default())) {
            Ok(_) => (!fds[0].revents().is_empty(), !fds[1].revents().is_empty()),
            Err(_) => (true, true),
        }
    }

    pub(crate) fn request(&self, request: ScanRequest) {
        let _thread_is_gone = self.request.send(WatchCmd::Scan(request));
    }

    pub(crate) fn scanned(&self) -> Option<ScanReply> {
        self.scanned.try_recv().ok()
    }

    /// The changes so far. A change is visible here before the call that made it returns.
    pub(crate) fn events(&self) -> Vec<DirEvent> {
        let (directories_changed, mounts_changed) = self.poll_changes();
        let mut events = Vec::new();
        if mounts_changed {
            events.push(DirEvent::ALL);
        }
        let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
        let mut reader = Reader::new(&*self.events, &mut buffer);
        while directories_changed && let Ok(event) = reader.next() {
            if events.len() >= MAX_EVENTS_PER_READ {
                // Events arrive faster than they are read: invalidate everything, which stops
                // watching.
                events.push(DirEvent::ALL);
                break;
            }
            let what = event.events();
            let events_lost = what.contains(ReadFlags::QUEUE_OVERFLOW);
            let name = event.file_name().map(|name| name.to_bytes().to_vec());
            // The scanner's own reads of directories cause such events too, and they change no
            // listing.
            let of_content = (ReadFlags::ACCESS | ReadFlags::MODIFY).contains(what - ReadFlags::ISDIR);
            let of_directory = name.is_none() || what.contains(ReadFlags::ISDIR);
            if !(of_content && of_directory) {
                events.push(DirEvent { watch: event.wd(), name, events_lost });
            }
        }
        events
    }
}
