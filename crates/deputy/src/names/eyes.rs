//! What is watched, and what the kernel tells of it (inotify(7)).

use super::look::{Ask, Errand, Looked, Looker};
use crate::mailbox::Bell;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader};
use rustix::fs::{Mode, OFlags, open};
use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// So many changes are taken at once.
const MOST_AT_ONCE: usize = 4096;
/// So many more instances of inotify there must be.
const LEFT: usize = 8;

/// A watched directory, and the way to it. The watches end with this.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(super) here: i32,
    pub(super) way: Vec<(i32, Vec<u8>)>,
    pub(super) leave: Sender<Errand>,
}

/// What an event is to a directory that is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Meets {
    Nothing,
    /// Of this name something is not as it was.
    Name(Vec<u8>),
    /// It, or the way to it, may be another one.
    Directory,
}

/// What the kernel tells of a watched directory.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    pub(crate) watch: i32,
    /// None if it is about the directory itself.
    name: Option<Vec<u8>>,
    /// Something may have been lost: it is about all.
    pub(crate) lost: bool,
}

impl Event {
    pub(crate) const ALL: Self = Self { watch: -1, name: None, lost: true };

    #[cfg(test)]
    pub(crate) fn is_of(&self, name: &[u8]) -> bool {
        self.name.as_deref() == Some(name)
    }
}

impl Watched {
    /// All its watches.
    pub(crate) fn watches(&self) -> impl Iterator<Item = i32> {
        self.way.iter().map(|(watch, _)| *watch).chain([self.here])
    }

    pub(crate) fn meets(&self, event: &Event) -> Meets {
        let on_way = |(watch, taken): &(i32, Vec<u8>)| {
            *watch == event.watch && event.name.as_ref().is_none_or(|name| name == taken)
        };
        if event.lost || self.way.iter().any(on_way) {
            return Meets::Directory;
        }
        match &event.name {
            _ if event.watch != self.here => Meets::Nothing,
            Some(name) => Meets::Name(name.clone()),
            None => Meets::Directory,
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let all = self.watches().filter(|watch| *watch >= 0).collect();
        let _nobody_watches = self.leave.send(Errand::Leave(all));
    }
}

/// The thread that looks, and what the kernel tells of what it has seen.
#[derive(Debug)]
pub(crate) struct Eyes {
    events: Arc<OwnedFd>,
    /// Says so when anything has been mounted.
    mounts: OwnedFd,
    ask: Sender<Errand>,
    looked: Receiver<Looked>,
}

impl Eyes {
    /// Begins the thread, which rings when it has looked.
    ///
    /// # Errors
    /// If the user has too many threads, or instances of inotify.
    pub(crate) fn open(bell: Bell) -> io::Result<Self> {
        let begin = || inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC);
        // They are the user's, and few: others shall find some.
        drop((0..LEFT).map(|_| begin()).collect::<Result<Vec<_>, _>>()?);
        let events = Arc::new(begin()?);
        let mounts = open("/proc/self/mounts", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let (ask, asked) = channel();
        let (say, looked) = channel();
        let mut looker = Looker { events: Arc::clone(&events), uses: HashMap::new(), leave: ask.clone() };
        let work = move || {
            while let Ok(errand) = asked.recv() {
                match errand {
                    Errand::Leave(watches) => looker.leave(&watches),
                    Errand::Look(ask) => {
                        let seen = looker.look(&ask);
                        if say.send(Looked { ask, seen }).is_err() {
                            break;
                        }
                        bell.ring();
                    }
                }
            }
        };
        std::thread::Builder::new().name("names".into()).stack_size(256 << 10).spawn(work)?;
        let eyes = Self { events, mounts, ask, looked };
        // That there are mounts is no news.
        eyes.has_news();
        Ok(eyes)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Whether anything has changed.
    fn has_news(&self) -> (bool, bool) {
        let mut fds = [PollFd::new(&*self.events, PollFlags::IN), PollFd::new(&self.mounts, PollFlags::PRI)];
        match poll(&mut fds, Some(&Timespec::default())) {
            Ok(_) => (!fds[0].revents().is_empty(), !fds[1].revents().is_empty()),
            Err(_) => (true, true),
        }
    }

    pub(crate) fn ask(&self, ask: Ask) {
        let _thread_is_gone = self.ask.send(Errand::Look(ask));
    }

    pub(crate) fn looked(&self) -> Option<Looked> {
        self.looked.try_recv().ok()
    }

    /// What has changed. Whoever has changed it has not returned from his call before it is told here.
    pub(crate) fn events(&self) -> Vec<Event> {
        let (has_changed, has_mounted) = self.has_news();
        let mut events = Vec::new();
        if has_mounted {
            events.push(Event::ALL);
        }
        let mut room = [MaybeUninit::<u8>::uninit(); 4096];
        let mut reader = Reader::new(&*self.events, &mut room);
        while has_changed && let Ok(event) = reader.next() {
            if events.len() >= MOST_AT_ONCE {
                // Somebody is faster than we: all is forgotten, and watched no more.
                events.push(Event::ALL);
                break;
            }
            let what = event.events();
            let lost = what.contains(ReadFlags::QUEUE_OVERFLOW);
            let name = event.file_name().map(|name| name.to_bytes().to_vec());
            // Of directories it is said that they are there, and not when they were read; who reads them for us tells this too.
            let of_content = (ReadFlags::ACCESS | ReadFlags::MODIFY).contains(what - ReadFlags::ISDIR);
            let of_directory = name.is_none() || what.contains(ReadFlags::ISDIR);
            if !(of_content && of_directory) {
                events.push(Event { watch: event.wd(), name, lost });
            }
        }
        events
    }
}
