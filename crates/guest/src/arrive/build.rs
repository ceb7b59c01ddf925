//! Building a guest from a fresh process of the sandbox, a copy of the shim.
//!
//! ```text
//!  message   action                                                             reply
//!  offer     checked; a process with the right pid is made in the sandbox       → Accepted
//!  threads   the tids to create are noted
//!  space     missing content is requested.                                      → RequestFiles
//!            When all content is there, the copy of the shim is emptied, the
//!            filter is installed, regions are mapped, and threads are created.
//!  pages     written, round by round
//!  image     bounds of code, data and heap, signal actions, registers are set   → Ready
//!  go        it runs                                                            → Running
//! ```
//! A failure before `Go` ends the process here; the source has not changed.

use crate::arrive::threads::{CloneTarget, RestoredThread, Threads};
use crate::error::GuestResult;
use crate::process::space::{GuestSpace, MappedFiles, apply};
use crate::sandbox::Sandbox;
use crate::sandbox::empty::empty;
use crate::vdso::foreign::ForeignVdso;
use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_image::content::ContentCache;
use tern_image::process::MAX_THREADS;
use tern_image::{Layout, ProcessImage, ThreadImage, Unmovable};
use tern_migrate::message::{Machine, Offer, ProcessSync};
use tern_migrate::{target, wall};
use tern_tracee::inject::{self, Injection};
use tern_tracee::listener::{Instruction, Listener};
use tern_tracee::pagemap::Run;
use tern_tracee::stop::Stopped;
use tern_tracee::{Error, Memory, Result};

/// A guest that is being built.
#[derive(Debug)]
pub(crate) struct Arriving {
    /// The offer.
    pub(crate) offer: Offer,
    foreign_vdso: Option<ForeignVdso>,
    injection: Option<Injection>,
    listener: Option<Rc<Listener>>,
    mapped_files: MappedFiles,
    /// The layout whose files a worker is opening, and the number of layouts received.
    announced: (Option<Layout>, u64),
    layout: Option<Layout>,
    missing: HashSet<u32>,
    image: Option<(Box<ProcessImage>, ProcessSync)>,
    /// Its threads except the first, until the image arrives.
    threads: Threads,
    /// All its threads, in the image's order, once the image has arrived.
    stopped_threads: Vec<RestoredThread>,
    /// Since when it has been stopped.
    frozen_since: Instant,
}

