//! A deputy becomes the process again.
//!
//! The skeleton of its address space is still there; only differences are mapped, and only pages with content
//! come over. Then its last call has to be settled: a call that the guest was in when it was stopped has been
//! made, or is being made, or has never arrived here.
//!
//! ```text
//!  made                 its result is delivered: memory, rax
//!  not arrived          the kernel makes it again, natively
//!  being made, and the
//!  kernel restarts it   likewise: the interrupted call has had no effect
//!  being made, and only this thread's kernel state knows the rest (sleeps, polls with a time limit), or the
//!  kernel would fail it with EINTR: the deputy goes on with it (Lingering), everything else being home
//! ```

use crate::blob;
use crate::member::{Current, Member, State};
use crate::out::raise_natively;
use crate::signal::fails_when_interrupted;
use crate::space::HomeSpace;
use std::collections::HashMap;
use tern_image::layout::Layout;
use tern_image::process::DEFAULT;
use tern_image::{ProcessImage, Reserve, apply};
use tern_migrate::message::{CallRequest, CallResult, Conversation};
use tern_migrate::{Partial, target};
use tern_syscall::{Outcome, gather, scatter};
use tern_tracee::inject::{Injection, Site};
use tern_tracee::pagemap::Run;
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::registers::{Registers, restart};
use tern_tracee::stop::{FOLLOW_EXEC, Siginfo, Stopped};
use tern_tracee::{Error, Memory, Result};

/// A process on its way home.
#[derive(Debug, Default)]
pub(crate) struct Inbound {
    /// The address space that it has had built here last.
    pub(crate) layout: Layout,
    pub(crate) bytes: u64,
}

/// A process that is home but for its last call.
#[derive(Debug)]
pub(crate) struct Lingering {
    image: Box<ProcessImage>,
    carried: Vec<Siginfo>,
    partial: Option<Partial>,
}

/// The process memory as the marshaller sees it.
struct HomeMemory<'a>(&'a Memory);

impl tern_syscall::Memory for HomeMemory<'_> {
    fn read(&mut self, addr: u64, buf: &mut [u8]) -> std::result::Result<(), tern_syscall::Fault> {
        self.0.read(addr, buf).map_err(|_e| tern_syscall::Fault)
    }

    fn write(&mut self, addr: u64, data: &[u8]) -> std::result::Result<(), tern_syscall::Fault> {
        self.0.write(addr, data).map_err(|_e| tern_syscall::Fault)
    }
}

impl Member {
    pub(crate) fn injection(&self, stopped: Stopped) -> Result<(Injection, Reserve)> {
        let astray = || Error::Astray { what: "no deputy".into(), pid: self.pid.0 };
        let reserve = self.reserve.ok_or_else(astray)?;
        Ok((Injection::begin(stopped, Site(reserve.start + blob::call_site()))?, reserve))
    }

    /// Gives the standing deputy this address space; it goes on with its call afterwards.
    ///
    /// # Errors
    /// If it is gone, or a step fails.
    pub(crate) fn take_space(&mut self, stopped: Stopped, layout: &Layout) -> Result<()> {
        let reserve = match self.checked(layout) {
            Ok(reserve) => reserve,
            Err(error) => return self.go_on(stopped).and(Err(error)),
        };
        let (mut injection, _) = self.injection(stopped)?;
        let now = procfs::smaps(self.pid.0)?;
        let files: HashMap<(u64, u64), u32> =
            layout.files.iter().enumerate().map(|(at, f)| ((f.device, f.inode), at as u32)).collect();
        let identify = |m: &Mapping| files.get(&(m.device, m.inode)).copied();
        let mut steps = apply::plan(&now, layout, Some(reserve), &identify);
        // A large call's data is not the program's; it goes with the mailbox.
        let large = self.mailbox.as_ref().and_then(crate::mailbox::Mailbox::large);
        steps.retain(|s| !matches!((s, large), (apply::Step::Unmap { start, end }, Some((a, b))) if *start < b && a < *end));
        let memory = Memory::open(self.pid.0)?;
        // The last page of our range is not used by any call that is under way: the mailbox ends before it.
        let scratch = reserve.end() - tern_tracee::PAGE;
        let mut space =
            HomeSpace { injection: &mut injection, memory: &memory, scratch, files: &layout.files };
        let done = apply::carry_out(&steps, &mut space);
        let stopped = injection.finish()?;
        self.go_on(stopped)?;
        done
    }

