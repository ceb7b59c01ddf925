//! Signals from home, and the guest's own faults.
//!
//! A signal arrives at home, where the pid is. Home's kernel decides its effect, and only a signal
//! for a handler is sent here. It is raised here by an ordinary signal of the same number. At the
//! signal-delivery-stop its siginfo is replaced by the original; the guest's kernel does the rest.
//! A signal that appears here but was not sent from home is a fault of the guest, or was sent by a
//! process of this node. A fault runs the guest's handler here; if there is no handler, home ends
//! the process. A signal from a process of this node is dropped.

use crate::process::Guest;
use crate::process::outbox::Outbox;
use crate::process::shared::Process;
use crate::process::thread::Thread;
use std::time::{Duration, Instant};
use tern_image::process::{SIG_DFL, SIG_IGN, is_ignored_by_default};
use tern_migrate::message::Message;
use tern_tracee::pidfd::signal_thread;
use tern_tracee::procfs::syscall_stack_pointer;
use tern_tracee::siginfo::{Siginfo, code, is_expiry, signal_of};
use tern_tracee::stop::{self, Stop, Stopped};
use tern_tracee::{Error, Result};

/// A report that follows a call is no use after this time: home holds no signal for longer.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// A call to which a handler has returned. A report to home follows it.
#[derive(Debug)]
pub(crate) struct AwaitedCall {
    /// The signals of timers to report as handled.
    handled: u64,
    /// The number of signals that the thread had received when the handler returned.
    signals: u64,
    /// The stack pointer of the call.
    stack: u64,
    /// When the handler returned.
    since: Instant,
}

/// Faults that a program's own instructions raise.
fn is_fault(signal: i32) -> bool {
    matches!(
        signal,
        libc::SIGSEGV | libc::SIGBUS | libc::SIGFPE | libc::SIGILL | libc::SIGTRAP | libc::SIGSYS
    )
}

/// Signals whose default action does not end a program. Home's kernel has already applied that
/// action.
fn is_nonfatal(signal: i32) -> bool {
    let stops = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU, libc::SIGSTOP];
    stops.contains(&signal) || is_ignored_by_default(signal)
}

impl Guest {
    /// Reports the guest's CPU time, and then the signal that ends the guest.
    pub(crate) fn report_fatal_signal(&mut self, home: &mut Outbox) {
        if let Some((thread, signal)) = self.process.stop_reasons.report_signal() {
            home.send(self.process.pid, self.process.usage.report());
            home.send(thread, Message::KilledBySignal(signal));
        }
    }
}

