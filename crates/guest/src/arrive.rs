//! An empty process becomes a guest.
//!
//! ```text
//!  offer   judged; a process with the right pid is made in the sandbox          → Accepted
//!  crew    the numbers of its threads
//!  space   its own memory is removed, the filter installed, regions mapped,
//!          threads made                                                        → Want
//!  pages   written, round by round
//!  image   bounds, actions, threads                                             → Ready
//!  go      registers; it runs                                                   → Running
//! ```
//! A failure before `Go` ends the process here; at its old place nothing has happened.

use crate::crew::{Crew, Place};
use crate::empty::empty;
use crate::foreign::Foreign;
use crate::forward::Failed;
use crate::member::{Member, State};
use crate::sandbox::Sandbox;
use crate::space::{GuestSpace, Shown, apply};
use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_image::content::Cache;
use tern_image::process::MOST_THREADS;
use tern_image::{Layout, ProcessImage, ThreadImage, Unmovable};
use tern_migrate::message::{Conversation, Machine, Offer};
use tern_migrate::{target, wall};
use tern_tracee::inject::{self, Injection};
use tern_tracee::listener::{Instruction, Listener};
use tern_tracee::pagemap::Run;
use tern_tracee::stop::Stopped;
use tern_tracee::{Error, Memory, Result};

/// A guest in the making.
#[derive(Debug)]
pub struct Arriving {
    /// What was offered.
    pub offer: Offer,
    foreign: Option<Foreign>,
    injection: Option<Injection>,
    listener: Option<Rc<Listener>>,
    shown: Shown,
    layout: Option<Layout>,
    missing: HashSet<u32>,
    image: Option<(Box<ProcessImage>, Conversation)>,
    /// Its threads besides the first one, until the image has come.
    crew: Crew,
    /// Then all of them, in its order.
    threads: Vec<Stopped>,
    /// Since when it has stood still.
    frozen: Instant,
}

/// Why a process may not come here, where the wall clock shows `clock`; if it may, what it has instead of its home's
/// vDSO, if that is another.
///
/// # Errors
/// With the sentence for home.
pub fn judge(offer: &Offer, ours: &Machine, clock: u64) -> std::result::Result<Option<Foreign>, String> {
    if offer.version != tern_image::VERSION {
        return Err(format!("image version {} is not known here ({})", offer.version, tern_image::VERSION));
    }
    let theirs = &offer.machine;
    let missing: Vec<&str> = theirs
        .cpu_flags
        .iter()
        .filter(|f| ours.cpu_flags.binary_search(f).is_err())
        .map(String::as_str)
        .collect();
    if !missing.is_empty() {
        return Err(format!("the processor here lacks {}", missing.join(", ")));
    }
    // Without faulting CPUID the program could find features here that home does not have.
    if theirs.cpu_flags != ours.cpu_flags || theirs.xstate_len != ours.xstate_len {
        return Err("the processor here has other features than home's".into());
    }
    // What the kernel is told not to use is missing in its list, and found by a program all the same.
    if theirs.cpuid != ours.cpuid {
        return Err("the processor here tells programs of other features than home's (CPUID)".into());
    }
    let foreign = Foreign::judge(&theirs.vdso, &ours.vdso)?;
    wall::judge(offer.wall, clock).map_err(|behind| behind.to_string())?;
    if offer.own_pid <= 1 {
        return Err(Unmovable::Init.to_string());
    }
    Ok(foreign)
}

impl Arriving {
    /// Begins, with a fresh process of the sandbox.
    ///
    /// # Errors
    /// If it is gone.
    pub fn begin(offer: Offer, foreign: Option<Foreign>, child: Stopped) -> Result<Member> {
        let host = child.pid();
        let injection = Injection::begin(child, inject::own_site())?;
        let (pid, own_pid, epoch, reserve) = (offer.pid, offer.own_pid, offer.epoch, offer.reserve);
        let arriving = Self {
            offer,
            foreign,
            injection: Some(injection),
            listener: None,
            shown: Shown::new(),
            layout: None,
            missing: HashSet::new(),
            image: None,
            crew: Crew::default(),
            threads: Vec::new(),
            frozen: Instant::now(),
        };
        Member::new(pid, own_pid, host, epoch, reserve, State::Arriving(Box::new(arriving)))
    }

