//! A guest goes home or onward.
//!
//! It runs while its memory is sent, then stands still until home has decided: `Drop` ends it here, `Thaw` lets
//! it run on. An open call is not cancelled: it stays under way at home, and the next life asks for its result
//! under the same number.

use crate::company::Company;
use crate::foreign::Foreign;
use crate::member::{Member, Process, State};
use crate::space::{GuestSpace, Shown};
use crate::thread::Thread;
use std::collections::HashSet;
use std::fs::File;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_image::content::Cache;
use tern_image::layout::Files;
use tern_image::object::{self, ObjectId};
use tern_image::pages::Finder;
use tern_image::process::MOST_THREADS;
use tern_image::{FileRef, Layout, ProcessImage, Unmovable};
use tern_migrate::message::Conversation;
use tern_migrate::source::{Movable, SendError, Sending, Shared, Source};
use tern_tracee::dirty::Tracker;
use tern_tracee::inject::{Injection, Site};
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::{Memory, Result};
use tern_wire::Link;

/// Processes smaller than this (KiB) are stopped and copied at once: tracking them would cost more.
const WORTH_TRACKING: u64 = 8 << 10;

/// So often the maps of a running process are read again when they do not fit together.
const MOST_LOOKS: u32 = 20;

/// A guest on its way out.
#[derive(Debug)]
pub struct Departing {
    /// Those with whom it departs, itself among them; nobody if it departs alone.
    pub together: Vec<HomePid>,
    /// It is ready to stand.
    pub ready: bool,
    /// The shared memory whose content goes with it.
    pub carries: HashSet<ObjectId>,
    /// The link to the next node; none on the way home, which takes home's.
    pub link: Option<Link>,
    /// The sending.
    pub sending: Sending,
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
    fn identify(&mut self, m: &Mapping) -> std::result::Result<Option<FileRef>, Unmovable> {
        let file = self.0.get(&(m.device, m.inode)).cloned();
        file.map(Some).ok_or_else(|| Unmovable::UnreadableFile(String::from_utf8_lossy(&m.name).into_owned()))
    }

    fn is_live(&self, m: &Mapping) -> bool {
        self.0.get(&object::id(m)).is_some_and(|file| file.live)
    }
}

/// Adds what is shared and was unmapped here to the files of a layout: what was written there comes along as well.
fn add_unmapped(layout: &mut Layout, shown: &Shown) {
    let mut known: HashSet<ObjectId> = layout.files.iter().map(|file| (file.device, file.inode)).collect();
    let live = shown.values().filter(|file| file.live);
    layout.files.extend(live.filter(|file| known.insert((file.device, file.inode))).cloned());
}

/// What sending needs of a guest.
pub struct Going<'a> {
    /// The guest.
    pub member: &'a mut Member,
    /// File content.
    pub cache: &'a Cache,
    /// With whom it departs.
    pub company: Company,
    /// It is ready to stand.
    pub ready: bool,
    /// The shared memory whose content goes with it.
    pub carries: HashSet<ObjectId>,
}

impl std::fmt::Debug for Going<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Going({})", self.member.process.pid)
    }
}

