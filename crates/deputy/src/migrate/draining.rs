//! Draining threads: threads of a process at home whose deputy still makes their last call, or a wait
//! in which the process is to leave ([`super::home_wait`]).
//!
//! The rest of such a call, for example how long a sleep still lasts, is known only to the kernel,
//! in the state of the deputy thread. So the thread keeps its mailbox, and the process its reserved
//! range, until the call ends. Everything else of the process is home.
//!
//! ```text
//!  call ends ─────────▶ the thread is restored with the result
//!  handled signal ────▶ restored with the call's restart code; it gets the signal natively
//!  process leaves ────▶ away, the call is pending under its number, as if it had never come home
//! ```

use super::restore::RestoredThread;
use crate::migrate::syscall_restart::{deliver_piece, deliver_result};
use crate::process::Process;
use crate::process::state::State;
use crate::process::thread::Draining;
use crate::shim::Shim;
use tern_ids::HomePid;
use tern_image::process::{SIG_DFL, SIG_IGN};
use tern_migrate::message::CallRequest;
use tern_tracee::registers::Registers;
use tern_tracee::stop::Stopped;
use tern_tracee::{Error, Memory, Result, procfs};

/// The outcome for a draining thread.
#[derive(Default)]
enum DrainOutcome {
    /// It is home.
    Done,
    /// It is still draining; this call is to be made next, if any.
    Pending(Option<Box<CallRequest>>),
    /// It is gone.
    #[default]
    Gone,
}

impl Process {
    /// Whether the deputies of some of its threads still make calls, although it is home.
    pub(crate) fn has_draining_threads(&self) -> bool {
        self.threads.values().any(|thread| thread.draining.is_some())
    }

    /// Restores a thread that was draining, with these registers.
    fn finish_drained(&mut self, stopped: Stopped, draining: &Draining, registers: &Registers) -> Result<()> {
        // A process that is about to leave keeps its reserved range.
        let last = !self.has_draining_threads() && !matches!(self.state, State::Outgoing(_));
        let injection = self.injection(stopped)?.0;
        let (image, pending_signals) = (&draining.image, draining.pending_signals.clone());
        self.finish_threads(
            vec![RestoredThread { injection, image, registers: *registers, pending_signals }],
            last,
        )
    }

    /// If the call of a draining thread has finished, restores the thread, or returns the request
    /// for the rest of its transfer.
    ///
    /// # Errors
    /// If it is gone.
    fn drained_call_ended(&mut self, stopped: Stopped) -> Result<DrainOutcome> {
        let memory = Memory::open(stopped.pid())?;
        let thread = self.thread(HomePid(stopped.pid()))?;
        let ended = thread.mailbox.as_ref().is_some_and(crate::process::mailbox::Mailbox::is_done);
        let current = if ended { thread.current.take() } else { None };
        let (Some(mailbox), Some(current)) = (&mut thread.mailbox, current) else {
            return self.resume_unnoticed(stopped).map(|()| DrainOutcome::Pending(None));
        };
        let outcome = mailbox.collect(&current.layout, current.partial);
        let inconsistent = || Error::Inconsistent { what: "it is not draining".into(), pid: stopped.pid() };
        let mut draining = thread.draining.take().ok_or_else(inconsistent)?;
        let mut registers = draining.image.registers;
        let (number, signals) = (current.request.number, current.request.signals);
        if let Some(partial) = deliver_piece(&memory, &mut registers, &outcome, draining.partial)? {
            (draining.image.registers, draining.partial) = (registers, Some(partial));
            thread.draining = Some(draining);
            let rest = self.remainder_request(&registers, number, signals)?;
            return self.resume_unnoticed(stopped).map(|()| DrainOutcome::Pending(Some(Box::new(rest))));
        }
        // From here on signals are delivered natively, since the thread is not draining any more.
        self.finish_drained(stopped, &draining, &registers).map(|()| DrainOutcome::Done)
    }

