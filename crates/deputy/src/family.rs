//! A family at home: its processes, the shims that hold its guests, and what happens between them.

use crate::gate::Gate;
use crate::ledger::Ledger;
use crate::mailbox::Bell;
use crate::member::{Member, State};
use crate::messages::Content;
use crate::names::Names;
use crate::peer::Peer;
use crate::thread::Thread;
use crate::watch::Watch;
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};
use tern_control::door::Door;
use tern_control::shim::{ShimReply, ShimStart};
use tern_control::{Destination, MigrationReport, ProcessRow, Refusal, RefusalKind};
use tern_ids::{HomePid, MigrationId, NodeId};
use tern_image::object::{ObjectId, Objects};
use tern_migrate::fault;
use tern_migrate::message::Message;
use tern_tracee::stop::Stopped;
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
    /// What those have used away that were let go.
    pub(crate) ledger: Ledger,
    /// Moves that have to wait a moment.
    pub(crate) parked: Vec<(Instant, HomePid, Destination, tern_control::door::Caller)>,
    /// Children that have stopped before their parents' stops have said whose they are.
    pub(crate) newborn: HashMap<i32, Stopped>,
    /// Contents of files that guests wait for.
    pub(crate) contents: Vec<Content>,
    pub(crate) events: (Sender<Event>, Receiver<Event>),
    /// The memory that our processes away share, opened; and which inodes these are.
    pub(crate) objects: Objects,
    pub(crate) inodes: HashMap<ObjectId, (u64, u64)>,
    /// The file systems that this node declares as shared.
    pub(crate) shares: crate::shared::Shares,
    /// What watches the names that guests know.
    pub(crate) names: Names,
    /// Who opens by name what they share.
    pub(crate) watch: Option<Watch>,
    /// Where those wait who open it for writing.
    pub(crate) gate: Option<Gate>,
    /// The last migration of which it is known that all who share memory stand.
    pub(crate) complete: Option<MigrationId>,
    /// A call at which a test wants a process to come home.
    pub(crate) freeze: Option<fault::Freeze>,
    /// When it became empty; it ends a moment later.
    pub(crate) empty_since: Instant,
}

impl Family {
    /// The process that a thread is of.
    pub(crate) fn of_thread(&mut self, tid: HomePid) -> Option<&mut Member> {
        let has = |member: &Member| member.threads.contains_key(&tid);
        if self.members.get(&tid).is_some_and(has) {
            return self.members.get_mut(&tid);
        }
        self.members.values_mut().find(|member| has(member))
    }

    /// Tells the holder of a process something of it, or of a thread of it.
    pub(crate) fn tell(&mut self, tag: HomePid, message: &Message) {
        let thread = message.is_of_a_thread();
        let member = if thread { self.of_thread(tag).map(|m| m.peer) } else { None };
        if let Some(peer) = member.or_else(|| self.members.get(&tag).map(|m| m.peer)) {
            self.tell_peer(peer, tag, message);
        }
    }

    pub(crate) fn tell_peer(&mut self, peer: usize, pid: HomePid, message: &Message) {
        // Whatever it is, it may come of a change.
        self.hear_of_names();
        self.say(peer, pid, message);
    }

    /// The same, but for what has changed since that was heard of; whether the link has taken it.
    pub(crate) fn say(&mut self, peer: usize, pid: HomePid, message: &Message) -> bool {
        let Some(linked) = self.peers.get_mut(peer).filter(|peer| peer.link.is_some()) else { return false };
        let said = linked.tell(pid, message, &[]).is_ok();
        if !said {
            self.lose(peer);
        }
        said
    }

    /// Ends the task of a process unsuccessfully.
    pub(crate) fn refuse(&mut self, pid: HomePid, why: &str) {
        self.refuse_with(pid, Refusal::new(RefusalKind::CannotMove, why));
    }

    pub(crate) fn refuse_with(&mut self, pid: HomePid, refusal: Refusal) {
        let why = refusal.message.clone();
        if let Some(migration) = self.end_task(pid, refusal) {
            self.disband(migration, pid, &why);
        }
    }

    /// Ends the task of a process unsuccessfully, whatever becomes of those who move with it; which migration that was.
    fn end_task(&mut self, pid: HomePid, refusal: Refusal) -> Option<MigrationId> {
        let member = self.members.get_mut(&pid)?;
        member.reason.clone_from(&refusal.message);
        if member.is_away() {
            // It was to come home to stand still there, and has not come.
            member.frozen = None;
        }
        let task = member.task.take()?;
        tracing::info!(id = %task.migration, %pid, why = refusal.message, "it did not move");
        if let Some((caller, _)) = task.caller {
            caller.answer(&ShimReply::Refused(refusal));
        }
        Some(task.migration)
    }

