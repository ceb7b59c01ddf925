//! The kernel's verdict on each signal that reaches a deputy.
//!
//! The deputy's dispositions are the program's, but for handlers: those are set to the default action, and
//! only the record here says that there is a handler, which runs at the guest. So whatever is continued with
//! its signal meets its native fate: ignored, stopped, killed.
//!
//! A call that a signal interrupts shows the kernel's restart code at the stop. With `orig_rax` set to -1 the
//! kernel leaves the code alone, the blob takes it for the call's result, and it travels to the guest, behind
//! the signal: the guest's kernel then restarts the call, or fails it with EINTR, exactly as at home.

use crate::blob;
use crate::member::Member;
use tern_image::process::{DEFAULT, IGNORE};
use tern_migrate::message::Message;
use tern_syscall::Interrupted;
use tern_tracee::Result;
use tern_tracee::registers::{Registers, restart};
use tern_tracee::stop::{self, Stop, Stopped};

/// What is to be done with a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The program has a handler.
    Forward,
    /// The home kernel does what it does by default.
    Natural,
    /// Nobody will notice it.
    Ignored,
}

/// Judges a signal by the program's action for it.
pub(crate) fn judge(action: u64, signal: i32) -> Verdict {
    let by_default_ignored = matches!(signal, libc::SIGCHLD | libc::SIGURG | libc::SIGWINCH | libc::SIGCONT);
    match action {
        IGNORE => Verdict::Ignored,
        DEFAULT if by_default_ignored => Verdict::Ignored,
        DEFAULT => Verdict::Natural,
        _ => Verdict::Forward,
    }
}

impl Member {
    /// Goes on from a stop of the deputy before a signal. A message for the guest is returned, to be sent
    /// before anything else is.
    ///
    /// # Errors
    /// If the process is gone.
    pub(crate) fn signalled(&mut self, stopped: Stopped, signal: i32) -> Result<Option<Message>> {
        let action = self.actions.get(signal as usize - 1).map_or(DEFAULT, |a| a[0]);
        match judge(action, signal) {
            Verdict::Natural => stopped.resume(signal).map(|()| None),
            Verdict::Ignored => self.go_on(stopped).map(|()| None),
            Verdict::Forward => {
                let info = stopped.siginfo()?;
                let mut registers = stopped.registers()?;
                if self.is_in_call(&registers) && restart::is(registers.rax.cast_signed()) {
                    registers.orig_rax = u64::MAX;
                    stopped.set_registers(&registers)?;
                } else if self.is_before_call(&registers) {
                    // A call that has been asked for and not been begun: the program must take the signal first.
                    registers.rip = self.reserve.map_or(registers.rip, |r| r.start + blob::called());
                    (registers.rax, registers.orig_rax) = (restart::NOINTR.cast_unsigned(), u64::MAX);
                    stopped.set_registers(&registers)?;
                }
                stopped.resume(0)?;
                self.signals += 1;
                self.unheard.push_back((self.signals, info));
                Ok(Some(Message::Signal(self.signals, info.to_vec())))
            }
        }
    }

    /// Whether a stopped deputy is right behind the `syscall` of the requested call.
    pub(crate) fn is_in_call(&self, registers: &Registers) -> bool {
        self.reserve.is_some_and(|r| registers.rip == r.start + blob::called())
    }

    /// Whether a stopped deputy has been asked for a call and has not begun it.
    fn is_before_call(&self, registers: &Registers) -> bool {
        let asked = self.current.is_some() && self.mailbox.as_ref().is_some_and(|m| !m.is_done());
        let code = |start: u64| start..=start + blob::call_site();
        asked && self.reserve.is_some_and(|r| code(r.start).contains(&registers.rip))
    }

    /// Lets a deputy go on from a stop of which its program must not notice anything. Most interrupted calls
    /// the kernel restarts by itself; those that it fails with EINTR are made again, with what is left of
    /// their time.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn go_on(&mut self, stopped: Stopped) -> Result<()> {
        let mut registers = stopped.registers()?;
        if self.is_in_call(&registers)
            && let Some(current) = &mut self.current
            && let Some(partial) = tern_migrate::partial::rest(&mut registers, current.partial)
        {
            current.partial = Some(partial);
            stopped.set_registers(&registers)?;
            return stopped.resume(0);
        }
        if self.is_in_call(&registers)
            && registers.rax.cast_signed() == -i64::from(libc::EINTR)
            && let (Some(current), Some(mailbox)) = (&mut self.current, &mut self.mailbox)
            && fails_when_interrupted(current.request.call.nr)
        {
            let mut call = current.request.call.clone();
            call.shorten(current.since.elapsed());
            if let Ok(layout) = call.lay_out() {
                mailbox.refill(&layout);
                let args = mailbox.arguments(&layout);
                let site = registers.rip - 2;
                registers = registers.calling(site, u64::from(layout.nr()), &args);
                stopped.set_registers(&registers)?;
                current.layout = layout;
            }
        }
        stopped.resume(0)
    }

    /// Brings the running deputy to a stand. Signals that come first meet their fate on the way; messages for
    /// the guest are added to `messages`.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn halt(&mut self, messages: &mut Vec<Message>) -> Result<Stopped> {
        stop::interrupt(self.pid.0)?;
        loop {
            let stopped = stop::wait_stop(self.pid.0)?;
            match stopped.stop {
                Stop::Interrupt => return Ok(stopped),
                Stop::Signal(signal) => messages.extend(self.signalled(stopped, signal)?),
                // Stopped by job control: it stands as well as any.
                Stop::Group(_) => return Ok(stopped),
                _ => stopped.resume(0)?,
            }
        }
    }
}

/// Whether an interruption without a signal makes this call fail with EINTR.
pub(crate) fn fails_when_interrupted(nr: u32) -> bool {
    let wait = tern_syscall::row(nr).and_then(|row| row.wait);
    wait.is_some_and(|w| matches!(w.interrupted, Interrupted::Eintr | Interrupted::EintrIfSocketTimeout))
}

/// Mends the registers of a process of ours that we have just interrupted at home, before it ever left: a call
/// that the kernel failed with EINTR only because of us is made again. Its time limit begins anew; nobody but
/// the kernel knew how much of it was left.
pub(crate) fn mend(registers: &mut Registers) {
    if registers.begin_anew() {
        return;
    }
    let Some(nr) = registers.call() else { return };
    if registers.rax.cast_signed() == -i64::from(libc::EINTR) && fails_when_interrupted(nr as u32) {
        registers.rax = nr;
        registers.rip -= 2;
        registers.orig_rax = u64::MAX;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        assert_eq!(judge(DEFAULT, libc::SIGTERM), Verdict::Natural);
        assert_eq!(judge(DEFAULT, libc::SIGCHLD), Verdict::Ignored);
        assert_eq!(judge(IGNORE, libc::SIGTERM), Verdict::Ignored);
        assert_eq!(judge(0x4000, libc::SIGCHLD), Verdict::Forward);
    }

    #[test]
    fn only_what_we_broke_is_mended() {
        let waiting = Registers {
            orig_rax: libc::SYS_epoll_wait as u64,
            rax: (-4i64).cast_unsigned(),
            rip: 12,
            ..Registers::default()
        };
        let mut mended = waiting;
        mend(&mut mended);
        assert_eq!((mended.rip, mended.rax), (10, libc::SYS_epoll_wait as u64));
        let mut other = Registers { orig_rax: libc::SYS_read as u64, ..waiting };
        mend(&mut other);
        assert_eq!(other.rip, 12);
    }
}