    /// A draining thread gets a signal that the program handles. It is restored with the kernel's
    /// restart code for the interrupted call, and then gets the signal natively.
    fn interrupt_drained(&mut self, stopped: Stopped) -> Result<()> {
        let now = stopped.registers()?;
        let info = stopped.siginfo()?;
        let in_call = self.is_in_call(&now);
        let memory = Memory::open(stopped.pid())?;
        let thread = self.thread(HomePid(stopped.pid()))?;
        let inconsistent = || Error::Inconsistent { what: "it is not draining".into(), pid: stopped.pid() };
        let mut draining = thread.draining.take().ok_or_else(inconsistent)?;
        let mut registers = draining.image.registers;
        if in_call && let (Some(mailbox), Some(current)) = (&mut thread.mailbox, thread.current.take()) {
            // Output of the call so far, such as the remaining time of a sleep, is delivered.
            let outcome =
                mailbox.collect_interrupted(&current.layout, current.partial, now.rax.cast_signed());
            deliver_result(&memory, &mut registers, &outcome, draining.partial)?;
        }
        draining.pending_signals.push(info);
        self.finish_drained(stopped, &draining, &registers)
    }
}

impl Shim {
    /// Detaches from a process that is home, and has the deputies of its draining threads make
    /// these calls.
    pub(super) fn detach_with_remainders(&mut self, pid: HomePid, remainders: Vec<(HomePid, CallRequest)>) {
        self.detach(pid);
        for (tid, request) in remainders {
            self.post_remainder(tid, request);
        }
    }

    /// Has the deputy of a draining thread make the call for the rest of its transfer.
    pub(crate) fn post_remainder(&mut self, tid: HomePid, request: CallRequest) {
        match self.post(tid, request, false) {
            Ok(true) => self.finish_draining(tid),
            Ok(false) => {}
            Err(errno) => {
                let what = format!("the rest of its transfer cannot be made here: error {errno}");
                self.handle_error(tid, &Error::Inconsistent { what, pid: tid.0 });
            }
        }
    }

    /// The call of a draining thread has finished.
    pub(crate) fn finish_draining(&mut self, tid: HomePid) {
        let Some(process) = self.process_of_thread(tid) else { return };
        // The process is stopped for its departure. The result is delivered at the destination, or
        // here if the move is cancelled.
        if matches!(process.state, State::Outgoing(_)) && process.is_stopped() {
            return;
        }
        let pid = process.pid;
        match self.with_deputy(tid, Process::drained_call_ended) {
            Ok(DrainOutcome::Done) => self.thread_drained(pid, tid),
            Ok(DrainOutcome::Pending(None) | DrainOutcome::Gone) => {}
            Ok(DrainOutcome::Pending(Some(rest))) => self.post_remainder(tid, *rest),
            Err(error) => self.handle_error(tid, &error),
        }
    }

    /// A draining thread is stopped for a signal.
    pub(crate) fn signal_draining(&mut self, tid: HomePid, stopped: Stopped, signal: i32) -> Result<()> {
        let Some(process) = self.process_of_thread(tid) else { return stopped.resume(signal) };
        // The program's other threads, which are home, may have changed the action since.
        let status = procfs::status(tid.0)?;
        let of = |set: u64| set >> (signal - 1) & 1 == 1;
        let action = if of(status.ignored) {
            SIG_IGN
        } else if of(status.caught) {
            SIG_IGN + 1
        } else {
            SIG_DFL
        };
        match crate::signals::verdict::judge(action, signal) {
            crate::signals::verdict::Verdict::Ignored => process.resume_unnoticed(stopped),
            crate::signals::verdict::Verdict::Default => stopped.resume(signal),
            crate::signals::verdict::Verdict::Forward => {
                process.interrupt_drained(stopped)?;
                let pid = process.pid;
                self.thread_drained(pid, tid);
                Ok(())
            }
        }
    }

    /// Handles a thread that was restored after its last call and is stopped. If its process is
    /// about to leave, the thread stays traced.
    fn thread_drained(&mut self, pid: HomePid, tid: HomePid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        if process.task.is_none() {
            return self.detach(pid);
        }
        if matches!(process.state, State::Draining) && !process.has_draining_threads() {
            process.state = State::Resident;
        }
        if let Some(thread) = process.threads.get_mut(&tid).filter(|thread| !thread.stop_wanted)
            && let Some(Err(error)) = thread.stopped.take().map(|stopped| stopped.resume(0))
        {
            self.handle_error(tid, &error);
        }
    }
}