/// Checks whether a process can come here, where the wall clock shows `wall_now`. Returns the
/// replacement for its home's vDSO, if that differs from this node's.
///
/// # Errors
/// If the process must be declined. The error is the reason, for the reply to home.
pub(crate) fn check_offer(
    offer: &Offer,
    ours: &Machine,
    wall_now: u64,
) -> std::result::Result<Option<ForeignVdso>, String> {
    if offer.version != tern_image::VERSION {
        return Err(format!(
            "image version {} is not supported here ({})",
            offer.version,
            tern_image::VERSION
        ));
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
    // Without CPUID faulting the program could find features here that home does not have.
    if theirs.cpu_flags != ours.cpu_flags || theirs.xstate_len != ours.xstate_len {
        return Err("the processor here has other features than home's".into());
    }
    // A feature that is disabled on the kernel command line is missing in the kernel's list, but
    // CPUID reports it.
    if theirs.cpuid != ours.cpuid {
        return Err("CPUID here reports other features than home's".into());
    }
    let foreign_vdso = ForeignVdso::check(&theirs.vdso, &ours.vdso)?;
    wall::check_offer(offer.wall, wall_now).map_err(|behind| behind.to_string())?;
    if offer.own_pid <= 1 {
        return Err(Unmovable::Init.to_string());
    }
    Ok(foreign_vdso)
}

impl Arriving {
    /// Begins with a fresh process of the sandbox.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn begin(offer: Offer, foreign_vdso: Option<ForeignVdso>, child: Stopped) -> Result<Self> {
        Ok(Self {
            offer,
            foreign_vdso,
            injection: Some(Injection::begin(child, inject::own_site())?),
            listener: None,
            mapped_files: MappedFiles::new(),
            announced: (None, 0),
            layout: None,
            missing: HashSet::new(),
            image: None,
            threads: Threads::default(),
            stopped_threads: Vec::new(),
            frozen_since: Instant::now(),
        })
    }

    /// Receives the layout of the address space, and returns its number.
    ///
    /// # Errors
    /// If the layout is invalid.
    pub(crate) fn receive_space(&mut self, layout: Layout) -> Result<u64> {
        layout.check().map_err(|what| self.inconsistent(what))?;
        if layout.regions.iter().any(|r| self.offer.reserve.overlaps(r.start, r.end)) {
            return Err(self.inconsistent("a layout that covers the reserved range"));
        }
        self.announced = (Some(layout), self.announced.1 + 1);
        Ok(self.announced.1)
    }

    /// Builds the address space of the layout with this number, and returns the files whose content
    /// is missing. If there are any, it is built once their content has arrived. Does nothing if the
    /// guest has got another layout meanwhile.
    ///
    /// # Errors
    /// If it cannot be built.
    pub(crate) fn build_space(
        &mut self,
        number: u64,
        memory: &Memory,
        cache: &mut ContentCache,
    ) -> Result<Option<Vec<u32>>> {
        let Some(layout) = self.announced.0.take_if(|_| self.announced.1 == number) else {
            return Ok(None);
        };
        if let Some(foreign_vdso) = &mut self.foreign_vdso {
            foreign_vdso.locate(&layout, self.injection.as_ref().map_or(0, Injection::pid))?;
        }
        for file in layout.files.iter().filter(|file| file.is_object) {
            cache.objects.create(file).map_err(|e| self.inconsistent(&format!("shared memory: {e}")))?;
        }
        let missing = layout.files.iter().enumerate().filter(|(_, f)| !cache.has(f)).map(|(at, _)| at as u32);
        self.missing = missing.collect();
        self.layout = Some(layout);
        self.build(memory, cache)?;
        Ok(Some(self.missing.iter().copied().collect()))
    }

    /// Receives a piece of a file's content.
    ///
    /// # Errors
    /// If the content does not match the announced hash.
    pub(crate) fn receive_file(
        &mut self,
        file: u32,
        offset: u64,
        piece: &[u8],
        memory: &Memory,
        cache: &mut ContentCache,
    ) -> Result<()> {
        let layout = self.layout.as_ref();
        let reference =
            layout.and_then(|l| l.files.get(file as usize)).filter(|_| self.missing.contains(&file));
        let reference = reference.ok_or_else(|| self.inconsistent("a file that was not requested"))?;
        let complete = cache.put(reference, self.offer.pid, offset, piece);
        if complete.map_err(|e| self.inconsistent(&e.to_string()))? {
            self.missing.remove(&file);
            self.build(memory, cache)?;
        }
        Ok(())
    }

    fn build(&mut self, memory: &Memory, cache: &ContentCache) -> Result<()> {
        if !self.missing.is_empty() {
            return Ok(());
        }
        let Some(layout) = &self.layout else { return Ok(()) };
        let Some(injection) = &mut self.injection else { return Ok(()) };
        let reserve = self.offer.reserve;
        let listener = match &self.listener {
            Some(listener) => Rc::clone(listener),
            None => {
                empty(injection, memory, layout, (reserve, self.foreign_vdso.as_ref()))?;
                let listener =
                    Rc::new(Listener::install(injection, reserve.data_start(), &guest_filter(reserve))?);
                self.listener = Some(Rc::clone(&listener));
                listener
            }
        };
        let batch_area = Some(reserve.large_batch_area());
        let mut space =
            GuestSpace { injection, listener: &listener, cache, files: &layout.files, batch_area };
        apply(&mut space, layout, (reserve, self.foreign_vdso.as_ref()), &mut self.mapped_files)?;
        // Keep only the shared memory that this layout lists. It lists shared memory that the
        // program unmapped on an earlier node, since that must still go home. It does not list
        // shared memory that the program unmapped at home during the transfer.
        let live: HashSet<_> =
            layout.files.iter().filter(|f| f.is_object).map(|f| (f.device, f.inode)).collect();
        self.mapped_files.retain(|_, file| !file.is_object || live.contains(&(file.device, file.inode)));
        for file in layout.files.iter().filter(|file| file.is_object) {
            if let Some(Ok(meta)) =
                cache.objects.get((file.device, file.inode)).map(|object| object.metadata())
            {
                self.mapped_files.entry((meta.dev(), meta.ino())).or_insert_with(|| file.clone());
            }
        }
        Ok(())
    }

    /// Receives the tids of its threads at the source, except the first.
    ///
    /// # Errors
    /// If they are not valid tids.
    pub(crate) fn receive_tids(&mut self, numbers: &[i32]) -> Result<()> {
        let is_valid = numbers.len() < MAX_THREADS
            && self.threads.set_wanted(numbers.iter().copied(), self.offer.own_pid)
            && self.image.is_none();
        if is_valid { Ok(()) } else { Err(self.inconsistent("invalid thread ids")) }
    }

    /// Creates the announced threads, unless the address space still waits for content.
    ///
    /// # Errors
    /// If one cannot be created here.
    pub(crate) fn create_threads(&mut self, memory: &Memory, sandbox: &Sandbox) -> GuestResult {
        let Some(listener) = self.listener.as_ref().filter(|_| self.missing.is_empty()) else {
            return Ok(());
        };
        let Some(injection) = self.injection.take() else { return Ok(()) };
        let target = CloneTarget { reserve: self.offer.reserve, memory, listener, sandbox };
        self.injection = Some(self.threads.create_missing(target, injection)?);
        Ok(())
    }

    /// The notification fd of its filter, once that is installed.
    #[must_use]
    pub(crate) fn listener(&self) -> Option<&Rc<Listener>> {
        self.listener.as_ref()
    }

    /// Receives pages.
    ///
    /// # Errors
    /// If they lie outside its memory or in the reserved range, or come before the address space.
    pub(crate) fn receive_pages(&mut self, runs: &[Run], bytes: &[u8], memory: &Memory) -> Result<()> {
        let reserve = self.offer.reserve;
        // Before the space is built this process is still a copy of the shim.
        if self.listener.is_none() || !self.missing.is_empty() {
            return Err(self.inconsistent("pages before their address space"));
        }
        if runs.iter().any(|&(start, len)| reserve.overlaps(start, start.saturating_add(len))) {
            return Err(self.inconsistent("pages in the reserved range"));
        }
        target::write_pages(memory, runs, bytes)
    }

    /// Receives a piece of the content of a shared memory object. `build_space` has created the
    /// object, empty.
    ///
    /// # Errors
    /// If its address space maps no such memory.
    pub(crate) fn receive_object(
        &self,
        file: u32,
        offset: u64,
        piece: &[u8],
        cache: &ContentCache,
    ) -> Result<()> {
        let file = self.layout.as_ref().and_then(|layout| layout.files.get(file as usize));
        let put = file.map(|file| cache.objects.write(file, offset, piece));
        if matches!(put, Some(Ok(()))) {
            Ok(())
        } else {
            Err(self.inconsistent("data outside of shared memory"))
        }
    }

    /// Discards pages.
    ///
    /// # Errors
    /// If they lie outside its memory or in the reserved range, or come before the address space.
    pub(crate) fn discard_pages(&mut self, runs: &[Run], cache: &ContentCache) -> Result<()> {
        let reserve = self.offer.reserve;
        if runs.iter().any(|&(start, len)| reserve.overlaps(start, start.saturating_add(len))) {
            return Err(self.inconsistent("pages in the reserved range"));
        }
        let inconsistent = self.inconsistent("pages before their address space");
        let (Some(injection), Some(listener)) = (&mut self.injection, &self.listener) else {
            return Err(inconsistent);
        };
        let pid = injection.pid();
        let batch_area = Some(reserve.large_batch_area());
        let mut space = GuestSpace { injection, listener, cache, files: &[], batch_area };
        target::discard_pages(&mut space, pid, runs)
    }

    /// Receives the image, after which the process can be resumed.
    ///
    /// # Errors
    /// If it is invalid, or cannot be restored here.
    pub(crate) fn receive_image(
        &mut self,
        image: Box<ProcessImage>,
        sync: ProcessSync,
        memory: &Memory,
        sandbox: &Sandbox,
        cache: &ContentCache,
    ) -> GuestResult {
        let arrived_at = Instant::now();
        image.check().map_err(|what| self.inconsistent(what))?;
        wall::wait_time(sync.wall, wall::now()).map_err(|behind| self.inconsistent(&behind.to_string()))?;
        let offer = &self.offer;
        // The image has no first thread if that has ended.
        let (first, others) = match image.threads.split_first() {
            Some((first, others)) if first.tid == offer.pid => (Some(first), others),
            _ => (None, image.threads.as_slice()),
        };
        let claims_first_id =
            |thread: &ThreadImage| thread.tid == offer.pid || thread.own_tid == offer.own_pid;
        if first.is_some_and(|first| first.own_tid != offer.own_pid) || others.iter().any(claims_first_id) {
            return Err(self.inconsistent("another process than was offered").into());
        }
        if sync.threads.len() != image.threads.len() {
            return Err(self.inconsistent("an image without the call state of its threads").into());
        }
        let inconsistent = self.inconsistent("an image before its address space, or twice");
        // The title that `ps` on this node shows.
        let title = format!("tern:{}/{} {}", offer.home, offer.pid, offer.command);
        let reserve = offer.reserve;
        // The injection exists until the image has arrived.
        let (Some(mut injection), Some(listener)) =
            (self.injection.take_if(|_| self.image.is_none()), self.listener.as_ref())
        else {
            return Err(inconsistent.into());
        };
        let batch_area = Some(reserve.large_batch_area());
        let files = &image.layout.files;
        let mut space = GuestSpace { injection: &mut injection, listener, cache, files, batch_area };
        image.restore(&mut space, memory, reserve, Some(&title))?;
        let target = CloneTarget { reserve, memory, listener, sandbox };
        // The tids were checked with the image.
        let _valid = self.threads.set_wanted(others.iter().map(|thread| thread.own_tid), offer.own_pid);
        let mut injection = self.threads.create_missing(target, injection)?;
        if let Some(first) = first {
            let only = std::slice::from_mut(&mut injection);
            tern_image::thread::restore(only, &[first], memory, reserve.large_batch_area())?;
        }
        self.stopped_threads = std::mem::take(&mut self.threads).restore(target, others)?;
        match first {
            Some(first) => {
                self.stopped_threads.insert(0, target.finish_thread(injection, first)?);
            }
            None => target.end_first(injection)?,
        }
        let frozen = Duration::from_micros(sync.frozen_us);
        self.frozen_since = arrived_at.checked_sub(frozen).unwrap_or(arrived_at);
        self.image = Some((image, sync));
        Ok(())
    }

    /// Whether its image has arrived and has this thread.
    #[must_use]
    pub(crate) fn has_thread(&self, tid: HomePid) -> bool {
        self.image.as_ref().is_some_and(|(image, _)| image.threads.iter().any(|thread| thread.tid == tid))
    }

    /// Receives a signal for a thread, with its sequence number
    /// ([`tern_migrate::message::ThreadSync::signals`]). The thread gets it before it resumes. The signal
    /// was sent before the process was captured, and the sender may rely on its delivery.
    pub(crate) fn receive_signal(&mut self, tid: HomePid, sequence: u64, info: &[u8]) {
        let Some((image, sync)) = &mut self.image else { return };
        let at = image.threads.iter().position(|thread| thread.tid == tid);
        if let Some(sync) = at.and_then(|at| sync.threads.get_mut(at)).filter(|sync| sequence > sync.signals)
        {
            sync.signals = sequence;
            sync.pending_signals.push(info.to_vec());
        }
    }

    /// Since when it has been stopped, not counting the time its image was in transit.
    #[must_use]
    pub(crate) fn frozen_since(&self) -> Instant {
        self.frozen_since
    }

    /// Completes the guest after all its parts have arrived. Its threads have their registers and
    /// are stopped.
    ///
    /// # Errors
    /// If a part is missing, or the guest is gone.
    pub(crate) fn finish(mut self) -> Result<ReadyGuest> {
        let inconsistent = self.inconsistent("a start without an image");
        let (Some((image, sync)), Some(listener)) = (self.image.take(), self.listener.take()) else {
            return Err(inconsistent);
        };
        Ok(ReadyGuest {
            threads: self.stopped_threads,
            image,
            sync,
            listener,
            mapped_files: self.mapped_files,
            foreign_vdso: self.foreign_vdso,
        })
    }

    fn inconsistent(&self, what: &str) -> Error {
        let pid = self.injection.as_ref().map_or(0, Injection::pid);
        Error::Inconsistent { what: format!("its source sent {what}"), pid }
    }
}

