//! Work on processes at home that begins when all their threads have stopped.
//!
//! A thread in an uninterruptible sleep stops only when it wakes. The main loop does not wait for
//! it, but serves the family and tries again. If the sleep lasts, a move begins again, and is
//! refused in the end; a freeze is refused without another attempt.

use super::quiesce::{Quiesced, is_uninterruptible};
use crate::migrate::arrival::MAX_BLOCKED;
use crate::process::Process;
use crate::process::waits::WhenStopped;
use crate::shim::{RETRY_TIMEOUT, Shim};
use std::time::Instant;
use tern_control::control_socket::PendingRequest;
use tern_control::shim::ShimReply;
use tern_control::{Refusal, RefusalKind};
use tern_ids::HomePid;
use tern_migrate::departure_failure::Busy;

impl Shim {
    /// Lets a process that stays at home run on, untraced.
    pub(crate) fn release(&mut self, pid: HomePid) {
        self.when_stopped(pid, WhenStopped::Release);
    }

    /// Does `then` as soon as all threads of a process at home have stopped.
    pub(crate) fn when_stopped(&mut self, pid: HomePid, then: WhenStopped) {
        let Some(process) = self.processes.get_mut(&pid) else { return then.refuse_gone(pid) };
        process.waits.for_stop(then, Instant::now());
        self.continue_stop(pid);
    }

    /// Continues the work that waits for stops of processes at home.
    pub(crate) fn continue_stops(&mut self) {
        let waits = |process: &&Process| process.waits.is_for_stop();
        let waiting: Vec<HomePid> = self.processes.values().filter(waits).map(|one| one.pid).collect();
        waiting.into_iter().for_each(|pid| self.continue_stop(pid));
    }

    fn continue_stop(&mut self, pid: HomePid) {
        let Some(process) = self.processes.get(&pid) else { return };
        let Some((then, since)) = process.waits.when_stopped() else { return };
        // A process that is only to be released runs on while a thread cannot be stopped, for a
        // limited time.
        if matches!(then, WhenStopped::Release)
            && since.elapsed() < RETRY_TIMEOUT
            && process.cannot_stop_now()
        {
            return;
        }
        let quiesced = self.quiesce_resident(pid);
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let Some((then, since)) = process.waits.take_when_stopped() else { return };
        match quiesced {
            Ok(Quiesced::Stopped) => self.do_when_stopped(pid, then),
            Ok(Quiesced::Gone) => self.not_stopped(pid, then),
            Ok(Quiesced::Blocked)
                if since.elapsed() > MAX_BLOCKED && !matches!(then, WhenStopped::Release) =>
            {
                self.refuse_blocked(pid, then);
            }
            Ok(Quiesced::Blocked) if matches!(then, WhenStopped::Release) => {
                // Its other threads run on until this one wakes.
                process.waits.for_stop(then, Instant::now());
                if let Err(error) = process.resume_at_home() {
                    self.handle_error(pid, &error);
                }
            }
            Ok(Quiesced::Blocked) => process.waits.for_stop(then, since),
            Err(error) => {
                self.handle_error(pid, &error);
                // Perhaps only a thread is gone, as when another one executes a program, and the
                // process lives.
                match self.processes.get_mut(&pid) {
                    Some(process) if since.elapsed() < RETRY_TIMEOUT => {
                        process.waits.for_stop(then, since);
                    }
                    _ => self.not_stopped(pid, then),
                }
            }
        }
    }

    fn do_when_stopped(&mut self, pid: HomePid, then: WhenStopped) {
        match then {
            WhenStopped::Leave(peer, stays_stopped) => self.begin_outgoing(pid, peer, stays_stopped),
            WhenStopped::Freeze(caller) => {
                self.detach(pid);
                self.reply_to_freeze(pid, caller);
            }
            WhenStopped::Release => match self.processes.get_mut(&pid).map(Process::undo_prepare) {
                Some(Ok(())) => self.detach(pid),
                Some(Err(error)) => self.handle_error(pid, &error),
                None => {}
            },
        }
    }

    /// Handles a process that is gone or has executed a program. In the second case its exec stop
    /// has already frozen it or begun its departure.
    fn not_stopped(&mut self, pid: HomePid, then: WhenStopped) {
        match then {
            WhenStopped::Leave(..) => {
                let stays = |process: &Process| process.is_at_home() && process.task.is_some();
                if self.processes.get(&pid).is_some_and(stays) {
                    self.abort_task(pid, "busy: it cannot be stopped; try again");
                }
            }
            WhenStopped::Freeze(caller) => self.reply_to_freeze(pid, caller),
            WhenStopped::Release => {}
        }
    }

    fn refuse_blocked(&mut self, pid: HomePid, then: WhenStopped) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.frozen = None;
        if let Err(error) = process.resume_at_home() {
            self.handle_error(pid, &error);
        }
        match then {
            WhenStopped::Leave(..) => {
                self.requeue_task(pid);
                self.abort_task(pid, Busy::UninterruptibleCall.reason());
            }
            WhenStopped::Freeze(caller) => {
                caller.reply(&ShimReply::Refused(Refusal::new(
                    RefusalKind::CannotMove,
                    Busy::UninterruptibleCall.reason(),
                )));
            }
            WhenStopped::Release => {}
        }
        self.release(pid);
    }

    fn reply_to_freeze(&self, pid: HomePid, caller: PendingRequest) {
        match self.is_frozen(pid) {
            true => caller.reply(&ShimReply::Done),
            false => WhenStopped::Freeze(caller).refuse_gone(pid),
        }
    }
}

impl Process {
    /// Whether a thread that was not asked to stop yet is in an uninterruptible sleep.
    fn cannot_stop_now(&self) -> bool {
        let runs = |thread: &&crate::process::thread::Thread| thread.stopped.is_none() && !thread.stop_wanted;
        self.live_threads().filter(runs).any(|thread| is_uninterruptible(thread.tid))
    }
}
