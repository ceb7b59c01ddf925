//! The kernel's verdict on each signal that reaches a deputy.
//!
//! The deputy has the program's signal actions, except for handlers: those are set to the default
//! action, and only this shim's record shows the handler, which runs at the guest. (The handler of
//! a signal that is ignored by default stays installed, and never runs in the deputy.) So a deputy
//! that is resumed with its signal is treated by the kernel as the program would be: the signal is
//! ignored, or stops or kills it.
//!
//! If a signal interrupts a call, the stop shows the kernel's restart code. With `orig_rax` set to
//! -1 the kernel leaves the code alone, and the blob stores it as the call's result. It is sent to
//! the guest after the signal, and the guest's kernel restarts the call or fails it with EINTR, as
//! natively.

use crate::migrate::syscall_restart::has_time_left;
use crate::process::Process;
use crate::process::blob;
use crate::process::space::HomeSpace;
use tern_ids::HomePid;
use tern_image::process::{Action, SIG_DFL, is_ignored};
use tern_migrate::message::Message;
use tern_syscall::Interrupted;
use tern_tracee::registers::{Registers, restart};
use tern_tracee::stop::{Stop, Stopped};
use tern_tracee::{Error, Result};

/// The treatment of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The program has a handler: forward it to the guest.
    Forward,
    /// The home kernel applies the default action.
    Default,
    /// The program does not notice it.
    Ignored,
}

/// The verdict for a signal with this action.
pub(crate) fn judge(action: u64, signal: i32) -> Verdict {
    match action {
        _ if is_ignored(action, signal) => Verdict::Ignored,
        SIG_DFL => Verdict::Default,
        _ => Verdict::Forward,
    }
}

/// Whether a handler is reset when it is invoked.
pub(crate) fn is_one_shot(action: &Action) -> bool {
    action[1] & libc::SA_RESETHAND as u32 as u64 != 0
}

/// Whether the action of a signal has this flag.
fn has_flag(actions: &[Action], signal: i32, flag: i32) -> bool {
    actions.get(signal as usize - 1).is_some_and(|action| action[1] & flag as u32 as u64 != 0)
}

impl Process {
    /// Handles a deputy thread's stop for a signal, and resumes the thread. A message for the guest
    /// is returned, which must be sent before any other.
    ///
    /// # Errors
    /// If the process is gone.
    pub(crate) fn handle_signal(&mut self, stopped: Stopped, signal: i32) -> Result<Option<Message>> {
        let action = self.actions.get(signal as usize - 1).map_or(SIG_DFL, |a| a[0]);
        match judge(action, signal) {
            Verdict::Default => {
                if crate::signals::coredump::dumps_core(signal) {
                    crate::signals::coredump::prevent_core(self.pid.0);
                }
                stopped.resume(signal).map(|()| None)
            }
            Verdict::Ignored => self.resume_unnoticed(stopped).map(|()| None),
            Verdict::Forward => {
                let tid = HomePid(stopped.pid());
                let mut info = stopped.siginfo()?;
                self.set_overrun_of(&mut info);
                let at_stop = stopped.registers()?;
                let mut registers = at_stop;
                if self.is_in_call(&registers) {
                    // The call's result belongs to this signal, even an EINTR or a short count. At
                    // the stop for another, perhaps ignored, signal the call must not be restarted.
                    registers.orig_rax = u64::MAX;
                    stopped.set_registers(&registers)?;
                } else if self.is_before_call(tid, &registers) {
                    // The call was requested and not begun: the program must take the signal first.
                    registers.rip = self.reserve.map_or(registers.rip, |r| r.start + blob::after_call());
                    (registers.rax, registers.orig_rax) = (restart::NOINTR.cast_unsigned(), u64::MAX);
                    stopped.set_registers(&registers)?;
                }
                let handlers = (self.handled_signals(), has_flag(&self.actions, signal, libc::SA_NODEFER));
                let blocks = self.actions.get(signal as usize - 1).copied().unwrap_or_default();
                let thread = self.thread(tid)?;
                thread.hold_signals(&stopped, &at_stop, &info, handlers)?;
                thread.block_as_handler(&stopped, &at_stop, (signal, &blocks))?;
                stopped.resume(0)?;
                // The guest resets a one-shot handler when it is invoked; the record here follows.
                self.handler_invoked(signal);
                self.thread(tid).map(|thread| Some(thread.signal_message(info)))
            }
        }
    }

