//! A process goes out: sent, handed over, known to run; or taken back.

use crate::family::Family;
use crate::leaving::Leaving;
use crate::member::{Member, State};
use crate::out::Outbound;
use tern_ids::HomePid;
use tern_image::content::Shows;
use tern_migrate::message::Message;
use tern_migrate::source::{SendError, Sending};
use tern_migrate::{Phase, fault};
use tern_wire::Link;

impl Family {
    /// Begins to send a standing process to a peer. It runs on meanwhile, or is `held`: one that is at its first
    /// instruction is to make that there.
    pub(crate) fn begin_out(&mut self, pid: HomePid, peer: usize, held: bool) {
        let home = (self.start.node, self.start.id);
        let Some(member) = self.members.get(&pid) else { return };
        let why = match tern_image::process::check(pid.0, std::process::id() as i32) {
            Ok(movable) => movable.and_then(|()| member.check_registers()).err().map(|why| why.to_string()),
            Err(error) => {
                self.wait_on(pid);
                Some(error.to_string())
            }
        };
        if let Some(why) = why {
            self.refuse(pid, &why);
            self.let_go(pid);
            return;
        }
        self.for_guest_of(pid, peer);
        let Some(member) = self.members.get_mut(&pid) else { return };
        match member.prepare(peer, home) {
            Ok(offer) => {
                let sent = self.peers[peer].tell(pid, &Message::Offer(Box::new(offer)), &[]);
                if sent.is_err() {
                    self.lose(peer);
                    self.stay_home(pid, "the link to that node was cut");
                } else if !held
                    && let Some(Err(error)) = self.members.get_mut(&pid).map(Member::run_meanwhile)
                {
                    self.lost(pid, &error);
                }
            }
            Err(error) => {
                // Half prepared: let go of it as it is; what we reserved is only address space. A thread of it may be
                // gone, and not the process: another one executes a program.
                if error.is_gone() {
                    self.wait_on(pid);
                }
                self.refuse(pid, &error.to_string());
                self.let_go(pid);
            }
        }
    }

    /// The move out is off: the process runs on at home, untouched.
    pub(crate) fn stay_home(&mut self, pid: HomePid, why: &str) {
        self.refuse(pid, why);
        let Some(member) = self.members.get_mut(&pid) else { return };
        // Executing a program now would not begin the move again.
        member.state = State::Resident;
        let done = self.halt_at_home(pid).and_then(|stands| match self.members.get_mut(&pid) {
            Some(member) if stands => member.run_on().map(|()| true),
            _ => Ok(false),
        });
        match done {
            Ok(true) => self.let_go(pid),
            Ok(false) => {}
            Err(error) => self.lost(pid, &error),
        }
    }

