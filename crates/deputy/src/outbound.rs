//! A process goes out: sent, handed over, known to run; or taken back.

use crate::family::Family;
use crate::member::State;
use crate::out::Leaving;
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_migrate::source::{SendError, Sending};
use tern_migrate::{Phase, fault};
use tern_tracee::stop::Stopped;
use tern_wire::Link;

impl Family {
    /// Begins to send a stopped process to a peer. It runs on meanwhile, or is `held`: one that is at its first
    /// instruction is to make that there.
    pub(crate) fn begin_out(&mut self, pid: HomePid, stopped: Stopped, peer: usize, held: bool) {
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
                    self.members.get_mut(&pid).map_or(Ok(()), |m| m.run_meanwhile(stopped, held))
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
    pub(crate) fn with_outbound(
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
}