    /// The set of signals that have handlers.
    pub(super) fn handled_signals(&self) -> u64 {
        let is_handled = |at: usize, action: &Action| judge(action[0], at as i32 + 1) == Verdict::Forward;
        let handled = self.actions.iter().enumerate().filter(|(at, action)| is_handled(*at, action));
        handled.fold(0, |set, (at, _)| set | 1 << at)
    }

    /// Records that the handler of this signal is invoked.
    pub(crate) fn handler_invoked(&mut self, signal: i32) {
        if let Some(action) = self.actions.get_mut(signal as usize - 1).filter(|action| is_one_shot(action)) {
            action[0] = SIG_DFL;
        }
    }

    /// Kills the process, through a stopped deputy thread, by the signal that killed its program at
    /// the guest.
    ///
    /// # Errors
    /// If it is gone, or this is not a signal number.
    pub(crate) fn kill_by_signal(&mut self, stopped: Stopped, signal: i32) -> Result<()> {
        let inconsistent =
            || Error::Inconsistent { what: "its node sent an invalid signal number".into(), pid: self.pid.0 };
        if !(1..=64).contains(&signal) {
            return Err(inconsistent());
        }
        // The program may ignore or block the signal; the kernel forces a fault through both.
        let default = [SIG_DFL; 4];
        self.actions[signal as usize - 1] = default;
        let tid = stopped.pid();
        let (mut injection, reserve) = self.injection(stopped)?;
        let mut space = HomeSpace::new(&mut injection, &self.memory, reserve, &[]);
        tern_image::process::set_signal_action(&mut space, &self.memory, reserve, signal as u64, &default)?;
        let stopped = injection.finish()?;
        stopped.set_sigmask(stopped.sigmask()? & !(1 << (signal - 1)))?;
        tern_tracee::pidfd::signal_thread(self.pid.0, tid, signal)?;
        stopped.resume(0)
    }

    /// Sends the signal that killed the program at the guest to a deputy that cannot be stopped
    /// now.
    ///
    /// # Errors
    /// If it is gone, or this is not a signal number.
    pub(crate) fn signal_when_it_wakes(&mut self, signal: i32) -> Result<()> {
        if let Some(action) = self.actions.get_mut((signal as usize).wrapping_sub(1)) {
            *action = [SIG_DFL; 4];
        }
        self.withdraw_stops()?;
        tern_tracee::pidfd::signal_thread(self.pid.0, self.any_thread()?.0, signal)
    }

    /// Whether a stopped deputy is right behind the `syscall` of the requested call.
    pub(crate) fn is_in_call(&self, registers: &Registers) -> bool {
        self.reserve.is_some_and(|r| registers.rip == r.start + blob::after_call())
    }

    /// Whether a stopped deputy was requested to make a call and has not begun it.
    pub(crate) fn is_before_call(&self, tid: HomePid, registers: &Registers) -> bool {
        let requested = self.threads.get(&tid).is_some_and(|thread| {
            thread.current.is_some() && thread.mailbox.as_ref().is_some_and(|m| !m.is_done())
        });
        let at = self.reserve.and_then(|r| registers.rip.checked_sub(r.start));
        requested && at.is_some_and(blob::is_between_calls)
    }

