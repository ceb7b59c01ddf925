//! Handles the wait statuses of traced processes.
//!
//! Every wait status goes through [`Shim::handle_change`], also while one thread is waited for: an
//! exec by one thread, for example, completes only when the exits of all others have been reaped.
//! So code that waits for a thread to stop sets `stop_wanted` and handles whatever is reported, for
//! any thread, until the stop has arrived. Where that may take long the main loop does this
//! (`quiesce.rs`).

use super::quiesce::interrupt_thread;
use crate::process::Process;
use crate::process::state::State;
use crate::process::thread::Thread;
use crate::shim::Shim;
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_migrate::partial::remainder;
use tern_tracee::stop::{self, Stop, Stopped, WaitEvent};
use tern_tracee::vdso::run_out;
use tern_tracee::{Result, procfs};

impl Shim {
    pub(crate) fn handle_stops(&mut self) {
        if self.control_socket.has_child_event() || stop::has_deferred_stop() {
            let _any = self.handle_all_stops();
        }
    }

    /// Handles all wait statuses that are available. Returns whether there were any.
    pub(crate) fn handle_all_stops(&mut self) -> bool {
        let _drained = self.control_socket.clear_child_event();
        let mut any = false;
        while let Ok(Some((host, change))) = stop::wait(-1, false) {
            self.handle_change(HomePid(host), change);
            any = true;
        }
        self.end_orphans();
        any
    }

    pub(crate) fn handle_change(&mut self, tid: HomePid, change: WaitEvent) {
        match change {
            WaitEvent::Stopped(stopped) if self.process_of_thread(tid).is_some() => {
                if let Err(error) = self.handle_stop(tid, stopped) {
                    self.handle_error(tid, &error);
                }
            }
            // A new child or thread. The stop of its parent, which reports it, is still to come.
            WaitEvent::Stopped(stopped) => drop(self.early_stops.insert(tid.0, stopped)),
            WaitEvent::Exited(_) | WaitEvent::Killed(..) => {
                self.early_stops.remove(&tid.0);
                self.finish_fork(tid);
                if self.processes.contains_key(&tid) {
                    // The kernel reports the exit of the first thread after those of all others.
                    self.process_exited(tid);
                } else if let Some(process) = self.process_of_thread(tid) {
                    process.thread_exited(tid);
                    let (pid, all_exited) = (process.pid, process.live_threads().next().is_none());
                    // The exit of a first thread that was a zombie when seized is not reported.
                    if all_exited && !procfs::is_alive(pid.0) {
                        self.process_exited(pid);
                    }
                }
            }
        }
    }

    fn handle_stop(&mut self, tid: HomePid, stopped: Stopped) -> Result<()> {
        let Some(process) = self.process_of_thread(tid) else { return Ok(()) };
        let (pid, away) = (process.pid, process.is_away());
        let Some(thread) = process.threads.get(&tid) else { return Ok(()) };
        let (wanted, drains) = (thread.stop_wanted, thread.draining.is_some());
        // At other stops, a child or a program may have inherited the mask already.
        if away && matches!(stopped.stop, Stop::Interrupt | Stop::Group(_) | Stop::Signal(_)) {
            process.thread(tid)?.release_at_stop(&stopped)?;
        }
        match (stopped.stop, away || drains) {
            (Stop::Exec, _) => return self.handle_exec(pid, stopped),
            // A group stop is as good as any other.
            (Stop::Group(_), _) if wanted => {
                if !away && !drains {
                    // A call that fails with EINTR does so natively too.
                    let before = stopped.registers()?;
                    let mut registers = before;
                    process.confirm_sleep(tid, &mut registers)?;
                    if registers.restart_from_start() || registers != before {
                        stopped.set_registers(&registers)?;
                    }
                }
                return process.set_stopped(stopped);
            }
            (Stop::Group(_), _) => {
                if away && !std::mem::replace(&mut process.job_stopped, true) {
                    self.send(pid, &Message::Stop(true));
                }
                return stopped.listen();
            }
            (Stop::Interrupt, _) => {
                if away {
                    self.handle_continue(pid);
                }
                let Some(process) = self.processes.get_mut(&pid) else { return Ok(()) };
                if !away && !drains {
                    repair_thread(process, tid, &stopped, wanted)?;
                }
                if wanted {
                    let stopped = match &process.state {
                        State::Outgoing(outgoing) => run_out(stopped, &process.memory, &outgoing.vdso)?,
                        _ => stopped,
                    };
                    return process.set_stopped(stopped);
                }
                if away || drains {
                    // A superfluous interrupt: the call that it cut short is resumed.
                    return process.resume_unnoticed(stopped);
                }
                stopped.resume(0)?;
            }
            (Stop::Clone, false) => self.handle_new_thread(pid, &stopped).and_then(|()| stopped.resume(0))?,
            (Stop::Fork | Stop::Vfork | Stop::Clone, true) if away => self.handle_fork(tid, stopped)?,
            (Stop::Signal(signal), true) if away => {
                let message = process.handle_signal(stopped, signal)?;
                message.into_iter().for_each(|m| self.send(tid, &m));
            }
            (Stop::Signal(signal), true) => self.signal_draining(tid, stopped, signal)?,
            (Stop::Signal(signal), false) => {
                // Untraced, an ignored signal would not have interrupted the call.
                if is_ignored(tid, signal) {
                    repair_thread(process, tid, &stopped, false)?;
                }
                stopped.resume(signal)?;
            }
            _ => stopped.resume(0)?,
        }
        // At this stop the kernel has dropped the pending interrupt request, so it is made again.
        let runs = |process: &mut Process| process.threads.get(&tid).is_some_and(|t| t.stopped.is_none());
        if wanted && self.process_of_thread(tid).is_some_and(runs) {
            interrupt_thread(tid)?;
        }
        Ok(())
    }

