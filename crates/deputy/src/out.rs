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
use crate::mailbox::{Bell, Mailbox};
use crate::member::{Member, State};
use crate::signal::mend;
use crate::space::HomeSpace;
use std::fs::File;
use tern_ids::{NodeId, ShimId};
use tern_image::layout::Layout;
use tern_image::pages::Finder;
use tern_image::process::{Action, IGNORE, is_ignored_by_default};
use tern_image::{FileRef, ProcessImage, Reserve};
use tern_migrate::message::{Conversation, Offer};
use tern_migrate::partial::{Partial, rest};
use tern_migrate::source::{Movable, SendError, Sending, Source, machine};
use tern_tracee::dirty::Tracker;
use tern_tracee::inject::{self, Injection, Site};
use tern_tracee::procfs;
use tern_tracee::stop::{self, EXIT_KILL, FOLLOW, FOLLOW_EXEC, Siginfo, Stop, Stopped};
use tern_tracee::{Error, Memory, PAGE, Result};

/// Processes smaller than this (KiB) are stopped and copied at once.
const WORTH_TRACKING: u64 = 8 << 10;

/// A process on its way out.
#[derive(Debug)]
pub(crate) struct Outbound {
    /// Where it will be held.
    pub(crate) peer: usize,
    pub(crate) source: Option<Source>,
    pub(crate) sending: Option<Sending>,
    /// Once it stands still.
    pub(crate) stopped: Option<Stopped>,
    /// As it was captured.
    pub(crate) image: Option<Box<ProcessImage>>,
}

/// Brings a process that runs at home to a stand. Signals are delivered on the way, as if we were not there. If it
/// executes another program first, it is returned in that stop (`Stop::Exec`): nothing that was known of it holds.
///
/// # Errors
/// If it is gone.
pub(crate) fn halt_resident(pid: i32, partial: &mut Option<Partial>) -> Result<Stopped> {
    loop {
        stop::interrupt(pid)?;
        let stopped = stop::wait_stop(pid)?;
        match stopped.stop {
            Stop::Interrupt => {
                let mut registers = stopped.registers()?;
                let before = registers;
                mend(&mut registers);
                if let Some(cut) = rest(&mut registers, *partial) {
                    *partial = Some(cut);
                }
                if registers != before {
                    stopped.set_registers(&registers)?;
                }
                return Ok(stopped);
            }
            Stop::Signal(signal) => stopped.resume(signal)?,
            Stop::Group(_) | Stop::Exec => return Ok(stopped),
            _ => stopped.resume(0)?,
        }
    }
}

impl Member {
    /// Prepares a stopped process for its departure: reserves our range in it, tracks its writes if that is
    /// worth it, and says what is offered. It is still stopped afterwards.
    ///
    /// # Errors
    /// If it is gone, or has no room; it is as before.
    pub(crate) fn prepare(
        &mut self,
        stopped: Stopped,
        peer: usize,
        home: (NodeId, ShimId),
    ) -> Result<(Stopped, Offer)> {
        let pid = self.pid.0;
        let (mut injection, maps, memory) = inject::through_vdso(stopped)?;
        let reserve = Reserve::take(&mut injection)?;
        // A child that it forks before it leaves has no use for our range.
        let dont_fork = [reserve.start, Reserve::LEN, libc::MADV_DONTFORK as u64, 0, 0, 0];
        injection.must("keep our range to one process", libc::SYS_madvise, dont_fork)?;
        let mut tracker = None;
        if procfs::status(pid)?.resident_kib >= WORTH_TRACKING {
            tracker = Tracker::begin(pid, &mut |nr, args| injection.call(nr, args)).ok();
        }
        let machine = machine(&memory, &maps, tern_tracee::registers::xstate_len()?)?;
        let stopped = injection.finish()?;
        let source = Source::new(self.pid, Memory::open(pid)?, Finder::new(pid, tracker, true)?);
        self.reserve = Some(reserve);
        self.machine = Some(machine);
        self.memory = memory;
        let outbound = Outbound { peer, source: Some(source), sending: None, stopped: None, image: None };
        self.state = State::Outbound(Box::new(outbound));
        let offer = self.offer(home);
        Ok((stopped, offer?))
    }

