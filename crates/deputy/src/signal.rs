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
use crate::space::HomeSpace;
use tern_ids::HomePid;
use tern_image::process::{Action, DEFAULT, IGNORE, is_ignored_by_default};
use tern_migrate::message::Message;
use tern_syscall::Interrupted;
use tern_tracee::registers::{Registers, restart};
use tern_tracee::stop::{Stop, Stopped};
use tern_tracee::{Error, Result};

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
    match action {
        IGNORE => Verdict::Ignored,
        DEFAULT if is_ignored_by_default(signal) => Verdict::Ignored,
        DEFAULT => Verdict::Natural,
        _ => Verdict::Forward,
    }
}

/// Whether a handler is reset when it runs.
pub(crate) fn runs_once(action: &Action) -> bool {
    action[1] & libc::SA_RESETHAND as u32 as u64 != 0
}

impl Member {
    /// Goes on from a stop of a deputy thread before a signal. A message for the guest is returned, to be sent
    /// before anything else is.
    ///
    /// # Errors
    /// If the process is gone.
    pub(crate) fn signalled(&mut self, stopped: Stopped, signal: i32) -> Result<Option<Message>> {
        let action = self.actions.get(signal as usize - 1).map_or(DEFAULT, |a| a[0]);
        match judge(action, signal) {
            Verdict::Natural => {
                if crate::coredump::leaves_one(signal) {
                    crate::coredump::prevent(self.pid.0);
                }
                stopped.resume(signal).map(|()| None)
            }
            Verdict::Ignored => self.go_on(stopped).map(|()| None),
            Verdict::Forward => {
                let tid = HomePid(stopped.pid());
                let mut info = stopped.siginfo()?;
                self.timed(&mut info);
                let mut registers = stopped.registers()?;
                if self.is_in_call(&registers) {
                    // What its call returns belongs to this signal, also an EINTR or a count cut short: at the stop of
                    // the next, which may be one that nobody will notice, the call is not to be made again.
                    registers.orig_rax = u64::MAX;
                    stopped.set_registers(&registers)?;
                } else if self.is_before_call(tid, &registers) {
                    // A call that has been asked for and not been begun: the program must take the signal first.
                    registers.rip = self.reserve.map_or(registers.rip, |r| r.start + blob::called());
                    (registers.rax, registers.orig_rax) = (restart::NOINTR.cast_unsigned(), u64::MAX);
                    stopped.set_registers(&registers)?;
                }
                stopped.resume(0)?;
                // The handler's first run resets it, where it runs; here the next one finds it reset.
                self.handled(signal);
                let thread = self.thread(tid)?;
                thread.signals += 1;
                thread.unheard.push_back((thread.signals, info));
                Ok(Some(Message::Signal(thread.signals, info.to_vec())))
            }
        }
    }

    /// The handler of this signal runs.
    pub(crate) fn handled(&mut self, signal: i32) {
        if let Some(action) = self.actions.get_mut(signal as usize - 1).filter(|action| runs_once(action)) {
            action[0] = DEFAULT;
        }
    }

    /// Has a standing deputy thread end the process by a signal that its program was killed by where it ran.
    ///
    /// # Errors
    /// If it is gone, or this is no signal.
    pub(crate) fn die(&mut self, stopped: Stopped, signal: i32) -> Result<()> {
        let astray = || Error::Astray { what: "its node sent no signal".into(), pid: self.pid.0 };
        if !(1..=64).contains(&signal) {
            return Err(astray());
        }
        // Its own action may be to ignore it, or it may block it: the kernel forces a fault through both.
        let default = [DEFAULT; 4];
        self.actions[signal as usize - 1] = default;
        let tid = stopped.pid();
        let (mut injection, reserve) = self.injection(stopped)?;
        let mut space = HomeSpace::new(&mut injection, &self.memory, reserve, &[]);
        tern_image::process::set_action(&mut space, &self.memory, reserve, signal as u64, &default)?;
        let stopped = injection.finish()?;
        stopped.set_sigmask(stopped.sigmask()? & !(1 << (signal - 1)))?;
        tern_tracee::pidfd::signal_thread(self.pid.0, tid, signal)?;
        stopped.resume(0)
    }

    /// Whether a stopped deputy is right behind the `syscall` of the requested call.
    pub(crate) fn is_in_call(&self, registers: &Registers) -> bool {
        self.reserve.is_some_and(|r| registers.rip == r.start + blob::called())
    }

    /// Whether a stopped deputy has been asked for a call and has not begun it.
    fn is_before_call(&self, tid: HomePid, registers: &Registers) -> bool {
        let asked = self.threads.get(&tid).is_some_and(|thread| {
            thread.current.is_some() && thread.mailbox.as_ref().is_some_and(|m| !m.is_done())
        });
        let at = self.reserve.and_then(|r| registers.rip.checked_sub(r.start));
        asked && at.is_some_and(blob::is_between_calls)
    }

    /// Lets a deputy go on from a stop of which its program must not notice anything. Most interrupted calls
    /// the kernel restarts by itself; those that it fails with EINTR are made again, with what is left of
    /// their time.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn go_on(&mut self, stopped: Stopped) -> Result<()> {
        if matches!(stopped.stop, Stop::Group(_)) {
            return stopped.listen();
        }
        let mut registers = stopped.registers()?;
        let in_call = self.is_in_call(&registers) && registers.call().is_some();
        let thread = self.thread(HomePid(stopped.pid()))?;
        if in_call
            && let Some(current) = &mut thread.current
            && let Some(partial) = tern_migrate::partial::rest(&mut registers, current.partial)
        {
            current.partial = Some(partial);
            let receives = i64::from(current.request.call.nr) == libc::SYS_recvmmsg;
            let stopped = if receives { self.forget_interruption(stopped, registers.rdi)? } else { stopped };
            stopped.set_registers(&registers)?;
            return stopped.resume(0);
        }
        if in_call
            && registers.rax.cast_signed() == -i64::from(libc::EINTR)
            && let (Some(current), Some(mailbox)) = (&mut thread.current, &mut thread.mailbox)
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
}

impl Member {
    /// A recvmmsg that was interrupted after its first message has left the interruption with its socket, as the error of
    /// the next call. Has the deputy ask for that, so that the rest does not get it.
    fn forget_interruption(&mut self, stopped: Stopped, socket: u64) -> Result<Stopped> {
        // The blob has a stack, and uses none.
        let value = stopped.registers()?.rsp - 128;
        let length = value + 8;
        self.memory.write(length, &4u32.to_le_bytes())?;
        let mut injection = self.injection(stopped)?.0;
        let (level, option) = (libc::SOL_SOCKET as u64, libc::SO_ERROR as u64);
        let _no_socket_any_more =
            injection.call(libc::SYS_getsockopt, [socket, level, option, value, length, 0])?;
        injection.finish()
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
        // As the kernel says it of a call that a handler interrupts, and nothing else.
        registers.rax = restart::NOHAND.cast_unsigned();
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
        assert_eq!((mended.rip, mended.rax.cast_signed()), (12, restart::NOHAND));
        assert_eq!(mended.orig_rax, libc::SYS_epoll_wait as u64);
        let mut other = Registers { orig_rax: libc::SYS_read as u64, ..waiting };
        mend(&mut other);
        assert_eq!(other.rip, 12);
    }
}
