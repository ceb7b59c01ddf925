//! A guest goes home or onward.
//!
//! It runs while its memory is sent, then stands still until home has decided: `Drop` ends it here, `Thaw` lets
//! it run on. An open call is not cancelled: it stays under way at home, and the next life asks for its result
//! under the same number.

use crate::member::{Member, State};
use crate::space::{GuestSpace, Shown};
use std::fs::File;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tern_image::content::Cache;
use tern_image::layout::Files;
use tern_image::pages::Finder;
use tern_image::{FileRef, Layout, ProcessImage, Unmovable};
use tern_migrate::message::{Conversation, Departure};
use tern_migrate::source::{Movable, SendError, Sending, Source};
use tern_tracee::dirty::Tracker;
use tern_tracee::inject::{Injection, Site};
use tern_tracee::listener::Listener;
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::stop::Stopped;
use tern_tracee::{Memory, Result};
use tern_wire::Link;

/// Processes smaller than this (KiB) are stopped and copied at once: tracking them would cost more.
const WORTH_TRACKING: u64 = 8 << 10;

/// So often the maps of a running process are read again when they do not fit together.
const MOST_LOOKS: u32 = 20;

/// A guest on its way out.
#[derive(Debug)]
pub struct Departing {
    /// Where to.
    pub departure: Departure,
    /// The link to the next node; none on the way home, which takes home's.
    pub link: Option<Link>,
    /// The sending.
    pub sending: Sending,
    /// The guest, once it stands still.
    pub stopped: Option<Stopped>,
    /// The signal that it goes home to die of.
    pub dying: Option<i32>,
    /// When something last went over the link, and what had until then.
    pub stirred: (Instant, (u64, usize, bool)),
}

impl Departing {
    /// For how long the next node has taken nothing of what there is for it, and has owed us an answer. The way home
    /// has its own signs of life.
    pub fn silent(&mut self) -> Duration {
        let Some(link) = &self.link else { return Duration::ZERO };
        let now = (self.sending.bytes(), link.unsent(), self.sending.awaits_answer());
        if now != self.stirred.1 || (now.1 == 0 && !now.2) {
            self.stirred = (Instant::now(), now);
        }
        self.stirred.0.elapsed()
    }
}

/// The files of a guest's mappings, as they were announced when they were mapped.
struct ShownFiles<'a>(&'a Shown);

impl Files for ShownFiles<'_> {
    fn identify(&mut self, m: &Mapping) -> std::result::Result<FileRef, Unmovable> {
        let file = self.0.get(&(m.device, m.inode)).cloned();
        file.ok_or_else(|| Unmovable::UnreadableFile(String::from_utf8_lossy(&m.name).into_owned()))
    }
}

/// What sending needs of a guest.
pub struct Going<'a> {
    /// The guest.
    pub member: &'a mut Member,
    /// File content.
    pub cache: &'a Cache,
    /// Set once it stands still.
    pub stopped: Option<Stopped>,
}

impl std::fmt::Debug for Going<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Going({})", self.member.pid)
    }
}

impl Movable for Going<'_> {
    fn describe(&mut self) -> std::result::Result<Layout, SendError> {
        // The maps of a running process are read in pieces, which need not fit.
        let mut why = SendError::Restless;
        for _ in 0..MOST_LOOKS {
            let maps = procfs::smaps(self.member.host)?;
            let files = &mut ShownFiles(&self.member.shown);
            let layout = Layout::describe(&maps, Some(self.member.reserve), files);
            if self.stopped.is_some() {
                return Ok(layout?);
            }
            match layout {
                Ok(layout) if layout.check().is_ok() => return Ok(layout),
                Ok(_) => {}
                Err(unmovable) => why = unmovable.into(),
            }
        }
        Err(why)
    }

    fn content(&mut self, file: &FileRef) -> std::io::Result<File> {
        let fd = self.cache.get(&file.hash).ok_or(std::io::ErrorKind::NotFound)?;
        Ok(File::from(fd.try_clone_to_owned()?))
    }

    fn freeze(&mut self) -> Result<bool> {
        if self.stopped.is_some() {
            return Ok(true);
        }
        if !self.member.can_halt() {
            return Ok(false);
        }
        self.stopped = Some(self.member.halt()?);
        Ok(true)
    }

    fn capture(&mut self, layout: Layout) -> Result<(ProcessImage, Conversation)> {
        let member = &mut *self.member;
        let astray = || tern_tracee::Error::Astray {
            what: "captured without having arrived".into(),
            pid: member.host,
        };
        let (Some(stopped), Some(listener)) = (self.stopped.take(), member.listener.clone()) else {
            return Err(astray());
        };
        let mut image = member.image.take().ok_or_else(astray)?;
        let mut injection = Injection::begin(stopped, Site(member.reserve.start))?;
        let mut space =
            GuestSpace { injection: &mut injection, listener: &listener, cache: self.cache, files: &[] };
        let done = image.recapture(&mut space, &member.memory, member.reserve, layout);
        let copy = (*image).clone();
        member.image = Some(image);
        done?;
        self.stopped = Some(injection.finish()?);
        let mut talk = member.talk.clone();
        talk.used = member.meter.used();
        talk.carried = member.raised.values().flatten().map(|info| info.to_vec()).collect();
        Ok((copy, talk))
    }
}

impl Member {
    /// Prepares a guest for its departure: tracks its writes if that is worth it. It runs on, unless it stands still
    /// already.
    ///
    /// # Errors
    /// If it is gone.
    pub fn prepare_departure(&mut self, cache: &Cache, still: bool) -> Result<Source> {
        let mut tracker = None;
        if !still && self.can_halt() && procfs::status(self.host)?.resident_kib >= WORTH_TRACKING {
            let stopped = self.halt()?;
            let listener = self.listener.clone();
            let mut injection = Injection::begin(stopped, Site(self.reserve.start))?;
            if let Some(listener) = &listener {
                tracker = track(&mut injection, listener, cache).ok();
            }
            injection.finish()?.resume(0)?;
        }
        let finder = Finder::new(self.host, tracker, false)?;
        Ok(Source::new(self.pid, Memory::open(self.host)?, finder))
    }

    /// Whether it can leave now.
    #[must_use]
    pub fn can_depart(&self) -> bool {
        matches!(self.state, State::Running) && !self.borrowed
    }
}

fn track(injection: &mut Injection, listener: &Rc<Listener>, cache: &Cache) -> Result<Tracker> {
    let pid = injection.pid();
    let mut space = GuestSpace { injection, listener, cache, files: &[] };
    Tracker::begin(pid, &mut |nr, args| space.make(nr, args))
}
