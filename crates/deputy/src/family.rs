//! A family at home: its processes, the shims that hold its guests, and what happens between them.

use crate::back::Homecoming;
use crate::mailbox::Bell;
use crate::member::{Member, State, Task};
use crate::out::Leaving;
use crate::peer::Peer;
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};
use tern_control::door::Door;
use tern_control::shim::{ShimReply, ShimStart};
use tern_control::{Destination, MigrationReport, ProcessRow, Refusal, RefusalKind};
use tern_ids::{HomePid, MigrationId, NodeId};
use tern_migrate::message::{Departure, Message};
use tern_migrate::source::{SendError, Sending};
use tern_migrate::{CpuTime, Phase, fault};
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
    /// When it became empty; it ends a moment later.
    pub(crate) empty_since: Instant,
}

impl Family {
    // ---- telling

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

    /// Brings a process that runs at home to a stand; `None` if it has executed a program meanwhile and is not ours
    /// any more.
    pub(crate) fn halt_at_home(&mut self, pid: HomePid) -> tern_tracee::Result<Option<Stopped>> {
        while let Some(member) = self.members.get_mut(&pid) {
            let stopped = crate::out::halt_resident(pid.0, &mut member.partial)?;
            if stopped.stop != Stop::Exec {
                return Ok(Some(stopped));
            }
            self.executed(pid, stopped)?;
        }
        Ok(None)
    }

