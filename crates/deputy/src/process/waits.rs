//! The waits of a process that is to move, to be frozen, or to run on untraced.

use crate::links::peers::PeerId;
use std::time::{Duration, Instant};
use tern_control::control_socket::PendingRequest;
use tern_control::shim::ShimReply;
use tern_control::{Refusal, RefusalKind};
use tern_ids::HomePid;

/// The waits of a process. The main loop ends them.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// The work that begins when all its threads, which run at home, have stopped, and the time at
    /// which the wait for this began.
    when_stopped: Option<(WhenStopped, Instant)>,
    /// Since when its move waits for a thread that cannot be stopped.
    blocked_since: Option<Instant>,
    /// When to ask a busy guest again to depart.
    retry_at: Option<Instant>,
}

/// The work that begins when all threads of a process at home have stopped.
#[derive(Debug)]
pub(crate) enum WhenStopped {
    /// It leaves for this peer. The flag says whether it stays stopped while it is sent.
    Leave(PeerId, bool),
    /// It is frozen, as this caller asked.
    Freeze(PendingRequest),
    /// It runs on, untraced.
    Release,
}

impl Waits {
    /// Whether the main loop must look again soon.
    pub(crate) fn needs_polling(&self) -> bool {
        self.retry_at.is_some() || self.when_stopped.is_some()
    }

    /// It waits, since this time, until all its threads have stopped.
    pub(crate) fn for_stop(&mut self, then: WhenStopped, since: Instant) {
        self.when_stopped = Some((then, since));
    }

    pub(crate) fn is_for_stop(&self) -> bool {
        self.when_stopped.is_some()
    }

    pub(crate) fn when_stopped(&self) -> Option<&(WhenStopped, Instant)> {
        self.when_stopped.as_ref()
    }

    pub(crate) fn take_when_stopped(&mut self) -> Option<(WhenStopped, Instant)> {
        self.when_stopped.take()
    }

    /// The peer for which it leaves when its threads have stopped.
    pub(crate) fn next_peer(&self) -> Option<PeerId> {
        match &self.when_stopped {
            Some((WhenStopped::Leave(peer, _), _)) => Some(*peer),
            _ => None,
        }
    }

    /// Records whether its move waits for a thread that cannot be stopped. Returns for how long it
    /// has waited.
    pub(crate) fn set_blocked(&mut self, is_blocked: bool) -> Duration {
        self.blocked_since = is_blocked.then(|| self.blocked_since.unwrap_or_else(Instant::now));
        self.blocked_for().unwrap_or_default()
    }

    /// Its move does not wait for a thread any more.
    pub(crate) fn unblocked(&mut self) {
        self.blocked_since = None;
    }

    /// For how long its move has waited for a thread that cannot be stopped; none if it does not.
    pub(crate) fn blocked_for(&self) -> Option<Duration> {
        self.blocked_since.map(|since| since.elapsed())
    }

    /// Its guest is to be asked again to depart.
    pub(crate) fn retry_after(&mut self, time: Duration) {
        self.retry_at = Some(Instant::now() + time);
    }

    /// Whether its guest is to be asked now.
    pub(crate) fn is_retry_due(&self) -> bool {
        self.retry_at.is_some_and(|at| at <= Instant::now())
    }

    /// Its guest is asked now.
    pub(crate) fn end_retry(&mut self) {
        self.retry_at = None;
    }
}

impl WhenStopped {
    /// Replies to its caller, if it has one, that the process is gone.
    pub(crate) fn refuse_gone(self, pid: HomePid) {
        if let Self::Freeze(caller) = self {
            let gone = Refusal::new(RefusalKind::NotFound, format!("there is no process {pid}"));
            caller.reply(&ShimReply::Refused(gone));
        }
    }
}
