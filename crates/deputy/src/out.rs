//! A process becomes a deputy.
//!
//! ```text
//!  Resident ── a destination is prepared ─▶ Outbound ── image sent, Ready ─▶ Going ── Running ─▶ Away
//!      ▲                                       │                               │
//!      └──────── anything fails: it runs on ───┴─── the link breaks first ─────┘
//! ```
//! Until its guest is known to run the process' memory is kept, and whoever finds that the guest cannot have
//! done anything yet (all that it does, it does through us) may take everything back with a further life.

use crate::blob;
use crate::mailbox::{Bell, Mailbox, Room};
use crate::member::{Member, State};
use crate::space::HomeSpace;
use std::collections::HashSet;
use tern_ids::{HomePid, NodeId, ShimId};
use tern_image::apply::subtract;
use tern_image::object::ObjectId;
use tern_image::pages::Finder;
use tern_image::process::{Action, IGNORE, Unmovable, check_registers, is_ignored_by_default};
use tern_image::{ProcessImage, Reserve, ThreadImage};
use tern_migrate::message::Offer;
use tern_migrate::source::{Sending, Source};
use tern_migrate::target;
use tern_tracee::dirty::Tracker;
use tern_tracee::inject::{self, Injection, Site};
use tern_tracee::procfs;
use tern_tracee::siginfo::{Siginfo, signal_of};
use tern_tracee::stop::{EXIT_KILL, FOLLOW, FOLLOW_THREADS, Stop, Stopped};
use tern_tracee::{Error, Memory, Result};

/// Processes smaller than this (KiB) are stopped and copied at once.
const WORTH_TRACKING: u64 = 8 << 10;

/// A process on its way out.
#[derive(Debug)]
pub(crate) struct Outbound {
    /// Where it will be held.
    pub(crate) peer: usize,
    pub(crate) source: Option<Source>,
    pub(crate) sending: Option<Sending>,
    /// Where its vDSO is: it stands nowhere in it, since its new node may have another.
    pub(crate) vdso: std::ops::Range<u64>,
    /// As it was captured.
    pub(crate) image: Option<Box<ProcessImage>>,
    /// It is ready to stand.
    pub(crate) ready: bool,
    /// The shared memory whose content goes with it.
    pub(crate) carries: HashSet<ObjectId>,
    /// The memory that it shares, as it stands.
    pub(crate) live: HashSet<ObjectId>,
    /// All of it has arrived.
    pub(crate) arrived: bool,
}

impl Member {
    /// Takes the stop of a thread that stands; it runs, for all that is known, until that is put back.
    ///
    /// # Errors
    /// If it does not stand.
    pub(crate) fn take_standing(&mut self, tid: HomePid) -> Result<Stopped> {
        self.thread(tid)?.standing.take().ok_or(Error::Gone { pid: tid.0 })
    }

    /// Does something in a standing thread of it, at home.
    pub(crate) fn inject<T>(
        &mut self,
        work: impl FnOnce(&mut Self, &mut Injection) -> Result<T>,
    ) -> Result<T> {
        let tid = self.any()?;
        let (mut injection, _, _) = inject::through_vdso(self.take_standing(tid)?)?;
        let done = work(self, &mut injection);
        self.stands_at(injection.finish()?)?;
        done
    }

