//! A process becomes a deputy.
//!
//! ```text
//!  Resident ─ destination prepared ─▶ Outgoing ─ image sent, Ready ─▶ HandedOver ─ Running ─▶ Away
//!      ▲                                 │                                │
//!      └────── a failure: it runs on ────┴──── the link breaks first ─────┘
//! ```
//! Until its guest is known to run, the process's memory is kept. If the guest cannot have done
//! anything yet (everything it does goes through home) the move can be revoked with a new epoch.

use crate::links::peers::PeerId;
use crate::process::Process;
use crate::process::blob;
use crate::process::mailbox::{Mailbox, MailboxArea};
use crate::process::space::HomeSpace;
use crate::process::state::{Outgoing, State};
use crate::waker::Waker;
use std::collections::HashSet;
use tern_ids::{HomePid, NodeId, ShimId};
use tern_image::Unmovable;
use tern_image::pages::PageFinder;
use tern_image::process::{Action, SIG_IGN, check_registers, is_ignored_by_default};
use tern_image::{ProcessImage, Reserve, ThreadImage};
use tern_migrate::message::Offer;
use tern_migrate::source::MemorySender;
use tern_migrate::target;
use tern_tracee::batch::BatchArea;
use tern_tracee::inject::{self, Injection, Site};
use tern_tracee::procfs;
use tern_tracee::siginfo::signal_of;
use tern_tracee::stop::{EXIT_KILL, FOLLOW, FOLLOW_THREADS, Stop, Stopped};
use tern_tracee::write_tracker::WriteTracker;
use tern_tracee::{Error, Memory, Result};

/// Smaller processes (KiB) are not tracked while they run, but stopped and copied at once.
const MIN_TRACKED_KIB: u64 = 8 << 10;

impl Process {
    /// Takes the stop of a stopped thread, which then counts as running until the stop is put back.
    ///
    /// # Errors
    /// If it is not stopped.
    pub(crate) fn take_stopped(&mut self, tid: HomePid) -> Result<Stopped> {
        self.thread(tid)?.stopped.take().ok_or(Error::Gone { pid: tid.0 })
    }

    /// Runs `work` in a stopped thread of a process at home, by injection.
    pub(crate) fn inject<T>(
        &mut self,
        work: impl FnOnce(&mut Self, &mut Injection) -> Result<T>,
    ) -> Result<T> {
        let tid = self.any_thread()?;
        self.inject_into(tid, work)
    }

    /// As [`inject`](Self::inject), in this thread.
    fn inject_into<T>(
        &mut self,
        tid: HomePid,
        work: impl FnOnce(&mut Self, &mut Injection) -> Result<T>,
    ) -> Result<T> {
        let (mut injection, _) = inject::through_vdso(self.take_stopped(tid)?)?;
        let done = work(self, &mut injection);
        self.set_stopped(injection.finish()?)?;
        done
    }

    /// Prepares a stopped process for its departure: reserves an address range in it, starts to
    /// track its writes if that pays, and builds the offer. It stays stopped.
    ///
    /// # Errors
    /// If it is gone or has no free address range. The range may be reserved already.
    pub(crate) fn prepare(&mut self, peer: PeerId, home: (NodeId, ShimId)) -> Result<Offer> {
        let pid = self.memory.pid();
        let (reserve, tracker) = self.inject(|process, injection| {
            // With draining threads it still has the range of its last journey.
            let reserve = match process.reserve {
                Some(reserve) => reserve,
                None => {
                    let reserve = Reserve::map_new(injection)?;
                    // A child that it forks before it leaves must not inherit the reserved range.
                    reserve.set_inherited(injection, false)?;
                    reserve
                }
            };
            let mut tracker = None;
            if procfs::status(pid)?.resident_kib >= MIN_TRACKED_KIB {
                tracker = WriteTracker::begin(pid, &mut |nr, args| injection.call(nr, args)).ok();
            }
            Ok((reserve, tracker))
        })?;
        self.memory = Memory::open(pid)?;
        let maps = procfs::maps(pid)?;
        let machine = tern_migrate::machine::describe(&self.memory, &maps)?;
        let vdso = maps.iter().find(|m| m.name == b"[vdso]").map_or(0..0, |m| m.start..m.end);
        let source = MemorySender::new(self.pid, Memory::open(pid)?, PageFinder::new(pid, tracker, true)?);
        self.reserve = Some(reserve);
        self.machine = Some(machine);
        let outgoing = Outgoing {
            peer,
            is_accepted: false,
            source: Some(source),
            sending: None,
            vdso,
            image: None,
            ready: false,
            measured_at: None,
            carried_objects: HashSet::new(),
            live_objects: HashSet::new(),
            arrived: false,
        };
        self.state = State::Outgoing(Box::new(outgoing));
        self.offer(home)
    }