    /// Works on an outbound process with its link. If the process must stand for that it is brought to a stand, and the
    /// work is done again; unless it executes another program meanwhile, with which the move begins anew.
    pub(crate) fn with_outbound(
        &mut self,
        pid: HomePid,
        mut work: impl FnMut(&mut Outbound, &mut Leaving<'_>, &mut Link) -> Result<bool, SendError>,
    ) {
        loop {
            let company = self.seen_from(pid);
            let Some(member) = self.members.get_mut(&pid) else { return };
            let State::Outbound(mut outbound) = std::mem::replace(&mut member.state, State::Resident) else {
                return;
            };
            let image = outbound.image.take();
            let (ready, objects) = (outbound.ready, &self.objects);
            let (carries, live) = (std::mem::take(&mut outbound.carries), std::mem::take(&mut outbound.live));
            let must_stand = false;
            let mut leaving = Leaving { member, image, company, objects, ready, carries, live, must_stand };
            let done = match self.peers.get_mut(outbound.peer).and_then(|p| p.link.as_mut()) {
                Some(link) => work(&mut outbound, &mut leaving, link),
                None => Err(tern_wire::LinkError::Closed.into()),
            };
            let must_stand = leaving.must_stand;
            outbound.image = leaving.image.take();
            outbound.ready = leaving.ready;
            (outbound.carries, outbound.live) = (leaving.carries, leaving.live);
            if let Some(task) = &mut member.task {
                task.bytes = outbound.sending.as_ref().map_or(0, Sending::bytes);
                task.frozen = outbound.sending.as_ref().and_then(|s| s.frozen);
            }
            let peer = outbound.peer;
            member.state = State::Outbound(outbound);
            match done {
                Ok(_) | Err(SendError::Restless) if must_stand => match self.halt_at_home(pid) {
                    Ok(true) => {}
                    Ok(false) => return,
                    Err(error) => return self.lost(pid, &error),
                },
                Ok(_) => return,
                Err(error) => {
                    // It may be in the middle of an exec, of which only its stop will tell.
                    let unclear = matches!(error, SendError::Process(_) | SendError::File(_));
                    if unclear && !member.stands() && matches!(self.halt_at_home(pid), Ok(false)) {
                        return;
                    }
                    self.tell_peer(peer, pid, &Message::Drop);
                    // A thread of it is gone, and not the process: it has executed a program by another one.
                    if matches!(&error, SendError::Process(error) if error.is_gone()) {
                        self.wait_on(pid);
                    }
                    return self.stay_home(pid, &error.to_string());
                }
            }
        }
    }

    pub(crate) fn accepted(&mut self, pid: HomePid) {
        match self.members.get(&pid).map(|m| &m.state) {
            Some(State::Onward(next)) => return self.depart_onward(pid, *next),
            Some(State::Outbound(outbound)) => {
                // It may be the first that this node has accepted.
                self.for_guest_of(pid, outbound.peer);
            }
            _ => {}
        }
        self.with_outbound(pid, |outbound, leaving, link| {
            if outbound.source.is_some() {
                outbound.sending = Sending::begin(&mut outbound.source, leaving, link)?;
            }
            Ok(false)
        });
    }

    /// From now on a process's guest is with this peer, or on its way there: its files are what that node has or shows.
    pub(crate) fn for_guest_of(&mut self, pid: HomePid, peer: usize) {
        let peer = &self.peers[peer];
        let shown = self.start.serves_files && peer.shows_files;
        let shows = if shown { Shows::Of(self.start.node) } else { Shows::Nothing };
        if let Some(member) = self.members.get_mut(&pid) {
            member.files.for_guest(peer.node, shows);
        }
    }

    pub(crate) fn wanted(&mut self, pid: HomePid, indices: &[u32]) {
        self.with_outbound(pid, |outbound, leaving, _link| match &mut outbound.sending {
            Some(sending) => sending.wanted(indices, leaving).map(|()| false),
            None => Ok(false),
        });
    }

    /// Sends on, for every process on its way out.
    pub(crate) fn go_on_sending(&mut self) {
        let outbound: Vec<HomePid> =
            self.members.values().filter(|m| matches!(m.state, State::Outbound(_))).map(|m| m.pid).collect();
        for pid in outbound {
            self.complete_company(pid);
            self.with_outbound(pid, |outbound, leaving, link| match &mut outbound.sending {
                Some(sending) => sending.advance(leaving, link),
                None => Ok(false),
            });
        }
    }

    /// The destination holds everything: **the point of no return**. From here on the new life's calls are
    /// performed, and the old one's, if there were any, are not. Of those that leave together it is there when the last
    /// has arrived.
    pub(crate) fn hand_over(&mut self, pid: HomePid) {
        fault::point("home", Phase::HandOver);
        let Some(member) = self.members.get_mut(&pid) else { return };
        if let State::Onward(next) = member.state {
            member.revived = false;
            let old = std::mem::replace(&mut member.peer, next);
            member.epoch = member.offered;
            let epoch = member.epoch;
            member.state = State::Crossing(old);
            self.for_guest_of(pid, next);
            self.tell_peer(next, pid, &Message::Go(epoch));
            // What the old life may have heard of too late to take it along.
            self.signal_again(pid);
            return;
        }
        let State::Outbound(outbound) = &mut member.state else { return };
        outbound.arrived = true;
        self.hand_over_together(pid);
    }

    /// Hands those over that leave with a process, if the last has arrived.
    pub(crate) fn hand_over_together(&mut self, pid: HomePid) {
        let Some(State::Outbound(outbound)) = self.members.get(&pid).map(|m| &m.state) else { return };
        let peer = outbound.peer;
        let company = self.company(pid);
        let mut lives = Vec::with_capacity(company.len());
        for pid in &company {
            let Some(member) = self.members.get_mut(pid) else { return };
            match &member.state {
                State::Outbound(outbound) if outbound.arrived => {}
                _ => return,
            }
            lives.push((*pid, member.offered));
        }
        let is_ready = |m: &Member| matches!(&m.state, State::Outbound(o) if o.image.is_some() && m.stands());
        if !company.iter().filter_map(|pid| self.members.get(pid)).all(is_ready) {
            return self.stay_home(pid, "its node was ready before it was sent");
        }
        // Said before all is done here, for which the process would stand still: what its guest asks for waits in the
        // link. Nothing that it has done until then is seen by anybody, so all can still be taken back.
        let mut told = Ok(());
        for pid in &company {
            // They are there before anything is that tells of them.
            match self.members.get_mut(pid).map(Member::take_waiting) {
                Some(Ok(signals)) => {
                    for (tid, signal) in signals {
                        told = told.and_then(|()| self.peers[peer].tell(tid, &signal, &[]));
                    }
                }
                Some(Err(error)) => {
                    self.tell_peer(peer, *pid, &Message::Drop);
                    return self.stay_home(*pid, &error.to_string());
                }
                None => return,
            }
        }
        for pid in &company {
            let Some(member) = self.members.get_mut(pid) else { return };
            (member.revived, member.epoch) = (false, member.offered);
            member.job_stopped = member.stands_stopped();
            if member.job_stopped {
                told = told.and_then(|()| self.peers[peer].tell(*pid, &Message::Stop(true), &[]));
            }
        }
        let go = match *lives {
            [(_, epoch)] => Message::Go(epoch),
            _ => Message::GoTogether(lives),
        };
        let told = told.and_then(|()| self.peers[peer].tell(pid, &go, &[]));
        // If one cannot become a deputy all stay, and none of them is on its way out any more; if it is gone, all others go.
        company.into_iter().for_each(|pid| self.make_deputy(pid));
        if told.is_err() {
            self.lose(peer);
        }
        fault::point("home", Phase::Resume);
    }

    /// A process whose guest has been told to go becomes its deputy. If it cannot, everything is taken back.
    fn make_deputy(&mut self, pid: HomePid) {
        let bell = self.bell.clone();
        let Some(member) = self.members.get_mut(&pid) else { return };
        let state = std::mem::replace(&mut member.state, State::Resident);
        let State::Outbound(mut outbound) = state else {
            member.state = state;
            return;
        };
        let Some(image) = outbound.image.take() else { return };
        let peer = outbound.peer;
        if let Err((error, back)) = member.become_deputy(&image, &bell) {
            tracing::error!(%pid, %error, "a deputy could not be made");
            member.epoch = member.epoch.next();
            self.tell_peer(peer, pid, &Message::Drop);
            if back {
                self.refuse(pid, &error.to_string());
                self.let_go(pid);
            } else {
                self.lost(pid, &error);
            }
            return;
        }
        member.peer = peer;
        outbound.image = Some(image);
        member.state = State::Going(outbound);
    }

    /// The guest runs, and so do all that went together with it: they were told so in one message.
    pub(crate) fn running(&mut self, pid: HomePid) {
        for pid in self.company(pid) {
            self.one_runs(pid);
        }
    }

    fn one_runs(&mut self, pid: HomePid) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        match std::mem::replace(&mut member.state, State::Away) {
            State::Going(outbound) => {
                // The guest does not wait for this: it may even have called already, and is served next.
                self.report(pid);
                self.watch_anew(pid);
                let Some(image) = outbound.image else { return };
                let freed = self.with_process(pid, |member, stopped| member.free_memory(stopped, &image));
                if let Err(error) = freed {
                    self.lost(pid, &error);
                }
            }
            State::Crossing(old) => {
                self.tell_peer(old, pid, &Message::Drop);
                self.report(pid);
                self.watch_anew(pid);
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
        let back = self.stand_all(pid).and_then(|stands| {
            let Some(member) = self.members.get_mut(&pid).filter(|_| stands) else { return Ok(false) };
            let State::Going(outbound) = std::mem::replace(&mut member.state, State::Resident) else {
                return Ok(false);
            };
            let astray =
                || tern_tracee::Error::Astray { what: "revoked without an image".into(), pid: pid.0 };
            let image = outbound.image.ok_or_else(astray)?;
            member.revoke(&image).map(|()| true)
        });
        match back {
            Ok(true) => {
                self.refuse(pid, why);
                self.let_go(pid);
            }
            Ok(false) => {}
            Err(error) => self.lost(pid, &error),
        }
    }
}