    /// Lets a prepared process run while it is being sent, unless it is to be held, or is in the middle of a transfer
    /// that we have cut short: then it stands still until the rest can be transferred.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn run_meanwhile(&mut self, stopped: Stopped, held: bool) -> Result<()> {
        match &mut self.state {
            State::Outbound(outbound) if held || self.partial.is_some() => {
                outbound.stopped = Some(stopped);
                Ok(())
            }
            _ => stopped.resume(0),
        }
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

    /// Takes the preparations back: the process runs on at home, untouched.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn run_on(&mut self, stopped: Stopped) -> Result<Stopped> {
        self.state = State::Resident;
        if let Some(partial) = self.partial.take() {
            // A transfer that we have cut short stays so: its program is told how much was done.
            let mut registers = stopped.registers()?;
            partial.mend(&mut registers);
            (registers.rax, registers.orig_rax) = (partial.done, u64::MAX);
            registers.rip += 2;
            stopped.set_registers(&registers)?;
        }
        let Some(reserve) = self.reserve.take() else { return Ok(stopped) };
        let (mut injection, _, _) = inject::through_vdso(stopped)?;
        reserve.release(&mut injection)?;
        injection.finish()
    }

    /// Makes the stopped process, whose image has been taken, the deputy of its next life, and sets it
    /// waiting for calls.
    ///
    /// # Errors
    /// If it is gone; or if it lacks a descriptor for a moment: it is then returned as it was, stopped.
    pub(crate) fn become_deputy(
        &mut self,
        stopped: Stopped,
        image: &ProcessImage,
        bell: Bell,
    ) -> std::result::Result<(), (Error, Option<Stopped>)> {
        let begun = inject::through_vdso(stopped).map_err(|error| (error, None));
        let (mut injection, maps, memory) = begun?;
        let Some(reserve) = self.reserve else { return Err((Error::Gone { pid: self.pid.0 }, None)) };
        match self.change_over(&mut injection, &memory, reserve, image, bell) {
            Ok(mailbox) => {
                self.mailbox = Some(mailbox);
                self.actions.clone_from(&image.actions);
                let registers = Self::blob_registers(injection.before(), reserve);
                let mask = injection.mask();
                let done = injection.finish_with(&registers, mask).and_then(|stopped| stopped.resume(0));
                done.map_err(|error| (error, None))
            }
            Err(error) => {
                let back = || -> Result<Stopped> {
                    let scratch = reserve.room();
                    let mut space =
                        HomeSpace { injection: &mut injection, memory: &memory, scratch, files: &[] };
                    image.restore(&mut space, &memory, reserve, None)?;
                    injection.set_site(Site::in_vdso(&memory, &maps)?);
                    injection.stopped()?.set_options(FOLLOW_EXEC)?;
                    reserve.release(&mut injection)?;
                    injection.finish_with(&image.thread.registers, image.thread.sigmask)
                };
                Err((error, back().ok()))
            }
        }
    }

    fn change_over(
        &self,
        injection: &mut Injection,
        memory: &Memory,
        reserve: Reserve,
        image: &ProcessImage,
        bell: Bell,
    ) -> Result<Mailbox> {
        memory.write(reserve.start, blob::code())?;
        let exec = (libc::PROT_READ | libc::PROT_EXEC) as u64;
        injection.must("protect the blob", libc::SYS_mprotect, [reserve.start, PAGE, exec, 0, 0, 0])?;
        let do_fork = [reserve.start, Reserve::LEN, libc::MADV_DOFORK as u64, 0, 0, 0];
        injection.must("let our range be forked", libc::SYS_madvise, do_fork)?;
        tern_image::thread::withdraw(injection)?;
        self.default_handlers(injection, memory, reserve, image)?;
        let mailbox = Mailbox::make(injection, reserve, bell)?;
        // If we die, the guest is lost with us: the deputy must end, not wait for ever.
        injection.stopped()?.set_options(FOLLOW | EXIT_KILL)?;
        Ok(mailbox)
    }

    /// Registers with which a deputy begins to wait for calls.
    pub(crate) fn blob_registers(from: &tern_tracee::Registers, reserve: Reserve) -> tern_tracee::Registers {
        let cleared = from.calling(reserve.start, 0, &[0; 6]);
        // The program's stack pointer may be on its signal stack, which could then not be changed.
        tern_tracee::Registers { rbx: reserve.room(), rsp: reserve.end() - 256, ..cleared }
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
            let mut space = HomeSpace { injection, memory, scratch: reserve.room(), files: &[] };
            let default = [0, action[1], action[2], action[3]];
            tern_image::process::set_action(&mut space, memory, reserve, at as u64 + 1, &default)?;
        }
        Ok(())
    }

    /// Takes a deputy, standing, whose guest cannot have begun, back to what it was, still standing.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn revoke(&mut self, stopped: Stopped, image: &ProcessImage) -> Result<Stopped> {
        let astray = || Error::Astray { what: "revoked without having gone".into(), pid: self.pid.0 };
        let reserve = self.reserve.ok_or_else(astray)?;
        let mut injection = Injection::begin(stopped, Site(reserve.start + blob::call_site()))?;
        let memory = Memory::open(self.pid.0)?;
        let mut space =
            HomeSpace { injection: &mut injection, memory: &memory, scratch: reserve.room(), files: &[] };
        image.restore(&mut space, &memory, reserve, None)?;
        injection.stopped()?.set_xstate(&image.thread.xstate)?;
        injection.stopped()?.set_options(FOLLOW_EXEC)?;
        // Signals that were sent to the guest that never ran.
        let unheard: Vec<Siginfo> = self.unheard.drain(..).map(|(_, info)| info).collect();
        raise_natively(&mut injection, &memory, reserve, self.own_pid, &unheard)?;
        let maps = procfs::maps(self.pid.0)?;
        injection.set_site(Site::in_vdso(&memory, &maps)?);
        reserve.release(&mut injection)?;
        (self.reserve, self.mailbox, self.state) = (None, None, State::Resident);
        injection.finish_with(&image.thread.registers, image.thread.sigmask)
    }

    /// Frees the memory of a standing deputy whose guest runs, and lets it go on: all private pages but those that
    /// hold the arguments and the environment, which `ps` reads.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn free_memory(&mut self, stopped: Stopped, image: &ProcessImage) -> Result<()> {
        let keep = (image.bounds[7] & !(PAGE - 1), image.bounds[10].next_multiple_of(PAGE));
        let Some(reserve) = self.reserve else { return self.go_on(stopped) };
        let mut injection = Injection::begin(stopped, Site(reserve.start + blob::call_site()))?;
        for region in image.layout.regions.iter().filter(|r| r.is_private()) {
            let parts = [(region.start, region.end.min(keep.0)), (region.start.max(keep.1), region.end)];
            for (start, end) in parts.into_iter().filter(|(start, end)| start < end) {
                // Locked or sealed memory stays; that costs room, nothing else.
                let args = [start, end - start, libc::MADV_DONTNEED as u64, 0, 0, 0];
                let _stays = injection.call(libc::SYS_madvise, args)?;
            }
        }
        let stopped = injection.finish()?;
        self.go_on(stopped)
    }
}