    /// Who waits for a move that is about to be called off for what passes, and not for long, waits on: it is begun again.
    pub(crate) fn wait_on(&mut self, pid: HomePid) {
        let task = self.members.get_mut(&pid).and_then(|member| member.task.as_mut());
        if let Some(task) = task.filter(|task| task.begun.elapsed() < PATIENCE)
            && let Some((caller, to)) = task.caller.take()
        {
            self.parked.push((task.begun, pid, to, caller));
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
        if let Some((caller, _)) = task.caller {
            caller.answer(&ShimReply::Migrated(report));
        }
    }

    /// Sends again every signal that the guest may not have taken over; it knows which it has.
    pub(crate) fn signal_again(&mut self, pid: HomePid) {
        let Some(member) = self.members.get(&pid) else { return };
        let again: Vec<(HomePid, Message)> = member
            .threads
            .values()
            .flat_map(|t| {
                t.unheard.iter().map(|(count, info)| (t.tid, Message::Signal(*count, info.to_vec())))
            })
            .collect();
        again.iter().for_each(|(tid, m)| self.tell(*tid, m));
    }

    /// Lets those threads of a process that stand, and are home, go on by themselves: from now on we are nothing to
    /// them, nor to the process when the last has gone. Unless it is to stand still.
    pub(crate) fn let_go(&mut self, pid: HomePid) {
        self.let_go_with(pid, pid, 0);
    }

    /// [`Self::let_go`], where one thread is to be delivered this signal.
    pub(crate) fn let_go_with(&mut self, pid: HomePid, tid: HomePid, signal: i32) {
        if self.keep_still(pid, tid, signal) {
            return;
        }
        let Some(member) = self.members.get_mut(&pid) else { return };
        for thread in member.threads.values_mut() {
            if let Some(stopped) = thread.standing.take_if(|_| thread.lingering.is_none())
                && let Err(error) = stopped.detach(if thread.tid == tid { signal } else { 0 })
            {
                tracing::debug!(%error, "it was gone already");
            }
        }
        member.threads.retain(|_, thread| thread.lingering.is_some());
        if let Some(lingering) = member.threads.keys().next().map(|tid| tid.0) {
            // What is let go may end unseen.
            if let Ok(memory) = tern_tracee::Memory::open(lingering) {
                member.memory = memory;
            }
            member.state = State::Lingering;
            return;
        }
        let Some(member) = self.members.remove(&pid) else { return };
        self.close_objects();
        self.ledger.put(pid, member.started, &member.spent());
        // What was remembered of an earlier homecoming is old.
        self.homed.retain(|h| h.row.pid != pid);
        if !member.homecomings.is_empty()
            && let Ok(stat) = tern_tracee::procfs::stat(pid.0)
        {
            let row = self.row(&member);
            let (started, homecomings) = (stat.start_time(), member.homecomings);
            self.homed.push(Homed { row, started, homecomings });
        }
    }

    /// A thread of ours is gone, or a process astray.
    pub(crate) fn lost(&mut self, tid: HomePid, error: &tern_tracee::Error) {
        let Some(pid) = self.of_thread(tid).map(|member| member.pid).or(Some(tid)) else { return };
        if error.is_gone() {
            // Its end is reported by its own stop; if that has been taken already it is none of ours any more.
            let gone = |tid: HomePid| tern_tracee::procfs::has_ended(tid.0);
            let Some(member) = self.members.get_mut(&pid) else { return };
            let over = |thread: &&Thread| thread.tid != pid && !thread.ending && gone(thread.tid);
            let over: Vec<HomePid> = member.threads.values().filter(over).map(|thread| thread.tid).collect();
            over.into_iter().for_each(|tid| member.thread_over(tid));
            if gone(pid) && !member.threads.keys().any(|tid| *tid != pid) {
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
        let migration = self.end_task(pid, Refusal::new(RefusalKind::NotFound, "it has ended"));
        let Some(member) = self.members.remove(&pid) else { return };
        self.close_objects();
        self.bequeath(&member);
        let carried = member.may_carry();
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
        self.go_without(migration, pid, carried, "it has ended");
    }

    /// One that moved with others does not any more. It may have `carried` a part of what they share: then they begin anew.
    pub(crate) fn go_without(
        &mut self,
        migration: Option<MigrationId>,
        pid: HomePid,
        carried: bool,
        why: &str,
    ) {
        match migration {
            Some(migration) if carried => {
                self.begin_anew(migration);
                self.disband(migration, pid, why);
            }
            Some(migration) => self.one_less(migration),
            None => {}
        }
    }

    /// Where a process' program runs now.
    pub(crate) fn node_of(&self, member: &Member) -> NodeId {
        if member.is_away() { self.peers[member.peer].node } else { self.start.node }
    }
}