    /// Prepares a standing process for its departure: reserves our range in it, tracks its writes if that is
    /// worth it, and says what is offered. It stands afterwards.
    ///
    /// # Errors
    /// If it is gone, or has no room; it is as before.
    pub(crate) fn prepare(&mut self, peer: usize, home: (NodeId, ShimId)) -> Result<Offer> {
        let pid = self.memory.pid();
        let (reserve, tracker) = self.inject(|_member, injection| {
            let reserve = Reserve::take(injection)?;
            // A child that it forks before it leaves has no use for our range.
            let dont_fork = [reserve.start, Reserve::LEN, libc::MADV_DONTFORK as u64, 0, 0, 0];
            injection.must("keep our range to one process", libc::SYS_madvise, dont_fork)?;
            let mut tracker = None;
            if procfs::status(pid)?.resident_kib >= WORTH_TRACKING {
                tracker = Tracker::begin(pid, &mut |nr, args| injection.call(nr, args)).ok();
            }
            Ok((reserve, tracker))
        })?;
        self.memory = Memory::open(pid)?;
        let maps = procfs::maps(pid)?;
        let machine = tern_migrate::machine::machine(&self.memory, &maps)?;
        let vdso = maps.iter().find(|m| m.name == b"[vdso]").map_or(0..0, |m| m.start..m.end);
        let source = Source::new(self.pid, Memory::open(pid)?, Finder::new(pid, tracker, true)?);
        self.reserve = Some(reserve);
        self.machine = Some(machine);
        let outbound = Outbound {
            peer,
            source: Some(source),
            sending: None,
            vdso,
            image: None,
            ready: false,
            carries: HashSet::new(),
            live: HashSet::new(),
            arrived: false,
        };
        self.state = State::Outbound(Box::new(outbound));
        self.offer(home)
    }

