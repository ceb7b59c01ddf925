//! Handles the kernel's reports about the guests: ptrace stops, seccomp traps, and exits.

use super::Shim;
use crate::process::Guest;
use crate::process::shared::{Process, State};
use crate::process::thread::Thread;
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_tracee::stop::{self, Stop, Stopped, WaitEvent};

impl Shim {
    pub(super) fn handle_stops(&mut self) {
        if !self.control_socket.has_child_event() {
            return;
        }
        let _drained = self.control_socket.clear_child_event();
        while let Ok(Some((host, change))) = stop::wait(-1, false) {
            let Some((pid, tid)) = self.members.find_thread(host) else {
                self.handle_unknown(host, change);
                continue;
            };
            let Some(Guest { process, threads }) = self.members.get_mut(pid) else { continue };
            match change {
                WaitEvent::Stopped(stopped) => {
                    let done = match threads.get_mut(&tid) {
                        Some(thread) => handle_stop(thread, process, stopped),
                        None => stopped.resume(0),
                    };
                    if let Err(error) = done {
                        self.handle_error(pid, &error.into());
                    }
                }
                WaitEvent::Exited(_) | WaitEvent::Killed(..) => self.handle_exit((pid, tid), host, &change),
            }
        }
    }

    /// Handles the exit of a thread on this node.
    fn handle_exit(&mut self, (pid, tid): (HomePid, HomePid), host: i32, how: &WaitEvent) {
        let Some(guest) = self.members.get_mut(pid) else { return };
        if guest.take_exited(tid) {
            self.members.unregister_thread(tid, host);
            return;
        }
        // If the shim had killed the guest, it would have removed it. The two halves of a process
        // exist together, so the unexpected exit of any thread ends the process.
        tracing::warn!(%pid, %tid, ?how, "a guest ended unexpectedly");
        let was_last = host == guest.process.host_pid;
        // Only two signals end a process without a ptrace stop: SIGKILL, and the SIGSEGV that the
        // kernel forces if there is no stack for a handler.
        let signal = match *how {
            WaitEvent::Killed(libc::SIGSEGV, _) => libc::SIGSEGV,
            _ => libc::SIGKILL,
        };
        self.send_home(pid, &Message::KilledBySignal(signal));
        // Home answers the first report of a core-dumping signal with `Depart`. The second states
        // that this process cannot depart.
        self.send_home(pid, &Message::KilledBySignal(signal));
        // The first thread's exit is reported when there are no others, and frees its pid.
        if was_last { self.remove(pid) } else { self.kill(pid) }
    }

    /// Handles a stop or exit of the helper, or of a process that is not a guest (any more).
    pub(super) fn handle_unknown(&mut self, host: i32, change: WaitEvent) {
        match change {
            WaitEvent::Stopped(stopped) => {
                let _gone = stopped.resume(0);
            }
            _ if self.sandbox.is_helper(host) => {
                tracing::error!("the sandbox helper was killed, so all guests ended");
                for pid in self.members.pids() {
                    self.send_home(pid, &Message::KilledBySignal(libc::SIGKILL));
                    self.remove(pid);
                }
            }
            _ => {}
        }
    }

    pub(super) fn handle_traps(&mut self) {
        if !self.is_trap_pending {
            return;
        }
        for listener in self.listeners() {
            // A limited number, so that messages from home are read in between.
            for _ in 0..64 {
                let trap = match listener.receive() {
                    Ok(Some(trap)) => trap,
                    Ok(None) => break,
                    Err(error) => {
                        tracing::warn!(%error, "a trap could not be received");
                        break;
                    }
                };
                let (pid, tid) = self.members.find_thread(trap.pid).unwrap_or((HomePid(0), HomePid(0)));
                match self.try_act_on(pid, |guest, home| guest.handle_trap(tid, trap, home)) {
                    Ok(Some(true)) => {}
                    Ok(_) => {
                        let _refused = listener.reply_error(trap.id, libc::EPERM);
                        continue;
                    }
                    Err(error) => self.handle_error(pid, &error),
                }
                // A thread with a pending call cannot trap. If all have one, no trap can follow.
                let mut threads = self.members.iter().flat_map(|guest| guest.threads.values());
                if threads.all(|t| t.pending.is_some()) && !listener.has_deferred_call() {
                    break;
                }
            }
        }
    }