    /// Takes an address space; says which files' content is missing. When none is, the space is built.
    ///
    /// # Errors
    /// If it is unsound, or cannot be built.
    pub fn take_space(&mut self, layout: Layout, memory: &Memory, cache: &mut Cache) -> Result<Vec<u32>> {
        layout.check().map_err(|what| self.astray(what))?;
        if layout.regions.iter().any(|r| self.offer.reserve.meets(r.start, r.end)) {
            return Err(self.astray("a layout that covers our range"));
        }
        if let Some(foreign) = &mut self.foreign {
            foreign.locate(&layout, self.injection.as_ref().map_or(0, Injection::pid))?;
        }
        for file in layout.files.iter().filter(|file| file.live) {
            cache.objects.make(file).map_err(|e| self.astray(&format!("shared memory: {e}")))?;
        }
        let missing = layout.files.iter().enumerate().filter(|(_, f)| !cache.has(f)).map(|(at, _)| at as u32);
        self.missing = missing.collect();
        self.layout = Some(layout);
        self.build(memory, cache)?;
        Ok(self.missing.iter().copied().collect())
    }

    /// Takes a piece of a file's content.
    ///
    /// # Errors
    /// If it is not the content that was announced.
    pub fn take_file(
        &mut self,
        file: u32,
        offset: u64,
        piece: &[u8],
        memory: &Memory,
        cache: &mut Cache,
    ) -> Result<()> {
        let layout = self.layout.as_ref();
        let reference =
            layout.and_then(|l| l.files.get(file as usize)).filter(|_| self.missing.contains(&file));
        let reference = reference.ok_or_else(|| self.astray("a file that was not wanted"))?;
        let complete = cache.put(reference, self.offer.pid, offset, piece);
        if complete.map_err(|e| self.astray(&e.to_string()))? {
            self.missing.remove(&file);
            self.build(memory, cache)?;
        }
        Ok(())
    }

    fn build(&mut self, memory: &Memory, cache: &Cache) -> Result<()> {
        if !self.missing.is_empty() {
            return Ok(());
        }
        let Some(layout) = &self.layout else { return Ok(()) };
        let Some(injection) = &mut self.injection else { return Ok(()) };
        let reserve = self.offer.reserve;
        let listener = match &self.listener {
            Some(listener) => Rc::clone(listener),
            None => {
                empty(injection, memory, layout, (reserve, self.foreign.as_ref()))?;
                let listener = Rc::new(Listener::install(injection, reserve.room(), &filter(reserve))?);
                self.listener = Some(Rc::clone(&listener));
                listener
            }
        };
        let mut space = GuestSpace { injection, listener: &listener, cache, files: &layout.files };
        apply(&mut space, layout, (reserve, self.foreign.as_ref()), &mut self.shown)?;
        // What was unmapped where it was before goes home with it all the same; what was unmapped at home while it was sent,
        // does not.
        let live: HashSet<_> = layout.files.iter().filter(|f| f.live).map(|f| (f.device, f.inode)).collect();
        self.shown.retain(|_, file| !file.live || live.contains(&(file.device, file.inode)));
        for file in layout.files.iter().filter(|file| file.live) {
            if let Some(Ok(meta)) = cache.objects.get((file.device, file.inode)).map(File::metadata) {
                self.shown.entry((meta.dev(), meta.ino())).or_insert_with(|| file.clone());
            }
        }
        Ok(())
    }

    /// Takes the numbers of the threads that it has at its old place, besides the first one.
    ///
    /// # Errors
    /// If they are none.
    pub fn take_crew(&mut self, numbers: &[i32]) -> Result<()> {
        let sound = numbers.len() < MOST_THREADS
            && self.crew.want(numbers.iter().copied(), self.offer.own_pid)
            && self.image.is_none();
        if sound { Ok(()) } else { Err(self.astray("a crew that cannot be")) }
    }

    /// Makes these threads, unless the address space still waits for content.
    ///
    /// # Errors
    /// If one cannot be made here.
    pub fn muster(&mut self, memory: &Memory, sandbox: &Sandbox) -> std::result::Result<(), Failed> {
        let Some(listener) = self.listener.as_ref().filter(|_| self.missing.is_empty()) else {
            return Ok(());
        };
        let Some(injection) = self.injection.take() else { return Ok(()) };
        let place = Place { reserve: self.offer.reserve, memory, listener, sandbox };
        self.injection = Some(self.crew.muster(place, injection)?);
        Ok(())
    }

    /// The listening end of its filter, once it has one.
    #[must_use]
    pub fn listener(&self) -> Option<&Rc<Listener>> {
        self.listener.as_ref()
    }