/// A guest that is ready to run.
#[derive(Debug)]
pub(crate) struct ReadyGuest {
    /// Its threads, in the image's order.
    pub(crate) threads: Vec<RestoredThread>,
    /// Its image.
    pub(crate) image: Box<ProcessImage>,
    /// The state of its calls and signals.
    pub(crate) sync: ProcessSync,
    /// The notification fd of its filter.
    pub(crate) listener: Rc<Listener>,
    /// The files that it maps, by the device and inode that this node shows for them.
    pub(crate) mapped_files: MappedFiles,
    /// The replacement for its home's vDSO, if that differs from this node's.
    pub(crate) foreign_vdso: Option<ForeignVdso>,
}

/// The seccomp filter of every guest, generated from the syscall table.
pub(crate) fn guest_filter(reserve: tern_image::Reserve) -> Vec<Instruction> {
    tern_syscall::filter(crate::fastpath::first_return_addr(reserve))
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
            reserve: Reserve { start: Reserve::HINT },
            wall: 1_000_000_000,
            machine: machine(),
        }
    }

    #[test]
    fn unsuitable_offers_are_declined_with_a_reason() {
        let wall_now = 1_000_000_000;
        assert!(check_offer(&offer(), &machine(), wall_now).unwrap().is_none());
        let why = |change: fn(&mut Offer)| {
            let mut offer = offer();
            change(&mut offer);
            check_offer(&offer, &machine(), wall_now).unwrap_err()
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
