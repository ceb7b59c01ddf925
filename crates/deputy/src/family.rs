//! A family at home: its processes, the shims that hold its guests, and what happens between them.

use crate::mailbox::Bell;
use crate::member::{Member, State};
use crate::peer::Peer;
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};
use tern_control::door::Door;
use tern_control::shim::{ShimReply, ShimStart};
use tern_control::{Destination, MigrationReport, ProcessRow, Refusal, RefusalKind};
use tern_ids::{HomePid, MigrationId, NodeId};
use tern_migrate::CpuTime;
use tern_migrate::fault;
use tern_migrate::message::Message;
use tern_tracee::stop::{Stop, Stopped};
use tern_wire::{Ephemeral, Link};

/// How long a guest that is busy is asked again to go.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// What threads of ours report.
#[derive(Debug)]
pub(crate) enum Event {
    /// A destination is prepared for a move of a process, or not.
    Prepared(HomePid, MigrationId, Result<Box<Peer>, Refusal>),
    /// A peer was reached again, or is known to be gone, or neither.
    Sought(usize, Found),
}

/// What came of looking for a lost peer.
#[derive(Debug)]
pub(crate) enum Found {
    Link(Box<Link>),
    Gone,
    Nothing,
}

/// A process that had to come home. We hold nothing of it any more, and only remember why.
#[derive(Debug)]
pub(crate) struct Homed {
    pub(crate) row: ProcessRow,
    /// With the pid it names the process for ever.
    started: u64,
    pub(crate) used: CpuTime,
    pub(crate) homecomings: VecDeque<Instant>,
}

impl Homed {
    pub(crate) fn lives(&self) -> bool {
        tern_tracee::procfs::stat(self.row.pid.0).is_ok_and(|s| s.start_time() == self.started)
    }
}

/// The home half of a family.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) start: ShimStart,
    pub(crate) key: std::sync::Arc<Ephemeral>,
    pub(crate) door: Door,
    pub(crate) bell: Bell,
    /// Whether the bell was rung before the last wait ended.
    pub(crate) rung: bool,
    pub(crate) peers: Vec<Peer>,
    pub(crate) members: HashMap<HomePid, Member>,
    /// Processes that had to come home, and why; they run by themselves.
    pub(crate) homed: Vec<Homed>,
    /// Moves that have to wait a moment.
    pub(crate) parked: Vec<(Instant, HomePid, Destination, tern_control::door::Caller)>,
    /// Children that have stopped before their parents' stops have said whose they are.
    pub(crate) newborn: HashMap<i32, Stopped>,
    pub(crate) events: (Sender<Event>, Receiver<Event>),
    /// A call at which a test wants a process to come home.
    pub(crate) freeze: Option<fault::Freeze>,
    /// When it became empty; it ends a moment later.
    pub(crate) empty_since: Instant,
}

impl Family {
    pub(crate) fn tell(&mut self, pid: HomePid, message: &Message) {
        if let Some(peer) = self.members.get(&pid).map(|m| m.peer) {
            self.tell_peer(peer, pid, message);
        }
    }

    pub(crate) fn tell_peer(&mut self, peer: usize, pid: HomePid, message: &Message) {
        if self.peers.get_mut(peer).is_some_and(|p| p.link.is_some() && p.tell(pid, message, &[]).is_err()) {
            self.lose(peer);
        }
    }

    /// Ends the task of a process unsuccessfully.
    pub(crate) fn refuse(&mut self, pid: HomePid, why: &str) {
        self.refuse_with(pid, Refusal::new(RefusalKind::CannotMove, why));
    }

