//! Quiescing guests, and resuming them.
//!
//! A process is quiesced when all its threads are ptrace-stopped: to depart, for job control, or to
//! change its code. `StopReasons::set_quiescing` requests
//! that, and the main loop carries it out: each thread is stopped as soon as it can be
//! ([`Thread::can_stop`]), and then waits for the others. Meanwhile
//! * the trap of a stopped thread was answered such that the kernel restarts the call, and a result
//!   that arrives for it is dropped, because no call is pending.
//! * a call that a running thread makes is not sent home. Its trap is answered in the same way and
//!   the thread stops, so a program cannot delay the stop with one call after another.
//! * a new thread stops before its first instruction, and the thread that created it stops too.
//! * a thread that ends is no longer waited for.
//! * a thread that waits for a page of a remote mapping (`remote_map`) stops when it has the page,
//!   which may be only after the link to home is back.
//! * a signal for a stopped thread is raised in it, and is delivered when the thread resumes, here
//!   or elsewhere.

use crate::process::Guest;
use crate::process::shared::{Process, State};
use crate::process::thread::Thread;
use std::time::{Duration, Instant};
use tern_tracee::Result;
use tern_tracee::listener::Notification;
use tern_tracee::registers::restart;
use tern_tracee::stop::{self, Stop, Stopped};

/// How long to wait for a thread in an uninterruptible sleep. Such a thread waits for data from
/// another node.
const SLEEPER_TIMEOUT: Duration = Duration::from_millis(20);

/// The nice value of a guest that is being quiesced: that of its shim.
const URGENT_NICE: i32 = -10;

impl Guest {
    /// Stops those threads of the guest that can be stopped, and answers their pending traps such
    /// that the calls are restarted on resume. Returns whether all threads are stopped now; the
    /// caller repeats the call until they are. Signals that arrive first are delivered.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn quiesce(&mut self) -> Result<bool> {
        let Self { process, threads } = self;
        process.stop_reasons.set_quiescing(true);
        let ready = |thread: &&mut Thread| thread.stopped.is_none() && thread.can_stop(process);
        let mut to_stop: Vec<&mut Thread> = threads.values_mut().filter(ready).collect();
        // All are interrupted before the first is waited for, so that computing threads do not
        // delay the others.
        for thread in &mut to_stop {
            thread.request_stop(process)?;
        }
        let until = Instant::now() + SLEEPER_TIMEOUT;
        for thread in to_stop {
            thread.await_stop(process, until)?;
        }
        Ok(self.are_all_stopped())
    }

    /// Whether all its threads are stopped.
    #[must_use]
    pub(crate) fn are_all_stopped(&self) -> bool {
        self.threads.values().all(|thread| thread.stopped.is_some())
    }

    /// Resumes the stopped threads, unless the guest has another reason to stay stopped.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn resume(&mut self) -> Result<()> {
        if self.process.stop_reasons.must_stay_stopped() {
            return Ok(());
        }
        self.process.stop_reasons.set_quiescing(false);
        for thread in self.threads.values_mut() {
            if let Some(stopped) = thread.stopped.take() {
                thread.note_outside(&self.process);
                stopped.resume(0)?;
            }
        }
        Ok(())
    }

    /// Ends a departure that did not take place: the guest runs here, unless it has another reason
    /// to stay stopped.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn continue_here(&mut self) -> Result<()> {
        self.process.state = State::Running;
        self.process.files.allow_delegations();
        // Home may have sent invalidations to a later epoch meanwhile.
        self.process.names.clear();
        self.process.stop_reasons.report_again();
        self.resume()
    }

    /// Sets the nice value of all its threads.
    pub(crate) fn set_nice(&self, nice: i32) {
        self.threads.values().for_each(|thread| thread.set_nice(nice));
    }
}

