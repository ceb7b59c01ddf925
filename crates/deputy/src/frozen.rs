//! Processes that stand still at home because their user wants it (`migrate PID freeze`), until he lets them go on.
//!
//! Why at home: what stands still away takes another's memory and is lost with that node; at home its memory can be
//! swapped out, and nobody has to make room for it. MOSIX froze at home too. Why held by us, and not by SIGSTOP: a stop of
//! job control is told to its parent, which may be a shell that takes it off the foreground or a make that gives up;
//! and SIGCONT from anybody would end it. Of our stop the parent sees nothing. SIGKILL works as ever, all other signals
//! wait until it goes on, as with every process that is stopped. If we die it goes on.
//!
//! ```text
//!  at home ── halted ─▶ Standing ── continue ─▶ let go
//!                          ▲
//!  away ── comes home ─────┤      where it would be let go otherwise
//!  lingering ── call ends ─┘
//! ```

use crate::family::{Family, PATIENCE};
use crate::member::State;
use std::time::Instant;
use tern_control::door::Caller;
use tern_control::shim::ShimReply;
use tern_control::{Destination, Refusal, RefusalKind};
use tern_ids::HomePid;
use tern_tracee::stop::Stopped;

/// How far it is.
#[derive(Debug)]
pub(crate) enum Frozen {
    /// It stands still as soon as it is home with nothing under way.
    Wanted,
    /// It does, and is to be let go with this signal.
    Standing(Stopped, i32),
}

impl Family {
    /// Freezes a process that runs at home, and in which nothing is under way.
    pub(crate) fn freeze_at_home(&mut self, pid: HomePid, caller: Caller, since: Instant) {
        match self.can_leave(pid) {
            Ok(()) => {}
            Err((_, passing)) if passing && since.elapsed() < PATIENCE => {
                self.parked.push((since, pid, Destination::Frozen, caller));
                return;
            }
            Err((why, _)) => return caller.answer(&ShimReply::Refused(why)),
        }
        let Some(member) = self.members.get_mut(&pid) else { return };
        member.frozen = Some(Frozen::Wanted);
        match self.halt_at_home(pid) {
            Ok(Some(stopped)) => self.let_go(pid, stopped, 0),
            // It executed a program just then, and stands where that begins.
            Ok(None) => {}
            Err(error) => self.lost(pid, &error),
        }
        let stands = self.stands_still(pid);
        let gone = || Refusal::new(RefusalKind::NotFound, format!("there is no process {pid}"));
        caller.answer(&if stands { ShimReply::Done } else { ShimReply::Refused(gone()) });
    }

    /// Whether it is frozen and stands: nobody may wait for it to stop, it has.
    pub(crate) fn stands_still(&self, pid: HomePid) -> bool {
        self.members.get(&pid).is_some_and(|m| matches!(m.frozen, Some(Frozen::Standing(..))))
    }

    /// Lets a frozen process go on.
    pub(crate) fn let_go_on(&mut self, pid: HomePid, caller: Caller) {
        let frozen = self.members.get_mut(&pid).and_then(|m| m.frozen.take());
        let Some(frozen) = frozen else {
            let refusal = Refusal::new(RefusalKind::BadRequest, format!("process {pid} is not frozen"));
            return caller.answer(&ShimReply::Refused(refusal));
        };
        // One that does not stand yet just goes on with what it does: it comes home, or makes its last call.
        if let Frozen::Standing(stopped, signal) = frozen {
            let let_run = self.members.get_mut(&pid).map(|m| m.run_on(stopped));
            match let_run {
                Some(Ok(stopped)) => self.let_go(pid, stopped, signal),
                Some(Err(error)) => self.lost(pid, &error),
                None => {}
            }
        }
        caller.answer(&ShimReply::Done);
    }

    /// Keeps what would be let go, if it is to stand still; gives it back otherwise.
    pub(crate) fn keep_still(&mut self, pid: HomePid, stopped: Stopped, signal: i32) -> Option<Stopped> {
        match self.members.get_mut(&pid) {
            Some(member) if member.frozen.is_some() => {
                member.state = State::Resident;
                member.frozen = Some(Frozen::Standing(stopped, signal));
                tracing::info!(%pid, "it is frozen");
                None
            }
            _ => Some(stopped),
        }
    }
}