    pub(crate) fn refuse_with(&mut self, pid: HomePid, refusal: Refusal) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        member.reason.clone_from(&refusal.message);
        if member.is_away() {
            // It was to come home to stand still there, and has not come.
            member.frozen = None;
        }
        if let Some(task) = member.task.take() {
            tracing::info!(id = %task.migration, %pid, why = refusal.message, "it did not move");
            if let Some(caller) = task.caller {
                caller.answer(&ShimReply::Refused(refusal));
            }
        }
    }

    /// Ends the task of a process successfully.
    pub(crate) fn report(&mut self, pid: HomePid) {
        let home = self.start.node;
        let Some(member) = self.members.get_mut(&pid) else { return };
        member.migrations += 1;
        let to = if member.is_away() { self.peers[member.peer].node } else { home };
        let Some(task) = member.task.take() else { return };
        let report = MigrationReport {
            pid,
            command: tern_tracee::procfs::status(pid.0)
                .map_or_else(|_| member.command.clone(), |s| String::from_utf8_lossy(&s.name).into_owned()),
            migration: task.migration,
            from: task.from,
            to,
            bytes: task.bytes,
            freeze_ms: task.frozen.map_or(0.0, |f| f.elapsed().as_secs_f64() * 1e3),
            total_ms: task.begun.elapsed().as_secs_f64() * 1e3,
        };
        tracing::info!(id = %task.migration, %pid, from = %report.from, to = %report.to, report.bytes, report.freeze_ms, "moved");
        if let Some(caller) = task.caller {
            caller.answer(&ShimReply::Migrated(report));
        }
    }

    /// Sends again every signal that the guest may not have taken over; it knows which it has.
    pub(crate) fn signal_again(&mut self, pid: HomePid) {
        let Some(member) = self.members.get(&pid) else { return };
        let again: Vec<Message> =
            member.unheard.iter().map(|(count, info)| Message::Signal(*count, info.to_vec())).collect();
        again.iter().for_each(|m| self.tell(pid, m));
    }

    /// Brings a process that runs at home to a stand; `None` if it has executed a program meanwhile and is not ours
    /// any more, or stands for good.
    pub(crate) fn halt_at_home(&mut self, pid: HomePid) -> tern_tracee::Result<Option<Stopped>> {
        while let Some(member) = self.members.get_mut(&pid) {
            let stopped = crate::out::halt_resident(pid.0, &mut member.partial)?;
            if stopped.stop != Stop::Exec {
                return Ok(Some(stopped));
            }
            self.executed(pid, stopped)?;
            if self.stands_still(pid) {
                break;
            }
        }
        Ok(None)
    }

    /// Lets a process that is home go on by itself: from now on we are nothing to it. Unless it is to stand still.
    pub(crate) fn let_go(&mut self, pid: HomePid, stopped: Stopped, signal: i32) {
        let Some(stopped) = self.keep_still(pid, stopped, signal) else { return };
        if let Err(error) = stopped.detach(signal) {
            tracing::debug!(%error, "it was gone already");
        }
        let Some(member) = self.members.remove(&pid) else { return };
        // What was remembered of an earlier homecoming is old.
        self.homed.retain(|h| h.row.pid != pid);
        if !member.homecomings.is_empty()
            && let Ok(stat) = tern_tracee::procfs::stat(pid.0)
        {
            let row = self.row(&member);
            let (started, used, homecomings) = (stat.start_time(), member.used, member.homecomings);
            self.homed.push(Homed { row, started, used, homecomings });
        }
    }

    /// A process of ours is gone or astray.
    pub(crate) fn lost(&mut self, pid: HomePid, error: &tern_tracee::Error) {
        if error.is_gone() {
            // Its end is reported by its own stop; if that has been taken already it is none of ours any more.
            if tern_tracee::procfs::status(pid.0).map_or(true, |s| s.state == b'Z') {
                self.ended_at_home(pid);
            }
            return;
        }
        tracing::error!(%pid, %error, "a process cannot be held any more");
        self.refuse(pid, &error.to_string());
        tern_tracee::pidfd::kill(pid.0);
    }

    /// A process has ended, at home: so has its guest.
    pub(crate) fn ended_at_home(&mut self, pid: HomePid) {
        self.refuse_with(pid, Refusal::new(RefusalKind::NotFound, "it has ended"));
        let Some(member) = self.members.remove(&pid) else { return };
        let mut peers = vec![member.peer];
        match member.state {
            State::Outbound(outbound) | State::Going(outbound) => peers.push(outbound.peer),
            State::Onward(next) | State::Crossing(next) => peers.push(next),
            _ => {}
        }
        peers.dedup();
        for peer in peers {
            self.tell_peer(peer, pid, &Message::Drop);
        }
    }

    /// Where a process' program runs now.
    pub(crate) fn node_of(&self, member: &Member) -> NodeId {
        if member.is_away() { self.peers[member.peer].node } else { self.start.node }
    }
}