    fn checked(&self, layout: &Layout) -> Result<Reserve> {
        let astray = |what: &str| Error::Astray { what: what.into(), pid: self.pid.0 };
        layout.check().map_err(astray)?;
        let reserve = self.reserve.ok_or_else(|| astray("no deputy"))?;
        if layout.regions.iter().any(|r| reserve.meets(r.start, r.end)) {
            return Err(astray("its node sent a layout that covers our range"));
        }
        Ok(reserve)
    }

    /// Takes pages; the deputy does not look at them.
    ///
    /// # Errors
    /// If they lie outside its memory.
    pub(crate) fn take_pages(&self, runs: &[Run], bytes: &[u8]) -> Result<()> {
        if let Some(reserve) = self.reserve
            && runs.iter().any(|&(start, len)| reserve.meets(start, start.saturating_add(len)))
        {
            return Err(Error::Astray { what: "its node sent pages in our range".into(), pid: self.pid.0 });
        }
        target::write_pages(&self.memory, runs, bytes)
    }

    /// Has the standing deputy forget pages; it goes on with its call afterwards.
    ///
    /// # Errors
    /// If the process is gone.
    pub(crate) fn forget(&mut self, stopped: Stopped, runs: &[Run]) -> Result<()> {
        let (mut injection, reserve) = self.injection(stopped)?;
        let memory = Memory::open(self.pid.0)?;
        let safe: Vec<Run> =
            runs.iter().copied().filter(|&(s, l)| !reserve.meets(s, s.saturating_add(l))).collect();
        let mut space =
            HomeSpace { injection: &mut injection, memory: &memory, scratch: reserve.room(), files: &[] };
        let done = target::forget(&mut space, self.pid.0, &safe);
        let stopped = injection.finish()?;
        self.go_on(stopped)?;
        done
    }

    /// Everything is here: makes the standing deputy the process again.
    ///
    /// # Errors
    /// If it is gone, or the image is unsound.
    pub(crate) fn come_home(
        &mut self,
        stopped: Stopped,
        image: &ProcessImage,
        talk: &Conversation,
    ) -> Result<Homecoming> {
        let (stopped, registers, lingers, rest) = match self.settle(stopped, image, talk)? {
            Settled::Registers(stopped, registers) => (stopped, registers, false, false),
            Settled::Linger(stopped, registers) => (stopped, registers, true, false),
            Settled::Rest(stopped, registers) => (stopped, registers, true, true),
            Settled::Soon => return Ok(Homecoming::Soon),
        };
        // Signals that the last life has taken over and not delivered, and those that it has not taken over.
        let mut carried: Vec<Siginfo> =
            talk.carried.iter().filter_map(|i| i.as_slice().try_into().ok()).collect();
        carried
            .extend(self.unheard.drain(..).filter(|(count, _)| *count > talk.signals).map(|(_, info)| info));
        self.actions.clone_from(&image.actions);
        if !lingers {
            return self.finish(stopped, image, &registers, &carried).map(Homecoming::Home);
        }
        let mut image = Box::new(image.clone());
        image.thread.registers = registers;
        let mut asked = None;
        if rest {
            let memory = Memory::open(self.pid.0)?;
            let nr = registers.call().unwrap_or_default() as u32;
            let call = gather(nr, &registers.arguments(), &mut HomeMemory(&memory));
            let astray =
                |_e| Error::Astray { what: "its node sent a transfer that is none".into(), pid: self.pid.0 };
            let call = call.map_err(astray)?.call;
            asked = Some(CallRequest {
                epoch: self.epoch,
                number: talk.call,
                signals: talk.signals,
                resumes: None,
                call,
            });
        }
        self.state = State::Lingering(Box::new(Lingering { image, carried, partial: talk.partial }));
        self.go_on(stopped)?;
        Ok(Homecoming::Lingers(asked.map(Box::new)))
    }

