//! A process that is away goes on to another node, or comes home.

use crate::family::{Family, PATIENCE};
use crate::member::{Member, State, Task};
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_image::ProcessImage;
use tern_migrate::message::{Conversation, Departure, Message};
use tern_migrate::{Phase, fault};

impl Family {
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

    pub(crate) fn depart_onward(&mut self, pid: HomePid, next: usize) {
        let Some(life) = self.members.get(&pid).filter(|m| m.task.is_some()).map(|m| m.offered) else {
            return;
        };
        if self.sharing_away(pid).len() > 1 {
            self.tell_peer(next, pid, &Message::Drop);
            if let Some(member) = self.members.get_mut(&pid) {
                member.state = State::Away;
            }
            return self.refuse(pid, "busy: it shares memory with a child by now; try again");
        }
        let peer = &self.peers[next];
        let (address, shim, fingerprint) = (peer.address.clone(), peer.shim, peer.fingerprint);
        let departure = Departure::Onward { life, address, shim, fingerprint };
        self.tell(pid, &Message::Depart(departure));
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
        self.for_guest_of(pid, old);
        self.tell(pid, &Message::Go(epoch));
        self.signal_again(pid);
        self.refuse(pid, "the link to that node was cut");
        self.watch_anew(pid);
    }

    pub(crate) fn begin_home(&mut self, pid: HomePid) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let Some(migration) = member.task.as_ref().map(|t| t.migration) else { return };
        if !matches!(member.state, State::Inbound(_)) {
            member.state = State::Inbound(Box::default());
        }
        let together = self.bring_along(pid, migration);
        // Itself last: until then it does not depart, and none of them is ready without it.
        let others = together.iter().filter(|other| **other != pid);
        for to in others.chain([&pid]) {
            let together = together.clone();
            self.tell(*to, &Message::Depart(Departure::Home { migration, together }));
        }
    }

    /// Fetches a process home for a call that only home can make.
    pub(crate) fn fetch(&mut self, pid: HomePid, why: &str) {
        let Some(member) = self.members.get_mut(&pid).filter(|m| matches!(m.state, State::Away)) else {
            return;
        };
        let stays = member.had_to_come_home();
        // A move that somebody waits for, and for which a node is being prepared, goes on from home.
        if !stays {
            self.wait_on(pid);
        }
        self.refuse(pid, why);
        let Some(member) = self.members.get_mut(&pid) else { return };
        let from = self.peers[member.peer].node;
        member.reason =
            if stays { format!("{why} (three times within a minute: it stays)") } else { why.to_owned() };
        tracing::info!(%pid, reason = member.reason, "it is fetched home");
        member.task = Some(Task::new(None, from));
        self.begin_home(pid);
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
                // Offered anew: what it had sent of the life before is not taken for this one's.
                State::Onward(next) => self.begin_onward(pid, next),
                State::Inbound(_) => self.begin_home(pid),
                _ => {}
            }
        }
    }

    /// Everything of an inbound process is here. It waits for those that come with it.
    pub(crate) fn arrived_home(&mut self, pid: HomePid, image: &ProcessImage, talk: &Conversation) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let State::Inbound(inbound) = &mut member.state else { return };
        inbound.arrived = Some(Box::new((image.clone(), talk.clone())));
        self.take_home_together(pid);
    }

    /// Takes those home that come with a process, if the last has arrived.
    pub(crate) fn take_home_together(&mut self, pid: HomePid) {
        let company = self.company(pid);
        let arrived = |m: &Member| matches!(&m.state, State::Inbound(inbound) if inbound.arrived.is_some());
        if company.iter().filter_map(|pid| self.members.get(pid)).all(arrived) {
            company.into_iter().for_each(|pid| self.take_home(pid));
        }
    }

    fn take_home(&mut self, pid: HomePid) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let State::Inbound(inbound) = &mut member.state else { return };
        let Some(arrived) = inbound.arrived.take() else { return };
        let (image, talk) = (&arrived.0, &arrived.1);
        if let Some(task) = &mut member.task {
            task.bytes = inbound.bytes;
            task.frozen = Instant::now().checked_sub(Duration::from_micros(talk.frozen_us));
        }
        fault::point("home", Phase::HandOver);
        // A clock that somebody has set back here while the process was away goes back for everybody here.
        if let Err(behind) = tern_migrate::wall::reach(talk.wall) {
            tracing::warn!(%pid, %behind);
        }
        // The point of no return of a journey home: this life ends here, and no call of its guest is performed
        // any more, whatever becomes of the message that tells it so.
        member.epoch = member.epoch.next();
        member.lent = false;
        member.used = talk.used;
        member.shares =
            image.threads.iter().zip(&talk.talks).map(|(thread, talk)| (thread.tid, talk.used)).collect();
        let peer = member.peer;
        let home = self.come_home(pid, image, talk);
        self.tell_peer(peer, pid, &Message::Drop);
        match home {
            Ok(Some(rests)) => {
                self.report(pid);
                self.let_go(pid);
                for (tid, request) in rests {
                    self.make_rest(tid, request);
                }
            }
            Ok(None) => {}
            Err(error) => self.lost(pid, &error),
        }
    }
}