    /// Lets a process that is home go on by itself: from now on we are nothing to it.
    pub(crate) fn let_go(&mut self, pid: HomePid, stopped: Stopped, signal: i32) {
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

    // ---- out

    /// Begins to send a stopped process to a peer; it runs on meanwhile.
    pub(crate) fn begin_out(&mut self, pid: HomePid, stopped: Stopped, peer: usize) {
        let home = (self.start.node, self.start.id);
        let Some(member) = self.members.get_mut(&pid) else { return };
        let why = match tern_image::process::check(pid.0, std::process::id() as i32) {
            Ok(movable) => match stopped.registers() {
                Ok(registers) => {
                    let movable = movable.and_then(|()| tern_image::process::check_registers(&registers));
                    movable.err().map(|reason| reason.to_string())
                }
                Err(error) => Some(error.to_string()),
            },
            Err(error) => Some(error.to_string()),
        };
        if let Some(why) = why {
            self.refuse(pid, &why);
            self.let_go(pid, stopped, 0);
            return;
        }
        match member.prepare(stopped, peer, home) {
            Ok((stopped, offer)) => {
                let sent = self.peers[peer].tell(pid, &Message::Offer(Box::new(offer)), &[]);
                if sent.is_err() {
                    self.lose(peer);
                    self.stay_home(pid, Some(stopped), "the link to that node was cut");
                } else if let Err(error) =
                    self.members.get_mut(&pid).map_or(Ok(()), |m| m.run_meanwhile(stopped))
                {
                    self.lost(pid, &error);
                }
            }
            Err(error) => {
                // Half prepared: let go of it as it is; what we reserved is only address space.
                self.refuse(pid, &error.to_string());
                self.members.remove(&pid);
            }
        }
    }

    /// The move out is off: the process runs on at home, untouched.
    pub(crate) fn stay_home(&mut self, pid: HomePid, stopped: Option<Stopped>, why: &str) {
        self.refuse(pid, why);
        let Some(member) = self.members.get_mut(&pid) else { return };
        let held = match &mut member.state {
            State::Outbound(outbound) => outbound.stopped.take(),
            _ => None,
        };
        // Executing a program now would not begin the move again.
        member.state = State::Resident;
        let back = match stopped.or(held) {
            Some(stopped) => Ok(Some(stopped)),
            None => self.halt_at_home(pid),
        };
        let done = back.and_then(|stopped| match (stopped, self.members.get_mut(&pid)) {
            (Some(stopped), Some(member)) => member.run_on(stopped).map(Some),
            _ => Ok(None),
        });
        match done {
            Ok(Some(stopped)) => self.let_go(pid, stopped, 0),
            Ok(None) => {}
            Err(error) => self.lost(pid, &error),
        }
    }

    /// Works on an outbound process with its link.
    fn with_outbound(
        &mut self,
        pid: HomePid,
        work: impl FnOnce(&mut Option<Sending>, &mut Leaving<'_>, &mut Link) -> Result<bool, SendError>,
    ) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let State::Outbound(mut outbound) = std::mem::replace(&mut member.state, State::Resident) else {
            return;
        };
        let (stopped, image) = (outbound.stopped.take(), outbound.image.take());
        let mut leaving = Leaving { member, stopped, image, executed: None };
        let done = match self.peers.get_mut(outbound.peer).and_then(|p| p.link.as_mut()) {
            Some(link) => work(&mut outbound.sending, &mut leaving, link),
            None => Err(tern_wire::LinkError::Closed.into()),
        };
        (outbound.stopped, outbound.image) = (leaving.stopped.take(), leaving.image.take());
        let executed = leaving.executed.take();
        if let Some(task) = &mut member.task {
            task.bytes = outbound.sending.as_ref().map_or(0, Sending::bytes);
            task.frozen = outbound.sending.as_ref().and_then(|s| s.frozen);
        }
        let peer = outbound.peer;
        member.state = State::Outbound(outbound);
        if let Some(stopped) = executed {
            if let Err(error) = self.executed(pid, stopped) {
                self.lost(pid, &error);
            }
            return;
        }
        if let Err(error) = done {
            self.tell_peer(peer, pid, &Message::Drop);
            self.stay_home(pid, None, &error.to_string());
        }
    }

    pub(crate) fn accepted(&mut self, pid: HomePid) {
        let source = match self.members.get_mut(&pid).map(|m| &mut m.state) {
            Some(State::Outbound(outbound)) => outbound.source.take(),
            Some(State::Onward(next)) => {
                let next = *next;
                return self.depart_onward(pid, next);
            }
            _ => None,
        };
        let Some(source) = source else { return };
        self.with_outbound(pid, |sending, leaving, link| {
            *sending = Some(Sending::begin(source, leaving, link)?);
            Ok(false)
        });
    }

    pub(crate) fn wanted(&mut self, pid: HomePid, indices: &[u32]) {
        self.with_outbound(pid, |sending, leaving, _link| match sending {
            Some(sending) => sending.wanted(indices, leaving).map(|()| false),
            None => Ok(false),
        });
    }

    /// Sends on, for every process on its way out.
    pub(crate) fn go_on_sending(&mut self) {
        let outbound: Vec<HomePid> =
            self.members.values().filter(|m| matches!(m.state, State::Outbound(_))).map(|m| m.pid).collect();
        for pid in outbound {
            self.with_outbound(pid, |sending, leaving, link| match sending {
                Some(sending) => sending.advance(leaving, link),
                None => Ok(false),
            });
        }
    }

    /// The destination holds everything: **the point of no return**. From here on the new life's calls are
    /// performed, and the old one's, if there were any, are not.
    pub(crate) fn hand_over(&mut self, pid: HomePid) {
        fault::point("home", Phase::HandOver);
        let bell = self.bell.clone();
        let Some(member) = self.members.get_mut(&pid) else { return };
        member.revived = false;
        if let State::Onward(next) = member.state {
            let old = std::mem::replace(&mut member.peer, next);
            member.epoch = member.offered;
            let epoch = member.epoch;
            member.state = State::Crossing(old);
            self.tell_peer(next, pid, &Message::Go(epoch));
            // What the old life may have heard of too late to take it along.
            self.signal_again(pid);
            return;
        }
        let State::Outbound(mut outbound) = std::mem::replace(&mut member.state, State::Resident) else {
            return;
        };
        let (Some(stopped), Some(image)) = (outbound.stopped.take(), outbound.image.take()) else {
            member.state = State::Outbound(outbound);
            return self.stay_home(pid, None, "its node was ready before it was sent");
        };
        member.epoch = member.offered;
        if let Err((error, back)) = member.become_deputy(stopped, &image, bell) {
            // Nothing has been told to the guest: it never runs.
            tracing::error!(%pid, %error, "a deputy could not be made");
            let peer = outbound.peer;
            self.tell_peer(peer, pid, &Message::Drop);
            return match back {
                Some(stopped) => {
                    self.refuse(pid, &error.to_string());
                    self.let_go(pid, stopped, 0);
                }
                None => self.lost(pid, &error),
            };
        }
        let epoch = member.epoch;
        member.peer = outbound.peer;
        outbound.image = Some(image);
        let peer = outbound.peer;
        member.state = State::Going(outbound);
        self.tell_peer(peer, pid, &Message::Go(epoch));
        fault::point("home", Phase::Resume);
    }

    /// The guest runs.
    pub(crate) fn running(&mut self, pid: HomePid) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        match std::mem::replace(&mut member.state, State::Away) {
            State::Going(outbound) => {
                // The guest does not wait for this: it may even have called already, and is served next.
                self.report(pid);
                let Some(image) = outbound.image else { return };
                let freed = self.with_deputy(pid, |member, stopped| member.free_memory(stopped, &image));
                if let Err(error) = freed {
                    self.lost(pid, &error);
                }
            }
            State::Crossing(old) => {
                self.tell_peer(old, pid, &Message::Drop);
                self.report(pid);
            }
            other => member.state = other,
        }
    }