    /// Finds out what has become of the call that the guest was in.
    fn settle(&mut self, stopped: Stopped, image: &ProcessImage, talk: &Conversation) -> Result<Settled> {
        let mut registers = image.thread.registers;
        let rest = talk.partial.is_some() && !self.knows(talk.call);
        if !talk.call_open && !rest {
            return Ok(Settled::Registers(stopped, registers));
        }
        if registers.call().is_none() {
            // The kernel there had already set it to make the call again: put behind it, as if it had not.
            (registers.orig_rax, registers.rip) = (registers.rax, registers.rip + 2);
        }
        let resumes = talk.resumes.filter(|code| restart::is(*code));
        registers.rax = resumes.unwrap_or(restart::NOINTR).cast_unsigned();
        if rest {
            // Of a transfer, never asked for here: only the deputy can add to what was done.
            return Ok(Settled::Rest(stopped, registers));
        }
        if let Some(mailbox) = &mut self.mailbox
            && let Some(current) = self.current.take_if(|_| mailbox.is_done())
        {
            self.last = Some(made(&current, mailbox.collect(&current)));
        }
        if let Some(last) = self.last.take_if(|last| last.number == talk.call) {
            self.deliver_result(&mut registers, &last.outcome, talk.partial)?;
            return Ok(Settled::Registers(stopped, registers));
        }
        let Some(current) = self.current.as_ref().filter(|c| c.request.number == talk.call) else {
            return Ok(Settled::Registers(stopped, registers));
        };
        let now = stopped.registers()?;
        let code = now.rax.cast_signed();
        let nr = current.request.call.nr;
        if !self.is_in_call(&now) {
            // Just before or behind it: the blob is on its way to it, or to its answer.
            stopped.resume(0)?;
            return Ok(Settled::Soon);
        }
        let cut_short = tern_migrate::partial::rest(&mut now.clone(), current.partial).is_some();
        let interrupted = restart::is(code) || code == -i64::from(libc::EINTR);
        let whole = current.partial.is_none() && talk.partial.is_none();
        if interrupted && whole && waits_for_ever(&current.request.call) {
            // Nothing is lost when the kernel makes it anew, natively. But the program is in the call: a signal that
            // comes just now interrupts it, and must not be handled before it is made again.
            self.current = None;
            registers.rax = restart::NOHAND.cast_unsigned();
            return Ok(Settled::Registers(stopped, registers));
        }
        // The rest of a transfer goes on here: only the deputy knows what was done before.
        if cut_short
            || (interrupted && !whole)
            || code == restart::BLOCK
            || (code == -i64::from(libc::EINTR) && fails_when_interrupted(nr))
        {
            return Ok(Settled::Linger(stopped, registers));
        }
        if restart::is(code) {
            self.current = None;
            registers.rax = code.cast_unsigned();
            return Ok(Settled::Registers(stopped, registers));
        }
        // It has just ended: let the blob say so.
        stopped.resume(0)?;
        Ok(Settled::Soon)
    }

    /// Whether this call has been made, or is being made.
    fn knows(&self, call: u64) -> bool {
        self.last.as_ref().is_some_and(|l| l.number == call)
            || self.current.as_ref().is_some_and(|c| c.request.number == call)
    }

    /// Puts the result of a call where the program expects it.
    fn deliver_result(
        &self,
        registers: &mut Registers,
        outcome: &Outcome,
        partial: Option<Partial>,
    ) -> Result<()> {
        let memory = Memory::open(self.pid.0)?;
        let nr = registers.call().unwrap_or_default() as u32;
        let mut ret = outcome.ret;
        if let Ok(gathered) = gather(nr, &registers.arguments(), &mut HomeMemory(&memory))
            && scatter(&gathered.landings, outcome, &mut HomeMemory(&memory)).is_err()
        {
            ret = -i64::from(libc::EFAULT);
        }
        if let Some(partial) = partial {
            ret = partial.whole(ret);
            partial.mend(registers);
        }
        registers.rax = ret.cast_unsigned();
        if !restart::is(ret) {
            registers.orig_rax = u64::MAX;
        }
        Ok(())
    }

    /// The last step: actions, thread, pending signals; our range is gone afterwards.
    fn finish(
        &mut self,
        stopped: Stopped,
        image: &ProcessImage,
        registers: &Registers,
        carried: &[Siginfo],
    ) -> Result<Stopped> {
        let pid = self.pid.0;
        let reserve = self.reserve.ok_or_else(|| Error::Astray { what: "no deputy".into(), pid })?;
        let memory = Memory::open(pid)?;
        let mut injection = Injection::begin(stopped, Site(reserve.start + blob::call_site()))?;
        if let Some((start, end)) = self.mailbox.as_ref().and_then(crate::mailbox::Mailbox::large) {
            injection.must("release a mailbox", libc::SYS_munmap, [start, end - start, 0, 0, 0, 0])?;
        }
        let mut space =
            HomeSpace { injection: &mut injection, memory: &memory, scratch: reserve.room(), files: &[] };
        image.restore(&mut space, &memory, reserve, None)?;
        injection.stopped()?.set_xstate(&image.thread.xstate)?;
        raise_natively(&mut injection, &memory, reserve, self.own_pid, carried)?;
        let maps = procfs::maps(pid)?;
        injection.set_site(Site::in_vdso(&memory, &maps)?);
        reserve.release(&mut injection)?;
        injection.stopped()?.set_options(FOLLOW_EXEC)?;
        (self.reserve, self.mailbox, self.current, self.last) = (None, None, None, None);
        self.unheard.clear();
        self.state = State::Resident;
        injection.finish_with(registers, image.thread.sigmask)
    }