    /// Resumes a prepared process while it is sent. If the shim has cut short a transfer of one of
    /// its threads, the process stays stopped: the rest is transferred after the move.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn resume_while_sending(&mut self) -> Result<()> {
        if self.threads.values().any(|thread| thread.partial.is_some()) {
            return Ok(());
        }
        self.resume_all()
    }

    /// Resumes all stopped threads. Draining ones continue their calls.
    ///
    /// # Errors
    /// If one was in an inconsistent state. Threads that are gone are ignored.
    pub(crate) fn resume_all(&mut self) -> Result<()> {
        let mut stopped = Vec::new();
        for thread in self.threads.values_mut() {
            thread.stop_wanted = false;
            thread.continue_sleep_if_stopped();
            stopped.extend(thread.stopped.take().map(|stopped| (stopped, thread.draining.is_some())));
        }
        for (stopped, is_draining) in stopped {
            let resumed = if is_draining { self.resume_unnoticed(stopped) } else { resume_natively(stopped) };
            match resumed {
                Err(error) if !error.is_gone() => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks that all its threads, which are stopped, run 64-bit code, and that calls that are
    /// injected into them reach the kernel.
    pub(crate) fn check_registers(&self) -> std::result::Result<(), Unmovable> {
        self.threads.values().filter_map(|thread| thread.stopped.as_ref()).try_for_each(|stopped| {
            if stopped.dispatches_calls() {
                return Err(Unmovable::CpuMode("handles its own system calls".into()));
            }
            stopped.registers().map_or(Ok(()), |registers| check_registers(&registers))
        })
    }

    /// Ends the injections of threads, which stay stopped.
    ///
    /// # Errors
    /// If one is gone.
    pub(super) fn finish_injections(&mut self, injections: Vec<Injection>) -> Result<()> {
        let mut finished = Ok(());
        for injection in injections {
            let tid = HomePid(injection.pid());
            finished = finished.and(injection.finish().and_then(|stopped| {
                self.thread(tid)?.stopped = Some(stopped);
                Ok(())
            }));
        }
        finished
    }

    /// Builds the offer for a node, with a new epoch.
    ///
    /// # Errors
    /// If the process has not been prepared.
    pub(crate) fn offer(&mut self, (home, shim): (NodeId, ShimId)) -> Result<Offer> {
        self.offered_epoch = self.offered_epoch.max(self.epoch).next();
        let inconsistent =
            || Error::Inconsistent { what: "offered before it was prepared".into(), pid: self.pid.0 };
        Ok(Offer {
            version: tern_image::VERSION,
            migration: self.task.as_ref().map(|t| t.migration).ok_or_else(inconsistent)?,
            pid: self.pid,
            epoch: self.offered_epoch,
            home,
            shim,
            own_pid: self.own_pid,
            command: self.command.clone(),
            reserve: self.reserve.ok_or_else(inconsistent)?,
            wall: tern_migrate::wall::now(),
            machine: self.machine.clone().ok_or_else(inconsistent)?,
        })
    }

    /// Undoes the preparation of a stopped process, so that it can continue at home.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn undo_prepare(&mut self) -> Result<()> {
        self.state = State::Resident;
        self.end_partials()?;
        let Some(reserve) = self.reserve else { return Ok(()) };
        // A seccomp filter, which a thread may have installed while the process was sent, could kill the
        // process for an injected call.
        let is_filtered = |tid: HomePid| procfs::status(tid.0).is_ok_and(|status| status.seccomp != 0);
        let Some(unfiltered) = self.live_threads().map(|thread| thread.tid).find(|tid| !is_filtered(*tid))
        else {
            // The range stays. It is only address space.
            return Ok(());
        };
        let tids: Vec<HomePid> = self.threads.keys().copied().collect();
        let memory = Memory::open(self.memory.pid())?;
        self.inject_into(unfiltered, |process, injection| {
            for tid in tids {
                process.raise_unacked((&mut *injection, &memory), reserve, tid)?;
            }
            if process.has_draining_threads() { Ok(()) } else { process.release_reserve(injection, reserve) }
        })
    }

    /// Resumes the stopped threads of a process that is not leaving now after all.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn resume_at_home(&mut self) -> Result<()> {
        self.end_partials()?;
        self.resume_all()
    }

    /// Ends the transfers of stopped threads that the shim has cut short: the calls return short
    /// counts.
    fn end_partials(&mut self) -> Result<()> {
        for thread in self.threads.values_mut() {
            if let (Some(partial), Some(stopped)) = (thread.partial.take(), &thread.stopped) {
                let mut registers = stopped.registers()?;
                partial.restore_arguments(&mut registers);
                (registers.rax, registers.orig_rax) = (partial.done, u64::MAX);
                registers.rip += 2;
                stopped.set_registers(&registers)?;
            }
        }
        Ok(())
    }

    /// Makes a stopped and captured process the deputy of its next epoch and lets it wait for
    /// calls. The guest may run already; its calls wait until then.
    ///
    /// # Errors
    /// If it is gone, or has no free file descriptor at the moment. The flag with the error is true
    /// if the process is stopped again as it was.
    pub(crate) fn become_deputy(
        &mut self,
        image: &ProcessImage,
        waker: &Waker,
    ) -> std::result::Result<(), (Error, bool)> {
        let Some(reserve) = self.reserve else { return Err((Error::Gone { pid: self.pid.0 }, false)) };
        let mut injections = self.injections().map_err(|error| (error, false))?;
        match self.set_up_deputy(&mut injections, reserve, image, waker) {
            Ok(()) => {
                self.actions.clone_from(&image.actions);
                // These signals were taken from the kernel before the hand-over.
                let unacked = self.threads.values().flat_map(|thread| &thread.unacked);
                let taken: Vec<i32> = unacked.map(|(_, info)| signal_of(info)).collect();
                taken.into_iter().for_each(|signal| self.handler_invoked(signal));
                self.start_blobs(injections, reserve).map_err(|error| (error, false))
            }
            Err(error) => {
                let back = self.undo_deputy(injections, reserve, image);
                Err((error, back.is_ok()))
            }
        }
    }

    /// Begins an injection into each of its threads, which are stopped. The draining ones come last.
    pub(crate) fn injections(&mut self) -> Result<Vec<Injection>> {
        let mut tids: Vec<HomePid> = self.live_threads().map(|thread| thread.tid).collect();
        tids.sort_by_key(|tid| self.is_draining(*tid));
        let site = Site::in_vdso(&self.memory)?;
        tids.into_iter().map(|tid| Injection::begin(self.take_stopped(tid)?, site)).collect()
    }

    /// The number of these injections that come before those of draining threads.
    pub(crate) fn count_not_draining(&self, injections: &[Injection]) -> usize {
        injections.partition_point(|injection| !self.is_draining(HomePid(injection.pid())))
    }

    fn is_draining(&self, tid: HomePid) -> bool {
        self.threads.get(&tid).is_some_and(|thread| thread.draining.is_some())
    }

    /// Space for batched calls: large, unless a draining thread's mailbox is in the reserved range.
    pub(crate) fn batch_area(&self, reserve: Reserve) -> BatchArea {
        if self.uses_primary_area() { reserve.small_batch_area() } else { reserve.large_batch_area() }
    }

    fn uses_primary_area(&self) -> bool {
        let mailboxes = self.threads.values().filter_map(|thread| thread.mailbox.as_ref());
        mailboxes.map(Mailbox::area).any(|area| !area.is_secondary())
    }

    fn set_up_deputy(
        &mut self,
        injections: &mut [Injection],
        reserve: Reserve,
        image: &ProcessImage,
        waker: &Waker,
    ) -> Result<()> {
        let memory = Memory::open(self.memory.pid())?;
        memory.write_forced(reserve.start, blob::code())?;
        let home = self.count_not_draining(injections);
        let area = self.batch_area(reserve);
        tern_image::thread::clear_kernel_pointers(&mut injections[..home], &memory, area)?;
        self.take_timers(injections, &memory, reserve)?;
        // Draining threads keep their mailboxes.
        let uses_primary = home > 0 && !self.uses_primary_area();
        let first = injections.first_mut().ok_or(Error::Gone { pid: self.pid.0 })?;
        reserve.set_inherited(first, true)?;
        self.reset_handlers(first, &memory, reserve, image)?;
        let mut mailboxes = Vec::with_capacity(home);
        if uses_primary {
            mailboxes.push(Mailbox::create(first, reserve, MailboxArea::primary(reserve), waker.clone())?);
        }
        let others = home - mailboxes.len();
        mailboxes.extend(self.own_mappings.create_mailboxes(first, reserve, others, waker)?);
        for (injection, mailbox) in injections.iter().zip(mailboxes) {
            self.thread(HomePid(injection.pid()))?.mailbox = Some(mailbox);
            // If the shim dies the guest is lost, so the deputy must die too.
            injection.stopped()?.set_options(FOLLOW | EXIT_KILL)?;
        }
        Ok(())
    }

    /// Starts the blob in deputy threads under injection. Draining threads continue their calls,
    /// now for their guest threads.
    fn start_blobs(&mut self, injections: Vec<Injection>, reserve: Reserve) -> Result<()> {
        for injection in injections {
            let tid = HomePid(injection.pid());
            let thread = self.thread(tid)?;
            (thread.stop_wanted, thread.partial) = (false, None);
            if thread.draining.take().is_some() {
                let stopped = injection.finish()?;
                self.resume_unnoticed(stopped)?;
                continue;
            }
            let area = thread.mailbox.as_ref().map_or(MailboxArea::primary(reserve), Mailbox::area);
            let registers = Self::blob_registers(injection.saved_registers(), reserve, area);
            let mask = injection.saved_mask();
            resume_natively(injection.finish_with(&registers, mask)?)?;
        }
        Ok(())
    }

    /// Whether job control has stopped it, as far as its stopped threads show.
    pub(crate) fn is_job_stopped(&self) -> bool {
        let stopped = self.threads.values().filter_map(|thread| thread.stopped.as_ref());
        stopped.map(|stopped| stopped.stop).any(|stop| matches!(stop, Stop::Group(_)))
    }

    /// Undoes a partial change into a deputy. The process stays stopped, without the reserved range
    /// if no thread is draining.
    fn undo_deputy(
        &mut self,
        mut injections: Vec<Injection>,
        reserve: Reserve,
        image: &ProcessImage,
    ) -> Result<()> {
        let memory = Memory::open(self.memory.pid())?;
        let first = injections.first_mut().ok_or(Error::Gone { pid: self.pid.0 })?;
        image.restore(&mut HomeSpace::new(first, &memory, reserve, &[]), &memory, reserve, None)?;
        self.restore_timers(first, &memory, reserve)?;
        let draining = injections.split_off(self.count_not_draining(&injections));
        let tids = injections.iter().map(|injection| HomePid(injection.pid()));
        let images = tids.map(|tid| thread_image(image, tid)).collect::<Result<Vec<&ThreadImage>>>()?;
        tern_image::thread::restore(&mut injections, &images, &memory, reserve.small_batch_area())?;
        for injection in &mut injections {
            let tid = HomePid(injection.pid());
            injection.stopped()?.set_options(FOLLOW_THREADS)?;
            // Signals that were sent to a guest that never ran.
            self.raise_unacked((injection, &memory), reserve, tid)?;
        }
        let vdso = Site::in_vdso(&memory)?;
        let last = injections.len().checked_sub(1).filter(|_| draining.is_empty());
        for ((at, mut injection), thread) in injections.into_iter().enumerate().zip(images) {
            if Some(at) == last {
                injection.set_site(vdso);
                self.release_reserve(&mut injection, reserve)?;
            } else if let Some(mailbox) = self.thread(thread.tid)?.mailbox.take() {
                self.own_mappings.mailbox_dropped(&mailbox);
            }
            self.set_stopped(injection.finish_with(&thread.registers, thread.sigmask)?)?;
        }
        for injection in draining {
            self.set_stopped(injection.finish()?)?;
        }
        Ok(())
    }

    /// Unmaps the reserved range and all other mappings made for the deputy.
    pub(crate) fn release_reserve(&mut self, injection: &mut Injection, reserve: Reserve) -> Result<()> {
        let mailboxes = self.threads.values_mut().filter_map(|thread| thread.mailbox.take());
        let mut own_ranges: Vec<(u64, u64)> = mailboxes.filter_map(|mailbox| mailbox.large_range()).collect();
        own_ranges.append(&mut self.own_mappings.take_ranges());
        for (start, end) in own_ranges {
            injection.must("release a mailbox", libc::SYS_munmap, [start, end - start, 0, 0, 0, 0])?;
        }
        self.reserve = None;
        reserve.release(injection)
    }

    /// The registers with which a deputy thread starts the blob.
    pub(crate) fn blob_registers(
        from: &tern_tracee::Registers,
        reserve: Reserve,
        area: MailboxArea,
    ) -> tern_tracee::Registers {
        let cleared = from.calling(reserve.start, 0, &[0; 6]);
        // The program's stack pointer may be on its signal stack, which could then not be changed.
        tern_tracee::Registers { rbx: area.at, rsp: reserve.end() - 256, ..cleared }
    }

    /// Sets the default action where the program has handlers: their code is gone from the deputy.
    /// Signals ignored by default keep their handlers: setting the default action would discard a
    /// pending signal.
    fn reset_handlers(
        &self,
        injection: &mut Injection,
        memory: &Memory,
        reserve: Reserve,
        image: &ProcessImage,
    ) -> Result<()> {
        let handled =
            |(at, action): &(usize, &Action)| action[0] > SIG_IGN && !is_ignored_by_default(*at as i32 + 1);
        for (at, action) in image.actions.iter().enumerate().filter(handled) {
            let mut space = HomeSpace::new(injection, memory, reserve, &[]);
            let default = [0, action[1], action[2], action[3]];
            tern_image::process::set_signal_action(&mut space, memory, reserve, at as u64 + 1, &default)?;
        }
        Ok(())
    }

    /// Frees the memory of a deputy whose guest runs, through one stopped thread, and resumes the
    /// thread. This frees all private pages except those with the arguments and the environment,
    /// which `ps` reads.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn free_memory(&mut self, stopped: Stopped, image: &ProcessImage) -> Result<()> {
        let keep = procfs::stat(stopped.pid())?.argument_pages();
        let Some(reserve) = self.reserve else { return self.resume_unnoticed(stopped) };
        let mut injection = Injection::begin(stopped, Site(reserve.start + blob::call_site()))?;
        let mut space = HomeSpace::new(&mut injection, &self.memory, reserve, &[]);
        target::free_pages(&mut space, &image.layout, keep)?;
        let stopped = injection.finish()?;
        self.resume_unnoticed(stopped)
    }
}

/// Resumes a thread from a stop that the program must not notice. A group stop stays one.
fn resume_natively(stopped: Stopped) -> Result<()> {
    if matches!(stopped.stop, Stop::Group(_)) { stopped.listen() } else { stopped.resume(0) }
}

/// The image of one thread.
///
/// # Errors
/// If the process's image has no such thread.
pub(crate) fn thread_image(image: &ProcessImage, tid: HomePid) -> Result<&ThreadImage> {
    let thread = image.threads.iter().find(|thread| thread.tid == tid);
    thread.ok_or_else(|| Error::Inconsistent { what: "missing in its process's image".into(), pid: tid.0 })
}