    /// The next node was lost before its guest can have done anything: the last life is given a further one.
    pub(crate) fn cross_back(&mut self, pid: HomePid) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let State::Crossing(old) = std::mem::replace(&mut member.state, State::Away) else { return };
        member.peer = old;
        member.offered = member.offered.max(member.epoch).next();
        // It stands still as an earlier life, and may be out of reach just now as well: then it hears of the further
        // one when it shows itself.
        member.revived = true;
        member.epoch = member.offered;
        let epoch = member.epoch;
        self.tell(pid, &Message::Go(epoch));
        self.signal_again(pid);
        self.refuse(pid, "the link to that node was cut");
    }

    /// A link broke, or a node refused, before its guest can have done anything: everything is taken back.
    pub(crate) fn revoke(&mut self, pid: HomePid, why: &str) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        if !matches!(member.state, State::Going(_)) {
            return;
        }
        // From here on nothing that its guest says counts.
        member.epoch = member.epoch.next();
        let back = self.with_deputy(pid, |member, stopped| {
            let State::Going(outbound) = std::mem::replace(&mut member.state, State::Resident) else {
                return member.go_on(stopped).map(|()| None);
            };
            let astray =
                || tern_tracee::Error::Astray { what: "revoked without an image".into(), pid: pid.0 };
            let image = outbound.image.ok_or_else(astray)?;
            member.revoke(stopped, &image).map(Some)
        });
        match back {
            Ok(Some(stopped)) => {
                self.refuse(pid, why);
                self.let_go(pid, stopped, 0);
            }
            Ok(None) => {}
            Err(error) => self.lost(pid, &error),
        }
    }

    /// Sends again every signal that the guest may not have taken over; it knows which it has.
    pub(crate) fn signal_again(&mut self, pid: HomePid) {
        let Some(member) = self.members.get(&pid) else { return };
        let again: Vec<Message> =
            member.unheard.iter().map(|(count, info)| Message::Signal(*count, info.to_vec())).collect();
        again.iter().for_each(|m| self.tell(pid, m));
    }

    // ---- onward and home

    pub(crate) fn begin_onward(&mut self, pid: HomePid, next: usize) {
        let home = (self.start.node, self.start.id);
        let Some(member) = self.members.get_mut(&pid) else { return };
        match member.offer(home) {
            Ok(offer) => {
                member.state = State::Onward(next);
                self.tell_peer(next, pid, &Message::Offer(Box::new(offer)));
            }
            Err(error) => self.refuse(pid, &error.to_string()),
        }
    }

    fn depart_onward(&mut self, pid: HomePid, next: usize) {
        let Some(migration) = self.members.get(&pid).and_then(|m| m.task.as_ref()).map(|t| t.migration)
        else {
            return;
        };
        let peer = &self.peers[next];
        let (address, shim, fingerprint) = (peer.address.clone(), peer.shim, peer.fingerprint);
        let departure = Departure::Onward { migration, address, shim, fingerprint };
        self.tell(pid, &Message::Depart(departure));
    }

    pub(crate) fn begin_home(&mut self, pid: HomePid) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let Some(migration) = member.task.as_ref().map(|t| t.migration) else { return };
        member.state = State::Inbound(Box::default());
        self.tell(pid, &Message::Depart(Departure::Home(migration)));
    }

    /// The guest did not go, and runs on where it is.
    pub(crate) fn stayed(&mut self, pid: HomePid, why: &str) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let patient = member.task.as_ref().is_some_and(|t| t.begun.elapsed() < PATIENCE);
        if why.starts_with("busy") && patient && matches!(member.state, State::Onward(_) | State::Inbound(_))
        {
            member.ask_again = Some(Instant::now() + Duration::from_millis(10));
            return;
        }
        match std::mem::replace(&mut member.state, State::Away) {
            State::Onward(next) => self.tell_peer(next, pid, &Message::Drop),
            State::Inbound(_) => {}
            other => {
                member.state = other;
                return;
            }
        }
        self.refuse(pid, why);
    }

    /// Asks guests again that were busy when they were to go.
    pub(crate) fn ask_the_busy(&mut self) {
        let due = |m: &&mut Member| m.ask_again.is_some_and(|at| at <= Instant::now());
        let due: Vec<HomePid> = self.members.values_mut().filter(due).map(|m| m.pid).collect();
        for pid in due {
            let Some(member) = self.members.get_mut(&pid) else { continue };
            member.ask_again = None;
            match member.state {
                State::Onward(next) => self.depart_onward(pid, next),
                State::Inbound(_) => self.begin_home(pid),
                _ => {}
            }
        }
    }

    /// Everything of an inbound process is here.
    pub(crate) fn arrived_home(
        &mut self,
        pid: HomePid,
        image: &tern_image::ProcessImage,
        talk: &tern_migrate::message::Conversation,
    ) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let State::Inbound(inbound) = &member.state else { return };
        if let Some(task) = &mut member.task {
            task.bytes = inbound.bytes;
            task.frozen = Instant::now().checked_sub(Duration::from_micros(talk.frozen_us));
        }
        fault::point("home", Phase::HandOver);
        // A clock that somebody has set back here while the process was away goes back for everybody here.
        let wait = tern_migrate::wall::wait(talk.wall, tern_migrate::wall::now());
        std::thread::sleep(wait.inspect_err(|behind| tracing::warn!(%pid, %behind)).unwrap_or_default());
        // The point of no return of a journey home: this life ends here, and no call of its guest is performed
        // any more, whatever becomes of the message that tells it so.
        member.epoch = member.epoch.next();
        member.used = talk.used;
        let peer = member.peer;
        let home = loop {
            let home = match image.check() {
                Ok(()) => self.with_deputy(pid, |m, stopped| m.come_home(stopped, image, talk).map(Some)),
                Err(what) => Err(tern_tracee::Error::Astray { what: what.into(), pid: pid.0 }),
            };
            match home {
                Ok(Some(Homecoming::Soon)) => std::thread::yield_now(),
                home => break home,
            }
        };
        self.tell_peer(peer, pid, &Message::Drop);
        match home {
            Ok(Some(Homecoming::Home(stopped))) => {
                self.report(pid);
                self.let_go(pid, stopped, 0);
            }
            Ok(Some(_)) => self.report(pid),
            Ok(None) => {}
            Err(error) => self.lost(pid, &error),
        }
    }

    /// Where a process' program runs now.
    pub(crate) fn node_of(&self, member: &Member) -> NodeId {
        if member.is_away() { self.peers[member.peer].node } else { self.start.node }
    }

    /// Fetches a process home for a call that only home can make.
    pub(crate) fn fetch(&mut self, pid: HomePid, why: &str) {
        let mut stays = false;
        if !self.members.get(&pid).is_some_and(|m| matches!(m.state, State::Away)) {
            return;
        }
        // A move that somebody waits for, and for which a node is being prepared.
        self.refuse(pid, why);
        let Some(member) = self.members.get_mut(&pid) else { return };
        if member.had_to_come_home() {
            stays = true;
        }
        let from = self.peers[member.peer].node;
        member.reason =
            if stays { format!("{why} (three times within a minute: it stays)") } else { why.to_owned() };
        tracing::info!(%pid, reason = member.reason, "it is fetched home");
        member.task = Some(Task::new(None, from));
        self.begin_home(pid);
    }
}
