//! Trapped calls to the deputy, and their results back.

use crate::member::{GuestMemory, Member, OpenCall, State};
use std::time::Instant;
use tern_migrate::message::{CallRequest, CallResult, Message, send};
use tern_syscall::{Gather, Gathered, Route, Special, gather, route, scatter};
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
    /// Home is out of reach; what is open is asked for again on the next link.
    #[error(transparent)]
    Link(#[from] tern_wire::LinkError),
}

impl Member {
    /// Takes a call that the guest has made.
    ///
    /// # Errors
    /// If the guest is gone, or home out of reach.
    pub fn trapped(&mut self, trap: Notification, home: Option<&mut Link>) -> Sent {
        let route = route(trap.nr, &trap.args);
        if !matches!(route, Route::Home) {
            self.talk.resumes = None;
        }
        match route {
            Route::Here => Ok(self.pass(trap.id)?),
            Route::Refuse(errno) => Ok(self.reply(trap.id, -i64::from(errno))?),
            Route::Homeward(reason) => self.go_home_for(trap, reason, home),
            Route::Home => self.ask_home(trap, home),
            Route::Both(special) => self.special(trap, special, home),
        }
    }

    /// Sends a call home as it is.
    ///
    /// # Errors
    /// As [`trapped`](Self::trapped).
    pub fn ask_home(&mut self, trap: Notification, home: Option<&mut Link>) -> Sent {
        match gather(trap.nr, &trap.args, &mut GuestMemory(&self.memory)) {
            Ok(gathered) => self.ask(trap, gathered, home),
            Err(Gather::Errno(errno)) => Ok(self.reply(trap.id, -i64::from(errno))?),
            Err(Gather::Homeward(reason)) => self.go_home_for(trap, reason, home),
            Err(Gather::Here) => Ok(self.pass(trap.id)?),
        }
    }

    /// Sends a call home, on which the trapped call's answer depends.
    ///
    /// # Errors
    /// As [`trapped`](Self::trapped).
    pub fn ask(&mut self, trap: Notification, gathered: Gathered, home: Option<&mut Link>) -> Sent {
        // After a halt the kernel makes an open call again by itself: it keeps its number, by which home
        // knows what it has done already.
        if !std::mem::take(&mut self.talk.call_open) {
            self.talk.call += 1;
        }
        let sent = Some(gathered);
        self.open = Some(OpenCall { trap, sent, homeward: None, file: None, since: Instant::now() });
        tracing::trace!(pid = %self.pid, number = self.talk.call, nr = trap.nr, "asks");
        let asked = self.ask_again(home);
        self.raise_held_back()?;
        asked
    }

    /// Sends the open call, for the first time or on a new link.
    ///
    /// # Errors
    /// If home is out of reach.
    pub fn ask_again(&mut self, home: Option<&mut Link>) -> Sent {
        let (Some(open), Some(home)) = (&self.open, home) else { return Ok(()) };
        let message = match (&open.sent, &open.homeward) {
            (Some(gathered), _) => Message::Call(Box::new(CallRequest {
                epoch: self.epoch,
                number: self.talk.call,
                signals: self.talk.signals,
                resumes: self.talk.resumes,
                call: gathered.call.clone(),
            })),
            (None, Some(reason)) => Message::FetchHome(reason.clone()),
            (None, None) => return Ok(()),
        };
        Ok(send(home, self.pid, &message, &[])?)
    }

    fn go_home_for(&mut self, trap: Notification, reason: &str, home: Option<&mut Link>) -> Sent {
        let name = tern_syscall::row(trap.nr).map_or("?", |row| row.name);
        let homeward = Some(format!("{reason}: {name} is done at home only"));
        self.open = Some(OpenCall { trap, sent: None, homeward, file: None, since: Instant::now() });
        self.ask_again(home)
    }

    /// Takes the result of the open call. One that is not awaited (any more) is dropped: the call will be asked
    /// for again.
    ///
    /// # Errors
    /// If the guest is gone.
    pub fn answered(
        &mut self,
        mut result: CallResult,
    ) -> std::result::Result<Option<(OpenCall, CallResult)>, Failed> {
        tracing::trace!(pid = %self.pid, result.number, result.outcome.ret, call = self.talk.call, open = self.open.is_some(), "is answered");
        if result.number != self.talk.call || self.open.as_ref().is_none_or(|o| o.sent.is_none()) {
            return Ok(None);
        }
        let Some(open) = self.open.take() else { return Ok(None) };
        self.talk.resumes = None;
        let special = match route(open.trap.nr, &open.trap.args) {
            Route::Both(special) if result.outcome.ret >= 0 => Some(special),
            _ => None,
        };
        if special == Some(Special::CpuTime) {
            let used = self.meter.used();
            crate::cpu::add(open.trap.nr, &open.trap.args, self.own_pid, used, &mut result.outcome);
        }
        if special.is_some_and(crate::special::has_local_part) {
            return Ok(Some((open, result)));
        }
        self.finish(&open, &result)?;
        Ok(None)
    }

    /// Answers the trap with what came back.
    ///
    /// # Errors
    /// If the guest is gone.
    pub fn finish(&mut self, open: &OpenCall, result: &CallResult) -> Sent {
        let (id, mut ret) = (open.trap.id, result.outcome.ret);
        let Some(gathered) = &open.sent else { return Ok(()) };
        if scatter(&gathered.landings, &result.outcome, &mut GuestMemory(&self.memory)).is_err() {
            ret = -i64::from(libc::EFAULT);
        }
        if let Some(partial) = self.talk.partial.filter(|_| !restart::is(ret) || self.has_raised()) {
            self.talk.partial = None;
            return Ok(self.answer_whole(id, &partial, ret)?);
        }
        let interrupted = restart::is(ret) || ret == -i64::from(libc::EINTR);
        if interrupted && self.has_raised() {
            if let Some(mask) = gathered.call.mask() {
                return Ok(self.answer_under_mask(id, ret, mask)?);
            }
            if self.has_deliverable() {
                return Ok(self.reply(id, ret)?);
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
        Ok(self.reply(id, ret)?)
    }

    /// Answers the rest of a transfer: the program gets the sum, and its own arguments back in their registers.
    fn answer_whole(
        &mut self,
        id: u64,
        partial: &tern_migrate::Partial,
        ret: i64,
    ) -> tern_tracee::Result<()> {
        let stopped = self.halt_in(id)?;
        let mut registers = stopped.registers()?;
        partial.mend(&mut registers);
        (registers.rax, registers.orig_rax) = (partial.whole(ret).cast_unsigned(), u64::MAX);
        stopped.set_registers(&registers)?;
        stopped.resume(0)
    }

    /// Answers a call that had a signal mask of its own and was interrupted by a signal that only this mask
    /// lets through: the signal is delivered under it.
    fn answer_under_mask(&mut self, id: u64, ret: i64, mask: u64) -> tern_tracee::Result<()> {
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
                    self.deliver(stopped, signal)?;
                    if self.mask_after.is_none() || matches!(self.state, State::Dying { .. }) {
                        return Ok(());
                    }
                }
                _ => stopped.resume(0)?,
            }
            stop::interrupt(self.host)?;
        }
    }
}