    /// Takes pages.
    ///
    /// # Errors
    /// If they lie outside its memory.
    pub fn take_pages(&mut self, runs: &[Run], bytes: &[u8], memory: &Memory) -> Result<()> {
        let reserve = self.offer.reserve;
        // Before the space is built this process still is a copy of ourselves.
        if self.listener.is_none() || !self.missing.is_empty() {
            return Err(self.astray("pages before their address space"));
        }
        if runs.iter().any(|&(start, len)| reserve.meets(start, start.saturating_add(len))) {
            return Err(self.astray("pages in our range"));
        }
        target::write_pages(memory, runs, bytes)
    }

    /// Takes a piece of shared memory, of which nothing but what is said here is there.
    ///
    /// # Errors
    /// If it is no part of what its address space maps.
    pub fn take_object(&self, file: u32, offset: u64, piece: &[u8], cache: &Cache) -> Result<()> {
        let file = self.layout.as_ref().and_then(|layout| layout.files.get(file as usize));
        let put = file.map(|file| cache.objects.put(file, offset, piece));
        if matches!(put, Some(Ok(()))) {
            Ok(())
        } else {
            Err(self.astray("what is no part of shared memory"))
        }
    }

    /// Forgets pages.
    ///
    /// # Errors
    /// If they lie outside its memory.
    pub fn forget(&mut self, runs: &[Run], cache: &Cache) -> Result<()> {
        let reserve = self.offer.reserve;
        if runs.iter().any(|&(start, len)| reserve.meets(start, start.saturating_add(len))) {
            return Err(self.astray("pages in our range"));
        }
        let astray = self.astray("pages before their address space");
        let (Some(injection), Some(listener)) = (&mut self.injection, &self.listener) else {
            return Err(astray);
        };
        let pid = injection.pid();
        let mut space = GuestSpace { injection, listener, cache, files: &[] };
        target::forget(&mut space, pid, runs)
    }

    /// Takes the rest; the process could be resumed after it.
    ///
    /// # Errors
    /// If it is unsound, or cannot be restored here.
    pub fn take_image(
        &mut self,
        image: Box<ProcessImage>,
        talk: Conversation,
        memory: &Memory,
        sandbox: &Sandbox,
        cache: &Cache,
    ) -> std::result::Result<(), Failed> {
        let came = Instant::now();
        image.check().map_err(|what| self.astray(what))?;
        wall::wait(talk.wall, wall::now()).map_err(|behind| self.astray(&behind.to_string()))?;
        let offer = &self.offer;
        // Without the first one: that has ended.
        let (first, others) = match image.threads.split_first() {
            Some((first, others)) if first.tid == offer.pid => (Some(first), others),
            _ => (None, image.threads.as_slice()),
        };
        let other = |thread: &ThreadImage| thread.tid == offer.pid || thread.own_tid == offer.own_pid;
        if first.is_some_and(|first| first.own_tid != offer.own_pid) || others.iter().any(other) {
            return Err(self.astray("another process than it has offered").into());
        }
        if talk.talks.len() != image.threads.len() {
            return Err(self.astray("threads that have not said how far their talk is").into());
        }
        let astray = self.astray("an image before its address space, or twice");
        let title = Member::title(offer.home, offer.pid, &offer.command);
        let reserve = offer.reserve;
        // An injection is there until the image has come.
        let (Some(mut injection), Some(listener)) =
            (self.injection.take_if(|_| self.image.is_none()), self.listener.as_ref())
        else {
            return Err(astray.into());
        };
        let mut space = GuestSpace { injection: &mut injection, listener, cache, files: &image.layout.files };
        image.restore(&mut space, memory, reserve, Some(&title))?;
        let place = Place { reserve, memory, listener, sandbox };
        // What it is has been looked at with the image.
        let _sound = self.crew.want(others.iter().map(|thread| thread.own_tid), offer.own_pid);
        let mut injection = self.crew.muster(place, injection)?;
        if let Some(first) = first {
            let only = std::slice::from_mut(&mut injection);
            tern_image::thread::restore(only, &[first], memory, reserve.wide_desk())?;
        }
        self.threads = std::mem::take(&mut self.crew).dress(place, others)?;
        match first {
            Some(first) => self.threads.insert(0, injection.finish_with(&first.registers, first.sigmask)?),
            None => place.end_first(injection)?,
        }
        let frozen = Duration::from_micros(talk.frozen_us);
        self.frozen = came.checked_sub(frozen).unwrap_or(came);
        self.image = Some((image, talk));
        Ok(())
    }

