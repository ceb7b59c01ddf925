//! Somebody opens by its name what processes away share, and would see what it was when they left: they come home.
//!
//! The kernel tells of the opening, not of a read that follows at once; and some only look whether a file is there and close
//! it again (a Java machine does so with the files of all others). So who is told of looks a moment later, and counts only
//! who has it open still.

use crate::family::Family;
use crate::member::{Member, State};
use crate::sharers::{shared_maps, who_opens};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use tern_image::object::ObjectId;

/// What is watched.
#[derive(Debug)]
pub(crate) struct Watch {
    fd: OwnedFd,
    /// By watch descriptor.
    of: HashMap<i32, ObjectId>,
    /// Opened, and not looked at yet.
    opened: HashSet<ObjectId>,
}

impl Watch {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        Ok(Self { fd, of: HashMap::new(), opened: HashSet::new() })
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
        self.of.insert(inotify::add_watch(&self.fd, path, WatchFlags::OPEN)?, id);
        Ok(())
    }

    /// Leaves those that are of no use any more.
    pub(crate) fn keep(&mut self, of_use: impl Fn(&ObjectId) -> bool) {
        let fd = &self.fd;
        self.of.retain(|watch, id| {
            let kept = of_use(id);
            if !kept {
                // Gone by itself if its file is.
                let _gone = inotify::remove_watch(fd, *watch);
            }
            kept
        });
        self.opened.retain(of_use);
    }

    /// Takes what the kernel has to tell.
    fn read(&mut self) {
        let mut room = [MaybeUninit::<u8>::uninit(); 4096];
        let mut reader = Reader::new(&self.fd, &mut room);
        while let Ok(event) = reader.next() {
            let known = self.of.get(&event.wd()).copied();
            if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                self.opened.extend(self.of.values());
            } else {
                self.opened.extend(known);
            }
        }
    }
}

impl Family {
    /// Fetches those home whose memory somebody has opened. Of those that are just leaving it is looked at when they are away.
    pub(crate) fn see_who_opens(&mut self) {
        let Some(watch) = self.watch.as_mut().filter(|watch| !watch.of.is_empty()) else { return };
        watch.read();
        for id in watch.opened.clone() {
            let sharers = || self.members.values().filter(|m| m.files.objects.contains(&id));
            let moves = |m: &Member| !matches!(m.state, State::Resident | State::Lingering | State::Away);
            if sharers().any(moves) {
                continue;
            }
            let these: BTreeSet<i32> = sharers().map(|m| m.pid.0).collect();
            let away = sharers().find(|m| matches!(m.state, State::Away)).map(|m| m.pid);
            let files: HashSet<(u64, u64)> = self.inodes.get(&id).copied().into_iter().collect();
            if let Some(watch) = &mut self.watch {
                watch.opened.remove(&id);
            }
            let maps =
                || shared_maps().into_iter().find(|(pid, maps)| !these.contains(pid) && maps.contains(&id));
            if let Some(pid) = away
                && let Some(other) = who_opens(&files, &these).or_else(|| maps().map(|(other, _)| other))
            {
                self.fetch(pid, &format!("shared memory: process {other} has opened what it shares"));
            }
        }
    }
}