    /// Lets a prepared process run while it is being sent, unless a thread of it is in the middle of a transfer that we
    /// have cut short: then it stands until the rest can be transferred.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn run_meanwhile(&mut self) -> Result<()> {
        if self.threads.values().any(|thread| thread.partial.is_some()) {
            return Ok(());
        }
        self.resume_all()
    }

    /// Lets all threads go on that stand.
    ///
    /// # Errors
    /// If one was astray. One that is gone is none of ours any more.
    pub(crate) fn resume_all(&mut self) -> Result<()> {
        for thread in self.threads.values_mut() {
            thread.wanted = false;
            match thread.standing.take().map(go_on_natively) {
                Some(Err(error)) if !error.is_gone() => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether all its threads, which stand, run 64-bit code.
    pub(crate) fn check_registers(&self) -> std::result::Result<(), Unmovable> {
        let standing = self.threads.values().filter_map(|thread| thread.standing.as_ref());
        standing
            .filter_map(|stopped| stopped.registers().ok())
            .try_for_each(|registers| check_registers(&registers))
    }

    /// What is offered to a node.
    ///
    /// # Errors
    /// If the process has not been prepared.
    pub(crate) fn offer(&mut self, (home, shim): (NodeId, ShimId)) -> Result<Offer> {
        self.offered = self.offered.max(self.epoch).next();
        let astray = || Error::Astray { what: "offered before it was prepared".into(), pid: self.pid.0 };
        Ok(Offer {
            version: tern_image::VERSION,
            migration: self.task.as_ref().map(|t| t.migration).ok_or_else(astray)?,
            pid: self.pid,
            epoch: self.offered,
            home,
            shim,
            own_pid: self.own_pid,
            command: self.command.clone(),
            reserve: self.reserve.ok_or_else(astray)?,
            wall: tern_migrate::wall::now(),
            machine: self.machine.clone().ok_or_else(astray)?,
        })
    }

    /// Takes the preparations back: the process, which stands, may run on at home, untouched.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn run_on(&mut self) -> Result<()> {
        self.state = State::Resident;
        for thread in self.threads.values_mut() {
            // A transfer that we have cut short stays so: its program is told how much was done.
            if let (Some(partial), Some(stopped)) = (thread.partial.take(), &thread.standing) {
                let mut registers = stopped.registers()?;
                partial.mend(&mut registers);
                (registers.rax, registers.orig_rax) = (partial.done, u64::MAX);
                registers.rip += 2;
                stopped.set_registers(&registers)?;
            }
        }
        let Some(reserve) = self.reserve.take() else { return Ok(()) };
        let tids: Vec<HomePid> = self.threads.keys().copied().collect();
        let memory = Memory::open(self.memory.pid())?;
        self.inject(|member, injection| {
            for tid in tids {
                member.raise_unheard((&mut *injection, &memory), reserve, tid)?;
            }
            reserve.release(injection)
        })
    }

    /// Makes the standing process, whose image has been taken, the deputy of its next life, and sets it
    /// waiting for calls. That life may have begun: what it asks for waits until then.
    ///
    /// # Errors
    /// If it is gone; or if it lacks a descriptor for a moment: then true if it stands again as it was.
    pub(crate) fn become_deputy(
        &mut self,
        image: &ProcessImage,
        bell: &Bell,
    ) -> std::result::Result<(), (Error, bool)> {
        let Some(reserve) = self.reserve else { return Err((Error::Gone { pid: self.pid.0 }, false)) };
        let mut injections = self.injections().map_err(|error| (error, false))?;
        match self.change_over(&mut injections, reserve, image, bell) {
            Ok(()) => {
                self.actions.clone_from(&image.actions);
                // Taken before it went.
                let unheard = self.threads.values().flat_map(|thread| &thread.unheard);
                let taken: Vec<i32> = unheard.map(|(_, info)| signal_of(info)).collect();
                taken.into_iter().for_each(|signal| self.handled(signal));
                self.set_waiting(injections, reserve).map_err(|error| (error, false))
            }
            Err(error) => {
                let back = self.change_back(injections, reserve, image);
                Err((error, back.is_ok()))
            }
        }
    }

    /// All its threads, standing, under injection.
    pub(crate) fn injections(&mut self) -> Result<Vec<Injection>> {
        let tids: Vec<HomePid> = self.living().map(|thread| thread.tid).collect();
        let site = Site::in_vdso(&self.memory, &procfs::maps(self.memory.pid())?)?;
        tids.into_iter().map(|tid| Injection::begin(self.take_standing(tid)?, site)).collect()
    }

    fn change_over(
        &mut self,
        injections: &mut [Injection],
        reserve: Reserve,
        image: &ProcessImage,
        bell: &Bell,
    ) -> Result<()> {
        let memory = Memory::open(self.memory.pid())?;
        memory.write_forced(reserve.start, blob::code())?;
        (self.rooms, self.free_rooms, self.leftover) = (0, Vec::new(), Vec::new());
        tern_image::thread::withdraw(injections, &memory, reserve)?;
        self.take_timers(injections, &memory, reserve)?;
        let others: Vec<Room> = injections.iter().skip(1).map(|_| self.next_room()).collect();
        let first = injections.first_mut().ok_or(Error::Gone { pid: self.pid.0 })?;
        let do_fork = [reserve.start, Reserve::LEN, libc::MADV_DOFORK as u64, 0, 0, 0];
        first.must("let our range be forked", libc::SYS_madvise, do_fork)?;
        self.default_handlers(first, &memory, reserve, image)?;
        let mut mailboxes = vec![Mailbox::make(first, reserve, Room::first(reserve), bell.clone())?];
        mailboxes.extend(Mailbox::make_all(first, reserve, &others, bell.clone())?);
        for (injection, mailbox) in injections.iter().zip(mailboxes) {
            self.thread(HomePid(injection.pid()))?.mailbox = Some(mailbox);
            // If we die, the guest is lost with us: the deputy must end, not wait for ever.
            injection.stopped()?.set_options(FOLLOW | EXIT_KILL)?;
        }
        Ok(())
    }

    /// Room for the mailbox of one more thread.
    pub(crate) fn next_room(&mut self) -> Room {
        self.free_rooms.pop().unwrap_or_else(|| {
            self.rooms += 1;
            Room::other(self.rooms)
        })
    }

    /// Lets deputy threads under injection wait for calls.
    fn set_waiting(&mut self, injections: Vec<Injection>, reserve: Reserve) -> Result<()> {
        for injection in injections {
            let tid = HomePid(injection.pid());
            let thread = self.thread(tid)?;
            (thread.wanted, thread.partial) = (false, None);
            let room = thread.mailbox.as_ref().map_or(Room::first(reserve), Mailbox::room);
            let registers = Self::blob_registers(injection.before(), reserve, room);
            let mask = injection.mask();
            go_on_natively(injection.finish_with(&registers, mask)?)?;
        }
        Ok(())
    }

    /// Whether job control has stopped it, as far as those of its threads show that stand.
    pub(crate) fn stands_stopped(&self) -> bool {
        let standing = self.threads.values().filter_map(|thread| thread.standing.as_ref());
        standing.map(|stopped| stopped.stop).any(|stop| matches!(stop, Stop::Group(_)))
    }

    /// Takes a change-over that went half way back; the process stands afterwards, without our range.
    fn change_back(
        &mut self,
        mut injections: Vec<Injection>,
        reserve: Reserve,
        image: &ProcessImage,
    ) -> Result<()> {
        let memory = Memory::open(self.memory.pid())?;
        let tids = injections.iter().map(|injection| HomePid(injection.pid()));
        let images = tids.map(|tid| of_thread(image, tid)).collect::<Result<Vec<&ThreadImage>>>()?;
        let first = injections.first_mut().ok_or(Error::Gone { pid: self.pid.0 })?;
        image.restore(&mut HomeSpace::new(first, &memory, reserve, &[]), &memory, reserve, None)?;
        self.give_timers(first, &memory, reserve)?;
        tern_image::thread::restore(&mut injections, &images, &memory, reserve.narrow_desk())?;
        for injection in &mut injections {
            let tid = HomePid(injection.pid());
            injection.stopped()?.set_options(FOLLOW_THREADS)?;
            // Signals that were sent to the guest that never ran.
            self.raise_unheard((injection, &memory), reserve, tid)?;
        }
        let vdso = Site::in_vdso(&memory, &procfs::maps(self.memory.pid())?)?;
        let last = injections.len().saturating_sub(1);
        for ((at, mut injection), thread) in injections.into_iter().enumerate().zip(images) {
            if at == last {
                injection.set_site(vdso);
                self.release(&mut injection, reserve)?;
            }
            self.stands_at(injection.finish_with(&thread.registers, thread.sigmask)?)?;
        }
        Ok(())
    }

    /// Removes our range from a process that needs nothing of it any more, and what there is for it besides.
    pub(crate) fn release(&mut self, injection: &mut Injection, reserve: Reserve) -> Result<()> {
        let mailboxes = self.threads.values_mut().filter_map(|thread| thread.mailbox.take());
        let mut ours: Vec<(u64, u64)> = mailboxes.filter_map(|mailbox| mailbox.large()).collect();
        ours.append(&mut self.leftover);
        if self.rooms > 0 {
            ours.push(Room::others(self.rooms));
        }
        ours.append(&mut self.holders);
        for (start, end) in ours {
            injection.must("release a mailbox", libc::SYS_munmap, [start, end - start, 0, 0, 0, 0])?;
        }
        (self.rooms, self.free_rooms, self.reserve) = (0, Vec::new(), None);
        reserve.release(injection)
    }

    /// Registers with which a deputy begins to wait for calls.
    pub(crate) fn blob_registers(
        from: &tern_tracee::Registers,
        reserve: Reserve,
        room: Room,
    ) -> tern_tracee::Registers {
        let cleared = from.calling(reserve.start, 0, &[0; 6]);
        // The program's stack pointer may be on its signal stack, which could then not be changed.
        tern_tracee::Registers { rbx: room.at, rsp: reserve.end() - 256, ..cleared }
    }

    /// Where the program has handlers, the deputy has the default action: their code is not there any more. But for
    /// those that are ignored by default: setting the default action would throw a pending one away.
    fn default_handlers(
        &self,
        injection: &mut Injection,
        memory: &Memory,
        reserve: Reserve,
        image: &ProcessImage,
    ) -> Result<()> {
        let handled =
            |(at, action): &(usize, &Action)| action[0] > IGNORE && !is_ignored_by_default(*at as i32 + 1);
        for (at, action) in image.actions.iter().enumerate().filter(handled) {
            let mut space = HomeSpace::new(injection, memory, reserve, &[]);
            let default = [0, action[1], action[2], action[3]];
            tern_image::process::set_action(&mut space, memory, reserve, at as u64 + 1, &default)?;
        }
        Ok(())
    }

    /// Takes a deputy, all of it standing, whose guest cannot have begun, back to what it was, still standing.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn revoke(&mut self, image: &ProcessImage) -> Result<()> {
        let astray = || Error::Astray { what: "revoked without having gone".into(), pid: self.pid.0 };
        let reserve = self.reserve.ok_or_else(astray)?;
        let tids: Vec<HomePid> = self.living().map(|thread| thread.tid).collect();
        let site = Site(reserve.start + blob::call_site());
        let mut injections = Vec::with_capacity(tids.len());
        for tid in tids {
            injections.push(Injection::begin(self.take_standing(tid)?, site)?);
        }
        self.state = State::Resident;
        self.change_back(injections, reserve, image)
    }

    /// Frees the memory of a deputy, of which one thread stands and whose guest runs, and lets that go on: all private
    /// pages but those that hold the arguments and the environment, which `ps` reads.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn free_memory(&mut self, stopped: Stopped, image: &ProcessImage) -> Result<()> {
        let keep = procfs::stat(stopped.pid())?.title();
        let Some(reserve) = self.reserve else { return self.go_on(stopped) };
        let mut injection = Injection::begin(stopped, Site(reserve.start + blob::call_site()))?;
        for region in image.layout.regions.iter().filter(|r| r.is_private()) {
            for (start, end) in subtract(region.start, region.end, [keep].into_iter()) {
                // Sealed memory stays, and before Linux 5.18 locked memory; that costs room, nothing else.
                for how in [target::MADV_DONTNEED_LOCKED, libc::MADV_DONTNEED as u64] {
                    if injection.call(libc::SYS_madvise, [start, end - start, how, 0, 0, 0])? == 0 {
                        break;
                    }
                }
            }
        }
        let stopped = injection.finish()?;
        self.go_on(stopped)
    }
}