impl Movable for Going<'_> {
    fn describe(&mut self) -> std::result::Result<Layout, SendError> {
        // The maps of a running process are read in pieces, which need not fit.
        let mut why = SendError::Restless;
        for _ in 0..MOST_LOOKS {
            let process = &self.member.process;
            let foreign = process.foreign.as_ref();
            let maps = Foreign::without(foreign, procfs::smaps(process.memory.pid())?);
            let mut layout = Layout::describe(&maps, Some(process.reserve), &mut ShownFiles(&process.shown));
            if let (Some(foreign), Ok(layout)) = (foreign, &mut layout) {
                foreign.describe(layout);
            }
            if let Ok(layout) = &mut layout {
                add_unmapped(layout, &process.shown);
            }
            if self.member.stands() {
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

    fn crew(&self) -> Vec<i32> {
        let Member { process, threads } = &*self.member;
        let others = threads.values().filter(|thread| thread.tid != process.pid && !thread.ending);
        others.map(|thread| thread.own_tid).collect()
    }

    fn content(&mut self, file: &FileRef) -> std::io::Result<File> {
        let fd = self.cache.get(file).ok_or(std::io::ErrorKind::NotFound)?;
        Ok(File::from(fd.try_clone_to_owned()?))
    }

    fn freeze(&mut self) -> Result<bool> {
        self.ready = true;
        Ok(self.company.ready && self.member.halt()?)
    }

    fn shared(&mut self, files: &[FileRef]) -> std::io::Result<Option<Vec<Shared>>> {
        if !self.company.stands || !self.member.stands() {
            return Ok(None);
        }
        Shared::to_carry(files, &self.cache.objects, &self.company.taken, &mut self.carries).map(Some)
    }

    fn capture(&mut self, layout: Layout) -> Result<(ProcessImage, Conversation)> {
        let Member { process, threads } = &mut *self.member;
        let astray =
            || tern_tracee::Error::Astray { what: "captured without standing".into(), pid: process.host };
        let mut image = process.image.take().ok_or_else(astray)?;
        // The first one first, unless it has ended.
        let pid = process.pid;
        let mut order: Vec<&mut Thread> = threads.values_mut().collect();
        order.sort_by_key(|thread| thread.tid != pid);
        let numbers: Vec<_> = order.iter().map(|thread| (thread.tid, thread.own_tid)).collect();
        let mut injections = Vec::with_capacity(order.len());
        for thread in &mut order {
            let stands = thread.standing.take();
            let stopped = stands.ok_or(tern_tracee::Error::Gone { pid: thread.host })?;
            injections.push(Injection::begin(stopped, Site(process.reserve.start))?);
        }
        let mut done =
            tern_image::thread::capture(&mut injections, &numbers, &process.memory, process.reserve);
        if let (Ok(threads), Some(injection)) = (&mut done, injections.first_mut()) {
            let listener = &order[0].listener;
            let mut space = GuestSpace { injection, listener, cache: self.cache, files: &[] };
            done = image.recapture(&mut space, layout, std::mem::take(threads)).map(|()| Vec::new());
        }
        // Also if it has failed: it goes on here then.
        for (thread, injection) in order.iter_mut().zip(injections) {
            thread.standing = Some(injection.finish()?);
        }
        let talks = order.iter_mut().map(|thread| thread.last_words()).collect();
        let copy = (*image).clone();
        image.threads.clear();
        process.image = Some(image);
        done?;
        let used = process.meter.used();
        Ok((copy, Conversation { talks, used, ..Conversation::default() }))
    }
}

impl Thread {
    /// Does something in the thread's place, which stands, and leaves it standing.
    fn with_space<T>(
        &mut self,
        process: &Process,
        cache: &Cache,
        act: impl FnOnce(&mut GuestSpace<'_>) -> Result<T>,
    ) -> Result<T> {
        let stands = self.standing.take();
        let stopped = stands.ok_or(tern_tracee::Error::Gone { pid: self.host })?;
        let mut injection = Injection::begin(stopped, Site(process.reserve.start))?;
        let mut space = GuestSpace { injection: &mut injection, listener: &self.listener, cache, files: &[] };
        let done = act(&mut space);
        // Also if it has failed: it goes on here then.
        self.standing = Some(injection.finish()?);
        done
    }
}

impl Member {
    /// Prepares a guest for its departure: tracks its writes if that is worth it. It runs on, unless it stands still
    /// already.
    ///
    /// # Errors
    /// If it is gone.
    pub fn prepare_departure(&mut self, cache: &Cache) -> Result<Source> {
        let Self { process, threads } = self;
        let mut tracker = None;
        // What is written in memory that is its parent's as well is for the parent to track.
        let worth = !process.is_to_stand()
            && !process.borrowed
            && procfs::status(process.memory.pid())?.resident_kib >= WORTH_TRACKING;
        // Any thread can do it for all. Only that one stands for it.
        for thread in threads.values_mut() {
            if !worth || !thread.can_halt(process) {
                continue;
            }
            thread.halt(process)?;
            if thread.standing.is_none() && !process.is_to_stand() {
                // It sleeps; another one may not.
                continue;
            }
            // Unless it has met a signal on the way that ends the program.
            if !process.is_to_stand() {
                let host = process.memory.pid();
                tracker = thread.with_space(process, cache, |space| track(host, space)).ok();
                if let Some(stopped) = thread.standing.take() {
                    thread.run_on(stopped, process)?;
                }
            }
            break;
        }
        let finder = Finder::new(process.memory.pid(), tracker, false)?;
        Ok(Source::new(process.pid, Memory::open(process.memory.pid())?, finder))
    }

    /// Whether it is at liberty to leave now, for home or not.
    ///
    /// A child in its parent's memory is not, until it executes a program; unless a call of its own waits for home. Then
    /// it goes alone, with a copy of that memory: as if its vfork had been a fork, which it may be. Its parent comes out
    /// of the vfork when it is dropped here.
    #[must_use]
    pub fn can_depart(&self, home: bool) -> bool {
        let forking = self.threads.values().any(|thread| thread.forking.is_some());
        let bound = self.process.borrowed && !(home && self.homeward().is_some());
        matches!(self.process.state, State::Running) && !bound && !forking
    }

    /// Whether an image of it can be made.
    ///
    /// # Errors
    /// With the reason, if not.
    pub fn movable(&self) -> std::result::Result<(), Unmovable> {
        match self.threads.len() {
            count if count > MOST_THREADS => Err(Unmovable::Threads(count as u32)),
            _ => Ok(()),
        }
    }
}

fn track(process: i32, space: &mut GuestSpace<'_>) -> Result<Tracker> {
    Tracker::begin(process, &mut |nr, args| space.make(nr, args))
}
