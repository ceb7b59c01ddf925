//! A process that is away goes on to another node, or comes home.

use crate::back::Homecoming;
use crate::family::{Family, PATIENCE};
use crate::member::{Member, State, Task};
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_migrate::message::{Departure, Message};
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
        let Some(migration) = self.members.get(&pid).and_then(|m| m.task.as_ref()).map(|t| t.migration)
        else {
            return;
        };
        let peer = &self.peers[next];
        let (address, shim, fingerprint) = (peer.address.clone(), peer.shim, peer.fingerprint);
        let departure = Departure::Onward { migration, address, shim, fingerprint };
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
        self.tell(pid, &Message::Go(epoch));
        self.signal_again(pid);
        self.refuse(pid, "the link to that node was cut");
    }

    pub(crate) fn begin_home(&mut self, pid: HomePid) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        let Some(migration) = member.task.as_ref().map(|t| t.migration) else { return };
        member.state = State::Inbound(Box::default());
        self.tell(pid, &Message::Depart(Departure::Home(migration)));
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
            Ok(Some(Homecoming::Lingers(asked))) => {
                self.report(pid);
                match asked.map(|request| self.post(pid, *request)) {
                    Some(Ok(true)) => self.finish_lingering(pid),
                    Some(Err(errno)) => {
                        let what = format!("the rest of its transfer cannot be made here: error {errno}");
                        self.lost(pid, &tern_tracee::Error::Astray { what, pid: pid.0 });
                    }
                    Some(Ok(false)) | None => {}
                }
            }
            Ok(Some(Homecoming::Soon)) => {}
            Ok(None) => {}
            Err(error) => self.lost(pid, &error),
        }
    }
}