    /// Resumes a deputy from a stop that its program must not notice. The kernel restarts most
    /// interrupted calls by itself. A transfer that was cut short is continued. A call that the kernel
    /// fails with EINTR, or whose timeout it would prolong by the time of the stop, is made again with
    /// the rest of its timeout.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn resume_unnoticed(&mut self, stopped: Stopped) -> Result<()> {
        if matches!(stopped.stop, Stop::Group(_)) {
            return stopped.listen();
        }
        let mut registers = stopped.registers()?;
        let in_call = self.is_in_call(&registers) && registers.call().is_some();
        let (stopped, is_over) =
            if in_call { self.check_socket_limit(stopped, &mut registers)? } else { (stopped, false) };
        if is_over {
            stopped.set_registers(&registers)?;
            return stopped.resume(0);
        }
        let thread = self.thread(HomePid(stopped.pid()))?;
        if in_call
            && let Some(current) = &mut thread.current
            && let Some(partial) = tern_migrate::partial::remainder(&mut registers, current.partial)
        {
            current.partial = Some(partial);
            let receives = i64::from(current.request.call.nr) == libc::SYS_recvmmsg;
            let stopped = if receives { self.clear_socket_error(stopped, registers.rdi)? } else { stopped };
            stopped.set_registers(&registers)?;
            return stopped.resume(0);
        }
        let result = registers.rax.cast_signed();
        if in_call
            && let (Some(current), Some(mailbox)) = (&mut thread.current, &mut thread.mailbox)
            && (result == -i64::from(libc::EINTR) && fails_with_eintr(current.request.call.nr)
                || result == restart::NOHAND && has_time_left(&current.request.call))
        {
            let mut call = current.request.call.clone();
            call.subtract_elapsed(current.posted_at.elapsed());
            if let Ok(layout) = call.lay_out() {
                mailbox.refill(&layout);
                let args = mailbox.staged_args(&layout);
                let site = registers.rip - 2;
                registers = registers.calling(site, u64::from(layout.nr()), &args);
                stopped.set_registers(&registers)?;
                current.layout = layout;
            }
        }
        stopped.resume(0)
    }
}

impl Process {
    /// A recvmmsg that was interrupted after its first message leaves EINTR pending on the socket,
    /// as the error of the next call. Has the deputy read that error, so that the call for the rest
    /// does not return it.
    fn clear_socket_error(&mut self, stopped: Stopped, socket: u64) -> Result<Stopped> {
        self.socket_option(stopped, socket, libc::SO_ERROR).map(|(stopped, _cleared)| stopped)
    }
}

/// Whether an interruption without a signal makes this call fail with EINTR.
pub(crate) fn fails_with_eintr(nr: u32) -> bool {
    let wait = tern_syscall::row(nr).and_then(|row| row.wait);
    wait.is_some_and(|w| matches!(w.interrupted, Interrupted::Eintr | Interrupted::EintrIfSocketTimeout))
}

/// Repairs the registers of a thread at home after a stop that the program must not notice. A call
/// that failed with EINTR only because of that stop, or that only restart_syscall could continue,
/// is made again. Its timeout starts anew, since only the kernel knew how much of it remained.
pub(crate) fn repair_interrupted_call(registers: &mut Registers) {
    if registers.restart_from_start() {
        return;
    }
    let Some(nr) = registers.call() else { return };
    if registers.rax.cast_signed() == -i64::from(libc::EINTR) && fails_with_eintr(nr as u32) {
        // The kernel's restart code for a call that only a handler can interrupt.
        registers.rax = restart::NOHAND.cast_unsigned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_image::process::SIG_IGN;

    #[test]
    fn verdict_follows_the_action() {
        assert_eq!(judge(SIG_DFL, libc::SIGTERM), Verdict::Default);
        assert_eq!(judge(SIG_DFL, libc::SIGCHLD), Verdict::Ignored);
        assert_eq!(judge(SIG_IGN, libc::SIGTERM), Verdict::Ignored);
        assert_eq!(judge(0x4000, libc::SIGCHLD), Verdict::Forward);
    }

    #[test]
    fn only_calls_that_the_shim_interrupted_are_repaired() {
        let waiting = Registers {
            orig_rax: libc::SYS_epoll_wait as u64,
            rax: (-4i64).cast_unsigned(),
            rip: 12,
            ..Registers::default()
        };
        let mut mended = waiting;
        repair_interrupted_call(&mut mended);
        assert_eq!((mended.rip, mended.rax.cast_signed()), (12, restart::NOHAND));
        assert_eq!(mended.orig_rax, libc::SYS_epoll_wait as u64);
        let mut other = Registers { orig_rax: libc::SYS_read as u64, ..waiting };
        repair_interrupted_call(&mut other);
        assert_eq!(other.rip, 12);
    }
}