/// Lets a thread go on from a stop that nobody shall notice: one that job control has stopped stays so.
fn go_on_natively(stopped: Stopped) -> Result<()> {
    if matches!(stopped.stop, Stop::Group(_)) { stopped.listen() } else { stopped.resume(0) }
}

/// A thread in an image.
///
/// # Errors
/// If it is not in it.
pub(crate) fn of_thread(image: &ProcessImage, tid: HomePid) -> Result<&ThreadImage> {
    let thread = image.threads.iter().find(|thread| thread.tid == tid);
    thread.ok_or_else(|| Error::Astray { what: "not in its process' image".into(), pid: tid.0 })
}

/// Has a thread under injection send itself signals that had been taken from it. To itself a thread may send any siginfo,
/// the kernel's own included. `own` is the process' number and the thread's, as they see them.
///
/// # Errors
/// If it is gone.
pub(crate) fn raise_natively(
    injection: &mut Injection,
    memory: &Memory,
    reserve: Reserve,
    own: (i32, i32),
    infos: &[Siginfo],
) -> Result<()> {
    for info in infos {
        memory.write(reserve.scratch(), info)?;
        let signal = signal_of(info) as u64;
        let args = [own.0 as u64, own.1 as u64, signal, reserve.scratch(), 0, 0];
        let _full_queue_loses_it = injection.call(libc::SYS_rt_tgsigqueueinfo, args)?;
    }
    Ok(())
}
