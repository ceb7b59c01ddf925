//! Freezing processes at home at the user's request (`migrate PID freeze`), and continuing them.
//!
//! They are frozen at home because a process frozen away occupies another node's memory and is lost
//! with that node. At home its memory can be swapped out. MOSIX freezes at home too. A ptrace stop
//! is used rather than SIGSTOP because the parent is notified of a job-control stop: a shell may
//! take the job off the foreground, or make may abort. SIGCONT from any process would end such a
//! stop. The parent does not see a ptrace stop. SIGKILL works as ever; all other signals stay
//! pending until the process continues. If the shim dies, the process continues.
//!
//! ```text
//!  at home ── quiesced ───▶ Stopped ── continue ─▶ detached
//!                           ▲
//!  away ── comes home ──────┤     where it would otherwise be detached
//!  draining ── call ends ───┘
//! ```

use crate::migrate::requests::rights_limit;
use crate::process::Process;
use crate::process::state::{Frozen, State};
use crate::process::waits::WhenStopped;
use crate::shim::{RETRY_TIMEOUT, Shim};
use std::time::Instant;
use tern_control::control_socket::PendingRequest;
use tern_control::shim::ShimReply;
use tern_control::{Destination, Refusal, RefusalKind};
use tern_ids::HomePid;

impl Shim {
    /// Freezes a process that runs at home and has no call pending.
    pub(crate) fn freeze_at_home(&mut self, pid: HomePid, caller: PendingRequest, since: Instant) {
        match self.seize_movable(pid, rights_limit(&caller)) {
            Ok(()) => {}
            Err((_, is_transient)) if is_transient && since.elapsed() < RETRY_TIMEOUT => {
                self.queued_moves.push((since, pid, Destination::Frozen, caller));
                return;
            }
            Err((why, _)) => return caller.reply(&ShimReply::Refused(why)),
        }
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.frozen = Some(Frozen::Requested);
        self.when_stopped(pid, WhenStopped::Freeze(caller));
    }

    /// Whether a process is frozen and stopped. The shim must not wait for it to stop: no further
    /// stop will come.
    pub(crate) fn is_frozen(&self, pid: HomePid) -> bool {
        self.processes.get(&pid).is_some_and(|process| matches!(process.frozen, Some(Frozen::Stopped(..))))
    }

    /// Continues a frozen process.
    pub(crate) fn continue_frozen(&mut self, pid: HomePid, caller: PendingRequest) {
        let frozen = self.processes.get_mut(&pid).and_then(|process| process.frozen.take());
        let Some(frozen) = frozen else {
            let refusal = Refusal::new(RefusalKind::AlreadyDone, format!("process {pid} is not frozen"));
            return caller.reply(&ShimReply::Refused(refusal));
        };
        // If it is not stopped yet it just continues what it does: it comes home, or ends its last
        // call.
        let drains = self.processes.get(&pid).is_some_and(|process| matches!(process.state, State::Draining));
        if let Frozen::Stopped(tid, signal) = frozen {
            match self.processes.get_mut(&pid).map(Process::undo_prepare) {
                Some(Ok(())) => self.detach_with_signal(pid, tid, signal),
                Some(Err(error)) => self.handle_error(pid, &error),
                None => {}
            }
        } else if drains {
            self.detach(pid);
        }
        caller.reply(&ShimReply::Done);
    }

    /// If a process that would be detached is to be frozen, keeps it stopped and returns true.
    /// Otherwise returns false. A process with draining threads is frozen when the last of them is
    /// home.
    pub(crate) fn freeze_instead(&mut self, pid: HomePid, tid: HomePid, signal: i32) -> bool {
        match self.processes.get_mut(&pid) {
            Some(process) if process.frozen.is_some() => {
                if process.threads.values().any(|thread| thread.draining.is_some()) {
                    process.state = State::Draining;
                } else {
                    process.state = State::Resident;
                    process.frozen = Some(Frozen::Stopped(tid, signal));
                    tracing::info!(%pid, "it is frozen");
                }
                true
            }
            _ => false,
        }
    }
}