impl Thread {
    /// Accepts a signal from home, which this epoch is then responsible for delivering.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn accept_signal(&mut self, count: u64, info: Siginfo) -> Result<()> {
        // Sent again after a reconnection.
        if count <= self.sync.signals || self.is_exiting {
            return Ok(());
        }
        self.sync.signals = count;
        if !(1..=64).contains(&signal_of(&info)) {
            return Ok(());
        }
        self.note_expiry(&info);
        // A running handler blocks its signal here, and not at home.
        let blocked_by_handler =
            || tern_tracee::procfs::status(self.host_tid).map_or(0, |s| s.blocked & !self.deputy_sigmask);
        let handler_is_running = |signal: i32| blocked_by_handler() >> (signal - 1) & 1 == 1;
        let Some(signal) = self.raised.add(info, handler_is_running) else { return Ok(()) };
        if self.sync.call_pending {
            // A handler that ran before the call is sent again would replace that call.
            self.raised.defer(signal);
            return Ok(());
        }
        self.raise(signal)
    }

    fn note_expiry(&mut self, info: &Siginfo) {
        if is_expiry(info) {
            self.expiries |= 1 << ((signal_of(info) - 1) & 63);
        }
    }

    /// A handler is about to return, to code that runs under this mask. Reports to home the signals
    /// of timers that the thread can take again: home may have held further ones until now. If that
    /// code begins with a call to be sent home, such as the one that the signal has interrupted,
    /// `call_stack` is its stack pointer, and the report follows the call. Otherwise the next signal
    /// would cross the call on its way, each time, and home would never make the call.
    pub(crate) fn handler_returns(&mut self, mask: u64, call_stack: Option<u64>, home: &mut Outbox) {
        let before = self.expiries_until_call.take().map_or(0, |awaited| awaited.handled);
        let handled = self.expiries & !mask & !self.raised.numbers();
        self.expiries &= !handled;
        // Those that were to be reported before have been handled, unless they have expired again.
        let handled = handled | before & !self.expiries;
        let signals = self.sync.signals;
        let awaited = |stack| AwaitedCall { handled, signals, stack, since: Instant::now() };
        self.expiries_until_call = call_stack.map(awaited);
        if call_stack.is_none() {
            self.report_handled(handled, signals, home);
        }
    }

    /// Whether the call that the thread is making is the one to which a handler has returned. A
    /// further handler may run before that, and make calls itself. If it is left by a jump, the call
    /// is not made.
    pub(crate) fn makes_awaited_call(&mut self) -> bool {
        self.expiries_until_call.take_if(|awaited| awaited.since.elapsed() > REPORT_TIMEOUT);
        let is_at = |stack| syscall_stack_pointer(self.host_tid).is_ok_and(|at| at == stack);
        self.expiries_until_call.as_ref().is_some_and(|awaited| is_at(awaited.stack))
    }

    /// The call to which a handler has returned was handled. If it waits in a queue, or if a signal
    /// must be taken first, it was not made yet.
    pub(crate) fn report_after_call(&mut self, process: &Process, home: &mut Outbox) {
        let is_made = self.pending.is_some()
            || !process.queued_traps.has_trap_of(self.host_tid) && !self.has_deliverable(None);
        if is_made && let Some(awaited) = self.expiries_until_call.take() {
            self.report_handled(awaited.handled, awaited.signals, home);
        }
    }

    /// Reports that these are handled, among this number of signals.
    fn report_handled(&self, handled: u64, signals: u64, home: &mut Outbox) {
        if handled != 0 {
            home.send(self.tid, Message::SignalAck(signals, handled));
        }
    }

    /// Raises a signal here. If the user has too many pending signals on this node, the signal is
    /// raised later.
    fn raise(&mut self, signal: i32) -> Result<()> {
        match signal_thread(self.host_tgid, self.host_tid, signal) {
            Err(Error::Refused { source, .. }) if source.raw_os_error() == Some(libc::EAGAIN) => {
                self.raised.record_refused(signal);
                Ok(())
            }
            done => done,
        }
    }

    /// Raises again the signals that this kernel has refused before.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn raise_again(&mut self) -> Result<()> {
        let refused = self.raised.take_refused();
        refused.into_iter().try_for_each(|signal| self.raise(signal))
    }

    /// Raises deferred signals, after the pending call was sent again.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn raise_deferred(&mut self) -> Result<()> {
        let deferred = self.raised.take_deferred();
        deferred.into_iter().try_for_each(|signal| self.raise(signal))
    }

    /// Raises signals that an earlier epoch of the process has accepted and not delivered.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn raise_carried(&mut self) -> Result<()> {
        for info in std::mem::take(&mut self.sync.pending_signals) {
            if let Ok(info) = Siginfo::try_from(info) {
                self.note_expiry(&info);
                self.raised.add_carried(info);
            }
        }
        if self.sync.call_pending { Ok(()) } else { self.raise_deferred() }
    }

    /// Whether a signal from home is undelivered.
    #[must_use]
    pub(crate) fn has_undelivered(&self) -> bool {
        self.raised.has_any()
    }

    /// Whether an undelivered signal from home is admitted by `mask`, or by the thread's own mask
    /// if `mask` is none. A signal that a running handler blocks is no reason to fail a call: home
    /// does not see that block, and has interrupted the call without need.
    #[must_use]
    pub(crate) fn has_deliverable(&self, mask: Option<u64>) -> bool {
        if !self.has_undelivered() {
            return false;
        }
        let own = || tern_tracee::procfs::status(self.host_tid).map_or(0, |s| s.blocked);
        let blocked = mask.unwrap_or_else(own);
        self.raised.has_admitted_by(blocked)
    }

    /// Whether a signal must be delivered before the call that the thread has just made. It was
    /// acknowledged to home, or will be with this call, so home would not interrupt the call for
    /// it. A signal that arrives after the call was received here does not interrupt the thread,
    /// which waits for the reply (`SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV`).
    #[must_use]
    pub(crate) fn must_take_signal_first(&self) -> bool {
        !self.sync.call_pending && self.has_deliverable(None)
    }

    /// Resumes from a signal-delivery-stop. If the signal ends the program, the thread stays
    /// stopped.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn deliver(&mut self, stopped: Stopped, signal: i32, process: &mut Process) -> Result<()> {
        let copied = self.leave_fastpath(&stopped, process)?;
        if copied && is_fault(signal) && code(&stopped.siginfo()?) > 0 {
            // The program's own `syscall` makes the call now, and fails on the invalid buffer.
            return self.resume_or_hold(stopped, process);
        }
        let waits = self.raised.has(signal);
        if waits && process.is_in_vdso(&stopped)? {
            let stopped = process.move_out_of_vdso(stopped)?;
            self.raise(signal)?;
            return stopped.resume(0);
        }
        if let Some(foreign_vdso) = &process.foreign_vdso
            && !waits
            && is_fault(signal)
            && foreign_vdso.in_copy(stopped.registers()?.rip)
            && code(&stopped.siginfo()?) > 0
        {
            // The instruction reads the clock's data pages. They exist at home, where the
            // instruction is executed again.
            process.stop_reasons.set_needs_home(self.tid);
            self.stopped = Some(stopped);
            return Ok(());
        }
        let mut default_action = [SIG_DFL; 4];
        let sigaction = process.action(signal).unwrap_or(&mut default_action);
        let handler = sigaction[0];
        if let Some(info) = self.raised.take(signal) {
            // This kernel keeps one pending signal of each number. It has just dequeued this
            // signal, so the next one is raised now.
            if self.raised.has(signal) {
                self.raise(signal)?;
            }
            match handler {
                // The program has removed its handler since home sent the signal.
                SIG_IGN => return self.resume_without_handler(stopped),
                SIG_DFL if is_nonfatal(signal) => return self.resume_without_handler(stopped),
                SIG_DFL => {
                    // If the process goes home to die there, this signal goes with it.
                    self.raised.put_back(signal, info);
                    process.stop_reasons.set_fatal_signal(signal, self.tid);
                    self.stopped = Some(stopped);
                    return Ok(());
                }
                _ => {}
            }
            if sigaction[1] & libc::SA_RESETHAND as u32 as u64 != 0 {
                sigaction[0] = SIG_DFL;
            }
            stopped.set_siginfo(&info)?;
            self.fix_unreceived_restart(&stopped)?;
            self.sync.restart_code = None;
            return match self.mask_after_handler.take() {
                Some(mask) => self.enter_handler(stopped, signal, mask, process),
                None => stopped.resume(signal),
            };
        }
        if !is_fault(signal) || code(&stopped.siginfo()?) <= 0 {
            return stopped.resume(0);
        }
        let blocked = stopped.sigmask()? >> (signal - 1) & 1 == 1;
        if handler == SIG_DFL || handler == SIG_IGN || blocked {
            // It stays stopped until home, notified by the main loop, has ended its deputy.
            process.stop_reasons.set_fatal_signal(signal, self.tid);
            self.stopped = Some(stopped);
            return Ok(());
        }
        if sigaction[1] & libc::SA_RESETHAND as u32 as u64 != 0 {
            sigaction[0] = SIG_DFL;
        }
        stopped.resume(signal)
    }

    /// Resumes without running a handler. The interrupted call is then restarted. Until then the
    /// program's own mask is in force, unless another signal is to be delivered first.
    fn resume_without_handler(&mut self, stopped: Stopped) -> Result<()> {
        if !self.has_deliverable(None)
            && let Some(mask) = self.mask_after_handler.take()
        {
            stopped.set_sigmask(mask)?;
        }
        stopped.resume(0)
    }

    /// Starts the handler of a signal that has interrupted a call which has a signal mask of its
    /// own. Makes sure that the program's own mask is restored when the handler returns. Without
    /// this, the handler's frame would contain the call's mask: the call was made at home, so this
    /// kernel has no other mask to restore.
    fn enter_handler(&self, stopped: Stopped, signal: i32, mask: u64, process: &Process) -> Result<()> {
        // struct rt_sigframe: return address 8, then ucontext: flags 8, link 8, stack 24, registers
        // 256, mask.
        const MASK_IN_FRAME: u64 = 8 + 8 + 8 + 24 + 256;
        let before = stopped.registers()?.rip;
        stopped.step(signal)?;
        loop {
            let stopped = stop::wait_stop(self.host_tid)?;
            match stopped.stop {
                Stop::Signal(libc::SIGTRAP) => {
                    let now = stopped.registers()?;
                    if now.rip != before {
                        process.memory.write(now.rsp + MASK_IN_FRAME, &mask.to_le_bytes())?;
                    }
                    return stopped.resume(0);
                }
                Stop::Interrupt => stopped.step(0)?,
                stop => {
                    let what = format!("{stop:?} at the start of a handler");
                    return Err(Error::Inconsistent { what, pid: self.host_tid });
                }
            }
        }
    }
}