/// What sending needs of a process at home.
pub(crate) struct Leaving<'a> {
    pub(crate) member: &'a mut Member,
    pub(crate) stopped: Option<Stopped>,
    pub(crate) image: Option<Box<ProcessImage>>,
    /// It has executed another program instead of coming to a stand: nothing that was sent holds.
    pub(crate) executed: Option<Stopped>,
}

impl Movable for Leaving<'_> {
    fn describe(&mut self) -> std::result::Result<Layout, SendError> {
        let pid = self.member.pid.0;
        let maps = procfs::smaps(pid)?;
        let layout = Layout::describe(&maps, self.member.reserve, &mut self.member.files);
        if self.stopped.is_some() {
            return Ok(layout?);
        }
        // The maps of a running process are read in pieces, which need not fit; and in the middle of an exec an
        // address space is not complete: the kernel's own mappings come late.
        let expected = self.member.machine.as_ref().map_or(0, |m| m.vdso.1.len());
        if let Ok(layout) = layout
            && layout.check().is_ok()
            && layout.kernels().count() == expected
        {
            return Ok(layout);
        }
        if !self.freeze()? {
            return Err(SendError::Executed);
        }
        Ok(Layout::describe(&procfs::smaps(pid)?, self.member.reserve, &mut self.member.files)?)
    }

    fn content(&mut self, file: &FileRef) -> std::io::Result<File> {
        open_mapped(self.member, file)
    }

    fn freeze(&mut self) -> Result<bool> {
        // In the middle of a transfer that we have cut short it has not been let go on.
        if self.stopped.is_none() {
            let stopped = halt_resident(self.member.pid.0, &mut self.member.partial)?;
            if stopped.stop == Stop::Exec {
                self.executed = Some(stopped);
                return Ok(false);
            }
            self.stopped = Some(stopped);
        }
        Ok(true)
    }

    fn capture(&mut self, layout: Layout) -> Result<(ProcessImage, Conversation)> {
        let pid = self.member.pid.0;
        let astray = || Error::Astray { what: "captured while it ran".into(), pid };
        let reserve = self.member.reserve.ok_or_else(astray)?;
        let (mut injection, _, memory) = inject::through_vdso(self.stopped.take().ok_or_else(astray)?)?;
        let mut space =
            HomeSpace { injection: &mut injection, memory: &memory, scratch: reserve.room(), files: &[] };
        let image = ProcessImage::capture(&mut space, &memory, reserve, layout);
        // A call that went astray is the error to report, not that it cannot be ended either.
        let stopped = injection.finish();
        let image = image?;
        self.stopped = Some(stopped?);
        self.image = Some(Box::new(image.clone()));
        let talk = Conversation {
            signals: self.member.signals,
            resumes: image.thread.registers.restart_code(),
            partial: self.member.partial,
            used: self.member.used,
            ..Conversation::default()
        };
        Ok((image, talk))
    }
}

/// Sends a process under injection signals that had been taken from it. To itself a process may send any siginfo,
/// the kernel's own included.
///
/// # Errors
/// If it is gone.
pub(crate) fn raise_natively(
    injection: &mut Injection,
    memory: &Memory,
    reserve: Reserve,
    own_pid: i32,
    infos: &[Siginfo],
) -> Result<()> {
    for info in infos {
        memory.write(reserve.room(), info)?;
        let (own, signal) = (own_pid as u64, tern_tracee::stop::signal_of(info) as u64);
        let args = [own, own, signal, reserve.room(), 0, 0];
        let _full_queue_loses_it = injection.call(libc::SYS_rt_tgsigqueueinfo, args)?;
    }
    Ok(())
}

/// Opens a file that a process maps.
pub(crate) fn open_mapped(member: &Member, file: &FileRef) -> std::io::Result<File> {
    let maps = procfs::maps(member.pid.0).map_err(std::io::Error::other)?;
    match maps.iter().find(|m| (m.device, m.inode) == (file.device, file.inode)) {
        Some(mapping) => member.files.open(mapping),
        None => member.files.open_by_name(file),
    }
}
