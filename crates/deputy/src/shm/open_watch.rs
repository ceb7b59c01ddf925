//! Reports when a process opens, by its file name, memory that a group of processes away shares
//! ([`super::opens`]).

use rustix::fs::inotify::{self, ReadFlags, Reader, WatchFlags};
use std::collections::{HashMap, HashSet};
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
    /// Number of opens that were reported so far.
    reports: u64,
}

impl OpenWatch {
    /// A watch for processes of this user.
    ///
    /// # Errors
    /// If the user's inotify instances are used up.
    pub(crate) fn new(uid: u32) -> io::Result<Self> {
        let fd = crate::inotify::new_instance(uid)?;
        Ok(Self { fd, objects: HashMap::new(), opened: HashSet::new(), reports: 0 })
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

    /// Number of opens that were reported so far.
    pub(crate) fn reports(&mut self) -> u64 {
        self.read();
        self.reports
    }

    /// The opens of this object were checked.
    pub(crate) fn opens_checked(&mut self, id: ObjectId) {
        self.opened.remove(&id);
    }

    /// Reads the available inotify events.
    fn read(&mut self) {
        let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
        let mut reader = Reader::new(&self.fd, &mut buffer);
        while let Ok(event) = reader.next() {
            let known = self.objects.get(&event.wd()).copied();
            // Not counted: the end of a watch.
            self.reports += u64::from(event.events().contains(ReadFlags::OPEN));
            if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                self.opened.extend(self.objects.values());
            } else {
                self.opened.extend(known);
            }
        }
    }
}
