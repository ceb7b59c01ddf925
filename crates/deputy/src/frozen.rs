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
use crate::member::{Member, State};
use std::time::Instant;
use tern_control::door::Caller;
use tern_control::shim::ShimReply;
use tern_control::{Destination, Refusal, RefusalKind};
use tern_ids::HomePid;

/// How far it is.
#[derive(Debug)]
pub(crate) enum Frozen {
    /// It stands still as soon as it is home with nothing under way.
    Wanted,
    /// It does, and this thread is to be let go with this signal.
    Standing(HomePid, i32),
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
            Ok(true) => self.let_go(pid),
            // It executed a program just then, and stands where that begins.
            Ok(false) => {}
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
        let lingers = self.members.get(&pid).is_some_and(|m| matches!(m.state, State::Lingering));
        if let Frozen::Standing(tid, signal) = frozen {
            match self.members.get_mut(&pid).map(Member::run_on) {
                Some(Ok(())) => self.let_go_with(pid, tid, signal),
                Some(Err(error)) => self.lost(pid, &error),
                None => {}
            }
        } else if lingers {
            self.let_go(pid);
        }
        caller.answer(&ShimReply::Done);
    }

    /// Keeps what would be let go, if it is to stand still: false otherwise. With a thread that lingers it is frozen when
    /// that is home too.
    pub(crate) fn keep_still(&mut self, pid: HomePid, tid: HomePid, signal: i32) -> bool {
        match self.members.get_mut(&pid) {
            Some(member) if member.frozen.is_some() => {
                if member.threads.values().any(|thread| thread.lingering.is_some()) {
                    member.state = State::Lingering;
                } else {
                    member.state = State::Resident;
                    member.frozen = Some(Frozen::Standing(tid, signal));
                    tracing::info!(%pid, "it is frozen");
                }
                true
            }
            _ => false,
        }
    }
}
