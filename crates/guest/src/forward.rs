//! Trapped calls to the deputy, and their results back.

use crate::cpu::Whose;
use crate::member::{GuestMemory, Member, Process};
use crate::own;
use crate::thread::{OpenCall, Thread};
use std::time::Instant;
use tern_ids::HomePid;
use tern_migrate::CpuTime;
use tern_migrate::message::{CallRequest, CallResult, Message, send};
use tern_syscall::{ByteBuf, Gather, Gathered, Route, Special, gather, reason, route, scatter};
use tern_tracee::listener::Notification;
use tern_tracee::registers::restart;
use tern_tracee::stop::{self, Stop};
use tern_wire::Link;

/// What became of a message that should go home.
pub type Sent = std::result::Result<(), Failed>;

/// Why a call could not be handled.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    /// The guest is gone or astray; it is to be ended.
    #[error(transparent)]
    Guest(#[from] tern_tracee::Error),
    /// It cannot come here.
    #[error(transparent)]
    Unmovable(#[from] tern_image::Unmovable),
    /// Home is out of reach; what is open is asked for again on the next link.
    #[error(transparent)]
    Link(#[from] tern_wire::LinkError),
}

impl Thread {
    /// Takes a call that the thread has made.
    ///
    /// # Errors
    /// If the guest is gone, or home out of reach.
    pub fn trapped(
        &mut self,
        mut trap: Notification,
        process: &mut Process,
        mut home: Option<&mut Link>,
    ) -> Sent {
        // That is about no file: what is lent stays so.
        let stands = process.halting && self.can_halt(process);
        if !stands && !self.takes_signal_first() && self.tell_time(&trap, process)? {
            return Ok(());
        }
        process.take_back()?;
        if i64::from(trap.nr) == libc::SYS_clone3 {
            match crate::clone::as_clone(&trap.args, &process.memory) {
                Ok(args) => (trap.nr, trap.args) = (libc::SYS_clone as u32, args),
                Err(errno) => return Ok(self.reply(trap.id, -i64::from(errno))?),
            }
        }
        if process.halting && self.can_halt(process) {
            return Ok(self.halt_at(&trap, process)?);
        }
        let route = route(trap.nr, &trap.args);
        if matches!(route, Route::Both(Special::Fork | Special::Thread)) {
            process.cool();
        }
        if !matches!(route, Route::Here | Route::Refuse(_)) && self.takes_signal_first() {
            return Ok(self.reply(trap.id, self.before_its_call())?);
        }
        if !matches!(route, Route::Home) {
            self.talk.resumes = None;
        }
        match route {
            Route::Here => Ok(self.pass(trap.id)?),
            Route::Refuse(errno) => Ok(self.reply(trap.id, -i64::from(errno))?),
            Route::Homeward(reason) => self.go_home_for(trap, reason, process, home),
            Route::Home if self.direct(&trap, process, home.as_deref_mut())? => Ok(()),
            Route::Home if self.answer_of_names(&trap, process)? => Ok(()),
            Route::Home => self.ask_home(trap, process, home),
            Route::Both(special) => self.special(trap, special, process, home),
        }
    }

    /// Sends a call home as it is.
    ///
    /// # Errors
    /// As [`trapped`](Self::trapped).
    pub fn ask_home(&mut self, trap: Notification, process: &mut Process, home: Option<&mut Link>) -> Sent {
        match gather(trap.nr, &trap.args, &mut GuestMemory(&process.memory)) {
            Ok(gathered) if own::reaches_memory(&gathered.call, process.own_pid) => {
                self.go_home_for(trap, reason::OWN_MEMORY, process, home)
            }
            Ok(gathered) => {
                // What a handler has kept blocked until now, and this call's mask lets through, home has sent long ago: it
                // would wait there for another.
                let mask = gathered.call.mask().filter(|mask| self.has_deliverable(Some(*mask)));
                match mask.filter(|_| !self.talk.call_open) {
                    Some(mask) => Ok(self.answer_under_mask(trap.id, restart::NOHAND, mask, process)?),
                    None => self.ask(trap, gathered, process, home),
                }
            }
            Err(Gather::Errno(errno)) => Ok(self.reply(trap.id, -i64::from(errno))?),
            Err(Gather::Homeward(reason)) => self.go_home_for(trap, reason, process, home),
            Err(Gather::Here) => Ok(self.pass(trap.id)?),
        }
    }

    /// Sends a call home, on which the trapped call's answer depends.
    ///
    /// # Errors
    /// As [`trapped`](Self::trapped).
    pub fn ask(
        &mut self,
        trap: Notification,
        gathered: Gathered,
        process: &mut Process,
        home: Option<&mut Link>,
    ) -> Sent {
        // After a halt the kernel makes an open call again by itself: it keeps its number, by which home
        // knows what it has done already.
        if !std::mem::take(&mut self.talk.call_open) {
            self.talk.call += 1;
        }
        process.at_home.forget();
        process.hot.forget_time(&process.memory, process.reserve)?;
        let before = process.files.send_before(self.talk.call, trap.nr, &trap.args);
        self.take_back(&trap, &mut process.files);
        let (sent, since) = (Some(gathered), Instant::now());
        self.open = Some(OpenCall { trap, sent, before, homeward: None, file: None, since });
        tracing::trace!(tid = %self.tid, number = self.talk.call, nr = trap.nr, "asks");
        let asked = self.ask_again(process, home);
        self.raise_held_back()?;
        asked
    }

    /// Sends the open call, for the first time or on a new link.
    ///
    /// # Errors
    /// If home is out of reach.
    pub fn ask_again(&self, process: &Process, home: Option<&mut Link>) -> Sent {
        let (Some(open), Some(home)) = (&self.open, home) else { return Ok(()) };
        let message = match (&open.sent, &open.homeward) {
            (Some(gathered), _) => Message::Call(Box::new(CallRequest {
                epoch: process.epoch,
                number: self.talk.call,
                signals: self.talk.signals,
                resumes: self.talk.resumes,
                before: open.before.clone(),
                brings: process.files.wants_with(open.trap.nr),
                call: gathered.call.clone(),
                view: own::view(&gathered.call, process).map(ByteBuf::from),
            })),
            (None, Some(reason)) => Message::FetchHome(reason.clone()),
            (None, None) => return Ok(()),
        };
        Ok(send(home, self.tid, &message, &[])?)
    }

    pub(crate) fn go_home_for(
        &mut self,
        trap: Notification,
        reason: &str,
        process: &Process,
        home: Option<&mut Link>,
    ) -> Sent {
        let name = tern_syscall::row(trap.nr).map_or("?", |row| row.name);
        let homeward = Some(format!("{reason}: {name} is done at home only"));
        let (before, since) = (Vec::new(), Instant::now());
        self.open = Some(OpenCall { trap, sent: None, before, homeward, file: None, since });
        self.ask_again(process, home)
    }

    /// Takes the result of the open call, and answers the trap with it unless there is a local part to do.
    fn answered(
        &mut self,
        mut result: CallResult,
        used: Option<CpuTime>,
        process: &mut Process,
    ) -> std::result::Result<Option<(OpenCall, CallResult)>, Failed> {
        tracing::trace!(tid = %self.tid, result.number, result.outcome.ret, call = self.talk.call, open = self.open.is_some(), "is answered");
        let awaited = self.open.take_if(|open| open.sent.is_some() && result.number == self.talk.call);
        let Some(open) = awaited else { return Ok(None) };
        self.talk.resumes = None;
        process.at_home.hear(open.trap.nr, &open.trap.args, &result.outcome, open.since);
        if let Some(used) = used {
            crate::cpu::add(open.trap.nr, &open.trap.args, used, &mut result.outcome);
        }
        let local = match route(open.trap.nr, &open.trap.args) {
            Route::Both(special) => result.outcome.ret >= 0 && crate::special::has_local_part(special),
            _ => false,
        };
        if local {
            return Ok(Some((open, result)));
        }
        self.finish(&open, &result, process)?;
        Ok(None)
    }

    /// Answers the trap with what came back.
    ///
    /// # Errors
    /// If the guest is gone.
    pub fn finish(&mut self, open: &OpenCall, result: &CallResult, process: &mut Process) -> Sent {
        let (id, mut ret) = (open.trap.id, result.outcome.ret);
        let Some(gathered) = &open.sent else { return Ok(()) };
        if scatter(&gathered.landings, &result.outcome, &mut GuestMemory(&process.memory)).is_err() {
            ret = -i64::from(libc::EFAULT);
        }
        if gathered.cut && ret.cast_unsigned() == tern_syscall::limits::PAYLOAD && !self.has_raised() {
            return Ok(self.go_on_with_long(id, ret, process)?);
        }
        if let Some(partial) = self.talk.partial.filter(|_| !restart::is(ret) || self.has_raised()) {
            self.talk.partial = None;
            return Ok(self.answer_whole(id, &partial, ret, process)?);
        }
        if restart::is(ret) && ret != restart::NOINTR {
            // Until a handler has run, or it has been asked for again, it is in this call.
            self.talk.resumes = Some(ret);
        }
        let interrupted = restart::is(ret) || ret == -i64::from(libc::EINTR);
        if interrupted && self.has_raised() {
            let mask = gathered.call.mask();
            if self.has_deliverable(mask) {
                let Some(mask) = mask else { return Ok(self.reply(id, ret)?) };
                // Home had it taken before the call, but only the call lets it through: so it is in the call.
                let before = ret == restart::NOINTR && !self.has_deliverable(None);
                let ret = if before { restart::NOHAND } else { ret };
                return Ok(self.answer_under_mask(id, ret, mask, process)?);
            }
            // Home was interrupted by a signal that waits here: it is blocked while a handler runs, which home does
            // not know. Here nothing has interrupted the call.
            if !restart::is(ret) {
                return Ok(self.answer_restart(id, restart::NOINTR)?);
            }
        }
        if restart::is(ret) {
            return Ok(self.answer_restart(id, ret)?);
        }
        process.lend_again()?;
        Ok(self.reply(id, ret)?)
    }

    /// A piece of a transfer that is longer than one message carries has been moved whole: the thread makes the call
    /// for the rest, and is told the sum at the end. From here on that is a transfer as others that were interrupted.
    fn go_on_with_long(&mut self, id: u64, moved: i64, process: &mut Process) -> tern_tracee::Result<()> {
        let Some(stopped) = self.halt_in(id, process)? else { return Ok(()) };
        let mut registers = stopped.registers()?;
        registers.rax = moved.cast_unsigned();
        let before = self.talk.partial.take();
        self.talk.partial = tern_migrate::partial::rest_of_long(&mut registers, before);
        if self.talk.partial.is_none() {
            if let Some(before) = before {
                before.mend(&mut registers);
                registers.rax = before.whole(moved).cast_unsigned();
            }
            registers.orig_rax = u64::MAX;
        } else {
            // As an open call it has its number, by which home knows that it has not been asked for it, and no handler runs
            // before it is.
            self.talk.call += 1;
            self.talk.call_open = true;
        }
        stopped.set_registers(&registers)?;
        self.run_on(stopped, process)
    }

    /// Answers the rest of a transfer: the program gets the sum, and its own arguments back in their registers.
    fn answer_whole(
        &mut self,
        id: u64,
        partial: &tern_migrate::Partial,
        ret: i64,
        process: &mut Process,
    ) -> tern_tracee::Result<()> {
        let Some(stopped) = self.halt_in(id, process)? else { return Ok(()) };
        let mut registers = stopped.registers()?;
        partial.mend(&mut registers);
        (registers.rax, registers.orig_rax) = (partial.whole(ret).cast_unsigned(), u64::MAX);
        stopped.set_registers(&registers)?;
        self.run_on(stopped, process)
    }

    /// Answers a call that had a signal mask of its own and was interrupted by a signal that only this mask
    /// lets through: the signal is delivered under it.
    fn answer_under_mask(
        &mut self,
        id: u64,
        ret: i64,
        mask: u64,
        process: &mut Process,
    ) -> tern_tracee::Result<()> {
        stop::interrupt(self.host)?;
        self.reply(id, ret)?;
        loop {
            let stopped = stop::wait_stop(self.host)?;
            if self.mask_after.is_none() {
                self.mask_after = Some(stopped.sigmask()?);
                stopped.set_sigmask(mask)?;
            }
            match stopped.stop {
                Stop::Interrupt => return stopped.resume(0),
                // A signal that the program's own mask lets through as well was faster than the interrupt, whose
                // stop is then the main loop's to resume from.
                Stop::Signal(signal) => {
                    self.deliver(stopped, signal, process)?;
                    if self.mask_after.is_none() || self.standing.is_some() {
                        return Ok(());
                    }
                }
                _ => stopped.resume(0)?,
            }
            stop::interrupt(self.host)?;
        }
    }
}

impl Member {
    /// Takes the result of a thread's open call. One that is not awaited (any more) is dropped: the call will be asked
    /// for again. With it comes back what has a local part to do.
    ///
    /// # Errors
    /// If the guest is gone.
    pub fn answered(
        &mut self,
        tid: HomePid,
        result: CallResult,
    ) -> std::result::Result<Option<(OpenCall, CallResult)>, Failed> {
        let used = self.time_asked_for(tid, &result);
        let Self { process, threads } = self;
        threads.get_mut(&tid).map_or(Ok(None), |thread| thread.answered(result, used, process))
    }

    /// What was used away of the CPU time that the thread's open call asks for, if it is a call for that.
    fn time_asked_for(&mut self, tid: HomePid, result: &CallResult) -> Option<CpuTime> {
        let trap = self.threads.get(&tid)?.open.as_ref()?.trap;
        if result.outcome.ret < 0 || route(trap.nr, &trap.args) != Route::Both(Special::CpuTime) {
            return None;
        }
        match crate::cpu::whose(trap.nr, &trap.args, self.process.own_pid)? {
            Whose::Process => Some(self.process.meter.used()),
            Whose::Caller => self.threads.get_mut(&tid).map(|thread| thread.meter.used()),
            Whose::Thread(own) => self
                .threads
                .values_mut()
                .find(|thread| thread.own_tid == own)
                .map(|thread| thread.meter.used()),
        }
    }
}