    /// Handles the clone event of a process at home: a new thread or, with unusual clone flags, a
    /// child, which is not traced.
    fn handle_new_thread(&mut self, pid: HomePid, stopped: &Stopped) -> Result<()> {
        let tid = HomePid(stopped.message()? as i32);
        if self.process_of_thread(tid).is_some() {
            // It was found when its process was seized.
            return Ok(());
        }
        let newborn = self.early_stops.remove(&tid.0).map_or_else(|| stop::wait_stop(tid.0), Ok);
        let (Ok(newborn), Ok(mut thread)) = (newborn, Thread::new_resident(tid)) else { return Ok(()) };
        let Some(process) = self.processes.get_mut(&pid) else { return newborn.detach(0) };
        if !procfs::threads(pid.0)?.contains(&tid.0) {
            return newborn.detach(0);
        }
        // Created while the others are being quiesced: it stays stopped.
        if process.threads.values().any(|other| other.stop_wanted) {
            (thread.stop_wanted, thread.stopped) = (true, Some(newborn));
        } else {
            newborn.resume(0)?;
        }
        process.threads.insert(tid, thread);
        Ok(())
    }

    /// SIGCONT after a group stop shows up as an unrequested interrupt stop.
    pub(crate) fn handle_continue(&mut self, pid: HomePid) {
        if self.processes.get_mut(&pid).is_some_and(|process| std::mem::take(&mut process.job_stopped)) {
            self.send(pid, &Message::Stop(false));
        }
    }
}

/// Whether a process at home ignores this signal, so that the kernel reports it to the tracer only.
fn is_ignored(tid: HomePid, signal: i32) -> bool {
    let among = |set: u64| set >> (signal - 1) & 1 == 1;
    procfs::status(tid.0).is_ok_and(|status| {
        among(status.ignored) || !among(status.caught) && tern_image::process::is_ignored_by_default(signal)
    })
}

/// Repairs the effects of the shim's interruption on a thread that runs at home. If it is to stay
/// stopped, the finished part of a transfer is recorded.
pub(crate) fn repair_thread(
    process: &mut Process,
    tid: HomePid,
    stopped: &Stopped,
    stays_stopped: bool,
) -> Result<()> {
    let mut registers = stopped.registers()?;
    let before = registers;
    process.confirm_sleep(tid, &mut registers)?;
    let thread = process.thread(tid)?;
    crate::signals::verdict::repair_interrupted_call(&mut registers);
    if stays_stopped && let Some(cut) = remainder(&mut registers, thread.partial) {
        thread.partial = Some(cut);
    }
    if !stays_stopped {
        thread.continue_sleep(&mut registers);
    }
    if registers != before { stopped.set_registers(&registers) } else { Ok(()) }
}