    /// The call with which a standing process lingered has ended: it is home now.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn linger_ended(&mut self, stopped: Stopped) -> Result<Option<Stopped>> {
        let ended = self.mailbox.as_ref().is_some_and(crate::mailbox::Mailbox::is_done);
        let current = if ended { self.current.take() } else { None };
        let (Some(mailbox), Some(current)) = (&mut self.mailbox, current) else {
            return self.go_on(stopped).map(|()| None);
        };
        let outcome = mailbox.collect(&current);
        let State::Lingering(lingering) = std::mem::replace(&mut self.state, State::Resident) else {
            return Err(Error::Astray { what: "it does not linger".into(), pid: self.pid.0 });
        };
        let mut registers = lingering.image.thread.registers;
        self.deliver_result(&mut registers, &outcome, lingering.partial)?;
        // Nothing that comes now is for a guest: there is none.
        self.finish(stopped, &lingering.image, &registers, &lingering.carried).map(Some)
    }

    /// A signal reaches a process that lingers: it gets its program's registers back, with the kernel's own
    /// code for the interrupted call, and then the signal, all natively. The process is returned stopped, with
    /// the signal that it is to be let go with.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn signalled_lingering(
        &mut self,
        stopped: Stopped,
        signal: i32,
    ) -> Result<Option<(Stopped, i32)>> {
        let action = self.actions.get(signal as usize - 1).map_or(DEFAULT, |a| a[0]);
        match crate::signal::judge(action, signal) {
            crate::signal::Verdict::Ignored => self.go_on(stopped).map(|()| None),
            crate::signal::Verdict::Natural => stopped.resume(signal).map(|()| None),
            crate::signal::Verdict::Forward => {
                let State::Lingering(mut lingering) = std::mem::replace(&mut self.state, State::Resident)
                else {
                    return Ok(Some((stopped, signal)));
                };
                let now = stopped.registers()?;
                let info = stopped.siginfo()?;
                let mut registers = lingering.image.thread.registers;
                if self.is_in_call(&now)
                    && let (Some(mailbox), Some(current)) = (&mut self.mailbox, self.current.take())
                {
                    // What the call has written until now, a sleep's rest among it, is the program's.
                    let outcome = mailbox.cut_short(&current, now.rax.cast_signed());
                    self.deliver_result(&mut registers, &outcome, lingering.partial)?;
                }
                lingering.carried.push(info);
                let stopped = self.finish(stopped, &lingering.image, &registers, &lingering.carried)?;
                Ok(Some((stopped, 0)))
            }
        }
    }
}

/// What became of a deputy that was to come home.
pub(crate) enum Homecoming {
    /// It is the process again, standing, ready to be let go.
    Home(Stopped),
    /// Its call goes on, or is this one, to be made now; it will be home when that ends.
    Lingers(Option<Box<CallRequest>>),
    /// It runs on to the end or the beginning of its call, and is to be brought to a stand again.
    Soon,
}

#[allow(clippy::large_enum_variant, reason = "one at a time")]
enum Settled {
    /// The program goes on with these.
    Registers(Stopped, Registers),
    /// The deputy goes on with the call.
    Linger(Stopped, Registers),
    /// The deputy makes the call that these are in.
    Rest(Stopped, Registers),
    /// See [`Homecoming::Soon`].
    Soon,
}

/// Whether a call that was interrupted has no time limit that could have run down.
fn waits_for_ever(call: &tern_syscall::Call) -> bool {
    use tern_syscall::{Arg, Timeout};
    let Some(wait) = tern_syscall::row(call.nr).and_then(|row| row.wait) else { return false };
    match wait.timeout {
        Timeout::Millis(arg) => matches!(call.args[usize::from(arg)], Arg::Value(ms) if (ms as i32) < 0),
        Timeout::Timespec(arg) | Timeout::TimeLeft(arg) => {
            matches!(call.args[usize::from(arg)], Arg::Value(0))
        }
        Timeout::None | Timeout::Absolute(_) => false,
    }
}

/// The result of a call.
pub(crate) fn made(current: &Current, outcome: Outcome) -> CallResult {
    CallResult { number: current.request.number, outcome, child: current.child, file: None }
}