    /// Whether its image has come, and has this thread.
    #[must_use]
    pub fn has(&self, tid: HomePid) -> bool {
        self.image.as_ref().is_some_and(|(image, _)| image.threads.iter().any(|thread| thread.tid == tid))
    }

    /// A signal that a thread of it takes before it goes on, with its number ([`tern_migrate::message::Talk::signals`]). It
    /// had been sent before the process was captured, and whoever sent it may have told it so.
    pub fn take_signal(&mut self, tid: HomePid, count: u64, info: &[u8]) {
        let Some((image, talk)) = &mut self.image else { return };
        let at = image.threads.iter().position(|thread| thread.tid == tid);
        if let Some(talk) = at.and_then(|at| talk.talks.get_mut(at)).filter(|talk| count > talk.signals) {
            talk.signals = count;
            talk.carried.push(info.to_vec());
        }
    }

    /// Since when it has stood still, but for its image's way.
    #[must_use]
    pub fn frozen(&self) -> Instant {
        self.frozen
    }

    /// Everything is there: the guest's threads with their registers, stopped; what they are to go on with.
    ///
    /// # Errors
    /// If something is missing, or the guest is gone.
    pub fn finish(mut self) -> Result<Arrived> {
        let astray = self.astray("a start without an image");
        let (Some((image, talk)), Some(listener)) = (self.image.take(), self.listener.take()) else {
            return Err(astray);
        };
        Ok(Arrived { threads: self.threads, image, talk, listener, shown: self.shown, foreign: self.foreign })
    }

    fn astray(&self, what: &str) -> Error {
        let pid = self.injection.as_ref().map_or(0, Injection::pid);
        Error::Astray { what: format!("its sender sent {what}"), pid }
    }
}

/// A guest ready to run.
#[derive(Debug)]
pub struct Arrived {
    /// Its threads, in the image's order.
    pub threads: Vec<Stopped>,
    /// Its image.
    pub image: Box<ProcessImage>,
    /// Its calls and signals.
    pub talk: Conversation,
    /// The listening end of its filter.
    pub listener: Rc<Listener>,
    /// How its files are shown.
    pub shown: Shown,
    /// What it has instead of its home's vDSO, if that is another.
    pub foreign: Option<Foreign>,
}

/// The filter that every guest runs under, from the table of calls.
pub(crate) fn filter(reserve: tern_image::Reserve) -> Vec<Instruction> {
    let ours = crate::hot::behind_native(reserve);
    tern_syscall::filter(ours)
        .iter()
        .map(|i| Instruction { code: i.code, jt: i.jt, jf: i.jf, k: i.k })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::{Epoch, MigrationId, NodeId, ShimId};
    use tern_image::Reserve;
    use tern_migrate::message::Vdso;

    fn machine() -> Machine {
        let cpu_flags = ["avx", "fpu", "sse2"].map(String::from).to_vec();
        Machine {
            cpu_flags,
            cpuid: vec![3, 1 << 26],
            xstate_len: 832,
            vdso: Vdso { code: vec![7; 0x2000], lengths: vec![0x4000, 0x2000] },
        }
    }

    fn offer() -> Offer {
        Offer {
            version: tern_image::VERSION,
            migration: MigrationId([1; 16]),
            pid: HomePid(4711),
            epoch: Epoch(1),
            home: NodeId(1),
            shim: ShimId([2; 16]),
            own_pid: 4711,
            command: "work".into(),
            reserve: Reserve { start: Reserve::AREA },
            wall: 1_000_000_000,
            machine: machine(),
        }
    }

    #[test]
    fn offers_are_declined_with_a_sentence() {
        let clock = 1_000_000_000;
        assert!(judge(&offer(), &machine(), clock).unwrap().is_none());
        let why = |change: fn(&mut Offer)| {
            let mut offer = offer();
            change(&mut offer);
            judge(&offer, &machine(), clock).unwrap_err()
        };
        assert!(why(|o| o.version += 1).starts_with("image version"));
        assert_eq!(why(|o| o.machine.cpu_flags.push("zfp".into())), "the processor here lacks zfp");
        assert!(why(|o| drop(o.machine.cpu_flags.pop())).contains("other features"));
        assert!(why(|o| o.machine.cpuid[0] = 2).contains("CPUID"));
        assert!(why(|o| o.machine.vdso.code[0] = 8).contains("vDSO"));
        assert!(why(|o| o.own_pid = 1).starts_with("init:"));
        assert!(why(|o| o.wall += 51_000_000).starts_with("the clock here is 51 ms behind"));
    }
}