    /// Notifies home of guests that are to be ended by a signal.
    pub(super) fn report_fatal_signals(&mut self) {
        let unreported =
            |guest: &&Guest| guest.is_active() && guest.process.stop_reasons.has_unreported_signal();
        let pids: Vec<HomePid> =
            self.members.iter().filter(unreported).map(|guest| guest.process.pid).collect();
        for pid in pids {
            // A guest that departs because of its fatal signal was reported before. This one got
            // its signal after its departure had begun.
            self.cancel_departure(pid, None);
            // Home must have the guest's pending writes before the guest's end becomes visible.
            if self.act_on(pid, Guest::return_delegations) == Some(true) {
                self.act_on(pid, |guest, home| {
                    guest.report_fatal_signal(home);
                    Ok(())
                });
            }
        }
    }

    /// Asks home to fetch guests with a thread that cannot continue here.
    pub(super) fn request_fetches(&mut self) {
        let active = self.members.iter_mut().filter(|guest| guest.is_active());
        let to_report = active.filter_map(|guest| guest.process.stop_reasons.report_need());
        let to_report: Vec<HomePid> = to_report.collect();
        for tid in to_report {
            self.send_home(
                tid,
                &Message::FetchHome("vdso: it was interrupted inside a function of home's vDSO".into()),
            );
        }
    }

    /// Changes the code of guests with several threads for the fast path.
    pub(super) fn change_code(&mut self) {
        let awaits = |guest: &&Guest| {
            matches!(guest.process.state, State::Running) && guest.process.fastpath.awaits_stop()
        };
        let pids: Vec<HomePid> = self.members.iter().filter(awaits).map(|guest| guest.process.pid).collect();
        let nice = self.start.guest_nice.into();
        for pid in pids {
            self.act_on(pid, |guest, _| {
                guest.change_code()?;
                if !guest.process.fastpath.awaits_stop() {
                    guest.set_nice(nice);
                }
                Ok(())
            });
        }
    }

    /// Stops the threads of guests that must stay stopped, each as soon as it can be stopped.
    pub(super) fn continue_quiesce(&mut self) {
        let moves = |guest: &&mut Guest| {
            matches!(guest.process.state, State::Running)
                && guest.process.stop_reasons.must_stay_stopped()
                && !guest.are_all_stopped()
        };
        let mut failed = Vec::new();
        for guest in self.members.iter_mut().filter(moves) {
            if let Err(error) = guest.quiesce() {
                failed.push((guest.process.pid, error));
            }
        }
        for (pid, error) in failed {
            self.handle_error(pid, &error.into());
        }
    }
}

fn handle_stop(thread: &mut Thread, process: &mut Process, stopped: Stopped) -> tern_tracee::Result<()> {
    thread.settle_futex_wait(&stopped)?;
    thread.adopt_native_call(&stopped, process)?;
    if thread.native_call.is_some() {
        thread.settle_native_wait(&stopped)?;
        if stopped.stop == Stop::Interrupt {
            thread.settle_native_transfer(&stopped)?;
        }
    }
    let is_repeated = thread.repeat_broken_transfer(&stopped, process)?;
    if is_repeated && stopped.stop == Stop::Signal(libc::SIGPIPE) {
        process.end_native_call();
        thread.native_call = None;
        return thread.resume_or_hold(stopped, process);
    }
    process.end_native_call();
    if let Stop::Signal(signal) = stopped.stop {
        let delivered = thread.deliver(stopped, signal, process);
        thread.native_call = None;
        return delivered;
    }
    thread.native_call = None;
    if stopped.stop == Stop::Syscall
        && let Some(vfork_wait) = thread.vfork_wait.take()
    {
        stopped.set_registers(&vfork_wait.after)?;
        stopped.set_sigmask(vfork_wait.mask)?;
        return thread.resume_or_hold(stopped, process);
    }
    match stopped.stop {
        _ if thread.vfork_wait.is_some() => stopped.run_to_syscall(),
        Stop::Interrupt => match thread.late_stop(stopped, process)? {
            Some(stopped) => {
                thread.reclaim_at_stop(&stopped, process)?;
                stopped.resume(0)
            }
            None => Ok(()),
        },
        _ => stopped.resume(0),
    }
}
