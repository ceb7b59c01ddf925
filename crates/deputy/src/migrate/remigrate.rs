//! A process that is away moves to another node, or comes home.

use crate::links::peers::PeerId;
use crate::migrate::movable::check_rights;
use crate::migrate::requests::OUT_OF_REACH;
use crate::process::Process;
use crate::process::state::{MigrationTask, State};
use crate::shim::{RETRY_TIMEOUT, Shim};
use std::time::Duration;
use tern_ids::HomePid;
use tern_image::Rights;
use tern_migrate::departure_failure::DepartureFailure;
use tern_migrate::message::{Departure, Message};
use tern_migrate::{Phase, fault};

impl Shim {
    pub(crate) fn begin_remigration(&mut self, pid: HomePid, next: PeerId) {
        let home = (self.start.node, self.start.id);
        let Some(process) = self.processes.get_mut(&pid) else { return };
        if let Err(why) = check_rights(Rights::of(pid.0), process.rights) {
            return self.abort_task(pid, &why.to_string());
        }
        match process.offer(home) {
            Ok(offer) => {
                process.state = State::Remigrating(next);
                self.send_to_peer(next, pid, &Message::Offer(Box::new(offer)));
            }
            Err(error) => self.abort_task(pid, &error.to_string()),
        }
    }

    pub(crate) fn depart_to_next_node(&mut self, pid: HomePid, next: PeerId) {
        let Some(epoch) = self
            .processes
            .get(&pid)
            .filter(|process| process.task.is_some())
            .map(|process| process.offered_epoch)
        else {
            return;
        };
        if self.sharers_away(pid).len() > 1 {
            self.send_to_peer(next, pid, &Message::Drop);
            if let Some(process) = self.processes.get_mut(&pid) {
                process.state = State::Away;
            }
            // It moves by way of home, with its child.
            self.requeue_task(pid);
            return self.abort_task(pid, "busy: it shares memory with a child by now; try again");
        }
        let Some(peer) = self.peers.get(next) else { return };
        let (address, shim, fingerprint) = (peer.address.clone(), peer.shim, peer.fingerprint);
        let departure = Departure::Onward { epoch, address, shim, fingerprint };
        let is_linked = self.processes.get(&pid).is_some_and(|one| self.peers.link(one.peer).is_some());
        if !is_linked {
            // The link was cut while the next node was prepared: the request would be lost.
            return self.departure_failed(pid, OUT_OF_REACH);
        }
        self.send(pid, &Message::Depart(departure));
    }

    /// The next node was lost before its guest can have done anything: the old guest gets a new
    /// epoch.
    pub(crate) fn cancel_switch(&mut self, pid: HomePid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let State::Switching(old) = std::mem::replace(&mut process.state, State::Away) else { return };
        process.peer = old;
        process.offered_epoch = process.offered_epoch.max(process.epoch).next();
        // The old guest is frozen under an earlier epoch. If it is out of reach too, it receives
        // the new epoch when it reports on the next link.
        process.old_guest_has_new_epoch = true;
        process.epoch = process.offered_epoch;
        let epoch = process.epoch;
        self.set_guest_node(pid, old);
        self.send(pid, &Message::Go(epoch));
        self.resend_signals(pid);
        self.abort_task(pid, "the link to that node was cut");
        self.resend_thresholds(pid);
    }

    pub(crate) fn begin_return(&mut self, pid: HomePid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let Some(migration) = process.task.as_ref().map(|t| t.migration) else { return };
        if !matches!(process.state, State::Returning(_)) {
            process.state = State::Returning(Box::default());
        }
        if !self.leave_behind(pid, &self.sharers_away(pid), migration) {
            return self.await_long_calls(pid);
        }
        let together = self.return_with_sharers(pid, migration);
        // The process itself receives the message last. Until then it does not depart, and no
        // process of the group can complete its journey.
        let others = together.iter().filter(|other| **other != pid);
        for to in others.chain([&pid]) {
            // This is also the repetition for one that was busy.
            if let Some(process) = self.processes.get_mut(to) {
                process.waits.end_retry();
            }
            let together = together.clone();
            self.send(*to, &Message::Depart(Departure::Home { migration, group: together }));
        }
        if fault::is_requested("home", Phase::Prepare, "repeat")
            && let Some(process) = self.processes.get_mut(&pid)
        {
            process.waits.retry_after(Duration::from_millis(1));
        }
    }

    /// Fetches a process home for an operation that only home can do.
    pub(crate) fn fetch_home(&mut self, pid: HomePid, why: &str) {
        let Some(process) =
            self.processes.get_mut(&pid).filter(|process| matches!(process.state, State::Away))
        else {
            return;
        };
        let stays = process.home_record.record_forced_return();
        // A move that a caller waits for, with a destination being prepared, continues from home.
        if !stays {
            self.requeue_task(pid);
        }
        self.abort_task(pid, why);
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let reason =
            if stays { format!("{why} (three times within a minute: it stays)") } else { why.to_owned() };
        tracing::info!(%pid, reason, "it is fetched home");
        process.home_record.set_reason(reason);
        self.return_unasked(pid);
    }

    /// Begins a journey home that no caller waits for.
    pub(crate) fn return_unasked(&mut self, pid: HomePid) {
        let home = self.start.node;
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let from = self.peers.node(process.peer).unwrap_or(home);
        process.task = Some(MigrationTask::new(None, from));
        self.begin_return(pid);
    }

    /// The guest did not depart, and continues where it is.
    pub(crate) fn departure_failed(&mut self, pid: HomePid, why: impl Into<DepartureFailure>) {
        let why = why.into();
        self.drop_parts(pid);
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let patient = process.task.as_ref().is_some_and(|t| t.started_at.elapsed() < RETRY_TIMEOUT);
        if matches!(why, DepartureFailure::Busy(_))
            && patient
            && matches!(process.state, State::Remigrating(_) | State::Returning(_))
        {
            process.waits.retry_after(Duration::from_millis(10));
            return;
        }
        match std::mem::replace(&mut process.state, State::Away) {
            State::Remigrating(next) => self.send_to_peer(next, pid, &Message::Drop),
            State::Returning(_) => {}
            other => {
                process.state = other;
                return;
            }
        }
        self.abort_task(pid, &why.to_string());
        if let Some(process) = self.processes.get_mut(&pid).filter(|process| process.is_left_behind()) {
            process.waits.retry_after(Duration::from_secs(1));
        }
    }

    /// Asks guests that were busy to depart again.
    pub(crate) fn retry_busy_guests(&mut self) {
        let due = |process: &&Process| process.waits.is_retry_due();
        let due: Vec<HomePid> = self.processes.values().filter(due).map(|process| process.pid).collect();
        for pid in due {
            let Some(process) = self.processes.get_mut(&pid) else { continue };
            process.waits.end_retry();
            match process.state {
                // With a new offer, so that parts sent under the previous epoch are not mixed in.
                State::Remigrating(next) => self.begin_remigration(pid, next),
                State::Returning(_) => self.begin_return(pid),
                State::Away => self.return_left_behind(pid),
                _ => {}
            }
        }
    }
}
