//! Fetches processes home when another process opens, by name, memory that they share away: it
//! would see the content as of their departure.
//!
//! The kernel reports the open, not a read right after it, and some programs only open files and
//! close them again (a Java machine does so with the files of all others). So after a report the
//! shim checks, a moment later, whether a process still has the file open.

use crate::process::{Process, State};
use crate::shim::Shim;
use crate::shm::sharers::{Opener, shared_maps};
use rustix::fs::inotify::{self, ReadFlags, Reader, WatchFlags};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use tern_image::object::ObjectId;

/// The watched objects.
#[derive(Debug)]
pub(crate) struct OpenWatch {
    fd: OwnedFd,
    /// By watch descriptor.
    objects: HashMap<i32, ObjectId>,
    /// Opened, and not checked yet.
    opened: HashSet<ObjectId>,
}

impl OpenWatch {
    /// A watch for processes of this user.
    ///
    /// # Errors
    /// If the user's inotify instances are used up.
    pub(crate) fn new(uid: u32) -> io::Result<Self> {
        let fd = crate::inotify::new_instance(uid)?;
        Ok(Self { fd, objects: HashMap::new(), opened: HashSet::new() })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Watches an object that has a name.
    ///
    /// # Errors
    /// If the user's watches are used up.
    pub(crate) fn add(&mut self, id: ObjectId, file: &File) -> io::Result<()> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        self.objects.insert(inotify::add_watch(&self.fd, path, WatchFlags::OPEN)?, id);
        Ok(())
    }

    /// Stops watching objects that are not needed any more.
    pub(crate) fn retain(&mut self, in_use: impl Fn(&ObjectId) -> bool) {
        let fd = &self.fd;
        self.objects.retain(|watch, id| {
            let kept = in_use(id);
            if !kept {
                // If its file is gone, so is the watch.
                let _gone = inotify::remove_watch(fd, *watch);
            }
            kept
        });
        self.opened.retain(in_use);
    }

    /// The objects that were opened, and not checked since.
    pub(crate) fn opened(&mut self) -> &HashSet<ObjectId> {
        self.read();
        &self.opened
    }

    /// Reads the available inotify events.
    fn read(&mut self) {
        let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
        let mut reader = Reader::new(&self.fd, &mut buffer);
        while let Ok(event) = reader.next() {
            let known = self.objects.get(&event.wd()).copied();
            if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                self.opened.extend(self.objects.values());
            } else {
                self.opened.extend(known);
            }
        }
    }
}

impl Shim {
    /// Fetches processes home whose shared memory another process has opened. For processes that
    /// are moving this is checked when they have arrived.
    pub(crate) fn handle_opens(&mut self) {
        // Read also if nothing is watched any more: the kernel reports the end of each watch, and the
        // main loop would not sleep before that is read.
        let Some(watch) = &mut self.open_watch else { return };
        for id in watch.opened().clone() {
            let sharers = || self.processes.values().filter(|process| process.files.objects.contains(&id));
            let moves =
                |process: &Process| !matches!(process.state, State::Resident | State::Draining | State::Away);
            if sharers().any(moves) {
                continue;
            }
            let these: BTreeSet<i32> = sharers().map(|process| process.pid.0).collect();
            let away =
                sharers().find(|process| matches!(process.state, State::Away)).map(|process| process.pid);
            let files: HashSet<(u64, u64)> = self.inodes.get(&id).copied().into_iter().collect();
            let maps = |these: &BTreeSet<i32>| {
                shared_maps().into_iter().find(|(pid, maps)| !these.contains(pid) && maps.contains(&id))
            };
            let other = match away.map(|_pid| self.find_opener(files, these.clone())) {
                // Asked again when the scan has ended.
                Some(Opener::Pending) => continue,
                Some(Opener::Process(other)) => Some(format!("process {other} has")),
                Some(Opener::Unknown) => Some("a process may have".to_owned()),
                Some(Opener::None) => maps(&these).map(|(other, _)| format!("process {other} has")),
                None => None,
            };
            if let Some(watch) = &mut self.open_watch {
                watch.opened.remove(&id);
            }
            if let (Some(pid), Some(other)) = (away, other) {
                self.fetch_home(pid, &format!("shared memory: {other} opened what it shares"));
            }
        }
    }
}