impl Thread {
    /// Stops this thread only.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn stop(&mut self, process: &mut Process) -> Result<()> {
        if self.stopped.is_some() {
            return Ok(());
        }
        self.request_stop(process)?;
        self.await_stop(process, Instant::now() + SLEEPER_TIMEOUT)
    }

    /// Stops the thread in a call that it has just made. The call is not sent home, and is
    /// restarted later.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn stop_at_call(&mut self, trap: &Notification, process: &mut Process) -> Result<()> {
        self.set_nice(URGENT_NICE);
        stop::interrupt(self.host_tid)?;
        self.reply(trap.id, restart::NOINTR)?;
        self.await_stop(process, Instant::now() + SLEEPER_TIMEOUT)
    }

    /// Stops the thread inside the trapped call `id`, which the caller then completes in the
    /// thread's place. Returns none if a signal that ends the program came first; the thread then
    /// stays stopped at that signal.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn stop_in_call(&mut self, id: u64, process: &mut Process) -> Result<Option<Stopped>> {
        stop::interrupt(self.host_tid)?;
        self.reply(id, restart::NOINTR)?;
        self.wait_for_stop(process, None)
    }

    fn request_stop(&mut self, process: &mut Process) -> Result<()> {
        // It needs a CPU to reach the stop, and the migration waits for it.
        self.set_nice(URGENT_NICE);
        stop::interrupt(self.host_tid)?;
        if let Some(pending) = self.pending.take() {
            // The call is restarted even after a handler: the handler's signal did not interrupt
            // it.
            self.reply(pending.trap.id, restart::NOINTR)?;
            self.sync.call_pending |= pending.request.is_some();
        }
        // A trap of this thread that was received while the shim waited for another thread would
        // keep this thread from stopping.
        for trap in [
            self.listener.take_deferred_call(self.host_tid),
            process.queued_traps.take_trap_of(self.host_tid),
        ]
        .into_iter()
        .flatten()
        {
            self.reply(trap.id, restart::NOINTR)?;
        }
        Ok(())
    }

    fn await_stop(&mut self, process: &mut Process, until: Instant) -> Result<()> {
        // A sleeping thread stops when it wakes ([`late_stop`](Self::late_stop)).
        if let Some(stopped) = self.wait_for_stop(process, Some(until))? {
            self.stopped = Some(stopped);
        }
        Ok(())
    }

    fn wait_for_stop(&mut self, process: &mut Process, until: Option<Instant>) -> Result<Option<Stopped>> {
        loop {
            let stopped = match until {
                None => stop::wait_stop(self.host_tid)?,
                Some(until) => match stop::wait_stop_unless_blocked(self.host_tid, until)? {
                    Some(stopped) => stopped,
                    None => return Ok(None),
                },
            };
            self.settle_futex_wait(&stopped)?;
            match stopped.stop {
                Stop::Interrupt => return self.settle_interrupted(stopped, process).map(Some),
                Stop::Signal(signal) => {
                    self.adopt_native_call(&stopped, process)?;
                    self.settle_native_wait(&stopped)?;
                    self.repeat_broken_transfer(&stopped, process)?;
                    self.deliver(stopped, signal, process)?;
                    if self.stopped.is_some() {
                        return Ok(None);
                    }
                }
                _ => stopped.resume(0)?,
            }
            stop::interrupt(self.host_tid)?;
        }
    }

    /// Prepares a thread that has stopped as requested: its interrupted work is completed, or is
    /// set up to start again.
    fn settle_interrupted(&mut self, stopped: Stopped, process: &mut Process) -> Result<Stopped> {
        self.adopt_native_call(&stopped, process)?;
        self.leave_fastpath(&stopped, process)?;
        if self.native_call.is_some() {
            if !self.repeat_broken_transfer(&stopped, process)? {
                self.settle_native_wait(&stopped)?;
                self.settle_native_transfer(&stopped)?;
            }
            self.native_call = None;
        } else {
            self.fix_unreceived_restart(&stopped)?;
        }
        // A call that only this kernel could continue (restart_syscall) is restarted from the beginning,
        // unless it is a wait on a futex whose end is known.
        let mut registers = stopped.registers()?;
        if registers.restart_from_start() {
            stopped.set_registers(&registers)?;
        }
        process.move_out_of_vdso(stopped)
    }

    /// Handles a requested stop that arrives after the wait for it timed out. If the process is
    /// being quiesced, the thread stays stopped: a thread that sleeps again and again could not be
    /// stopped in another way. In any other case the stop is returned.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn late_stop(&mut self, stopped: Stopped, process: &mut Process) -> Result<Option<Stopped>> {
        if process.stop_reasons.is_quiescing()
            && self.stopped.is_none()
            && self.pending.is_none()
            && self.can_stop(process)
        {
            self.stopped = Some(self.settle_interrupted(stopped, process)?);
            return Ok(None);
        }
        Ok(Some(stopped))
    }
}
