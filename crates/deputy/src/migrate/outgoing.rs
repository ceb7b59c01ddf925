//! A process leaves home: its sending, the hand-over, and the way back if that fails.

use crate::links::peers::PeerId;
use crate::migrate::arrival::MAX_BLOCKED;
use crate::migrate::movable::check_movable;
use crate::migrate::source::OutgoingSource;
use crate::process::Process;
use crate::process::state::{Outgoing, State};
use crate::shim::Shim;
use crate::stops::quiesce::Quiesced;
use tern_ids::HomePid;
use tern_image::content::MountableFiles;
use tern_migrate::departure_failure::Busy;
use tern_migrate::message::Message;
use tern_migrate::source::{ProcessSender, SendError};
use tern_migrate::{Phase, fault};
use tern_wire::Link;

impl Shim {
    /// Begins to send a stopped process to a peer. The process runs while it is sent, unless it
    /// `stays_stopped`. A process stays stopped if it is at its first instruction, which it is to
    /// execute at the destination, or if it joins a group that is stopped already.
    pub(crate) fn begin_outgoing(&mut self, pid: HomePid, peer: PeerId, stays_stopped: bool) {
        let (home, waker) = ((self.start.node, self.start.id), self.waker.clone());
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let movable =
            check_movable(pid.0, std::process::id() as i32, process.rights).and_then(|movable| match movable
                .and_then(|()| process.check_registers())
            {
                Ok(()) => process.check_code(),
                Err(why) => Ok(Err(why)),
            });
        let why = match movable {
            Ok(movable) => movable.err().map(|why| why.to_string()),
            Err(error) => {
                self.requeue_task(pid);
                Some(error.to_string())
            }
        };
        if let Some(why) = why {
            self.abort_task(pid, &why);
            self.detach(pid);
            return;
        }
        self.set_guest_node(pid, peer);
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let prepared = process.prepare(peer, home);
        let prepared = match prepared.and_then(|offer| Ok((offer, process.check_modes()?))) {
            Ok((_, Err(why))) => return self.cancel_outgoing(pid, &why.to_string()),
            Ok((offer, Ok(()))) => process.take_over_waits(&waker).map(|waits| (offer, waits)),
            Err(error) => Err(error),
        };
        match prepared {
            Ok((offer, waits)) => {
                waits.into_iter().for_each(|wait| self.continue_wait(wait));
                let sent = self.peers.send(peer, pid, &Message::Offer(Box::new(offer)));
                if sent.is_err() {
                    self.peer_lost(peer);
                    self.cancel_outgoing(pid, "the link to that node was cut");
                } else if !stays_stopped
                    && let Some(Err(error)) = self.processes.get_mut(&pid).map(Process::resume_while_sending)
                {
                    self.handle_error(pid, &error);
                }
            }
            Err(error) => {
                // The process is detached half prepared: a reserved range is only address space. If
                // only a thread is gone, another one executes a program, and the move begins again.
                if error.is_gone() {
                    self.requeue_task(pid);
                }
                self.abort_task(pid, &error.to_string());
                self.detach(pid);
            }
        }
    }

    /// Cancels a move that has not been handed over: the process continues at home.
    pub(crate) fn cancel_outgoing(&mut self, pid: HomePid, why: &str) {
        self.abort_task(pid, why);
        let Some(process) = self.processes.get_mut(&pid) else { return };
        // An exec from now on must not begin the move again.
        process.state = State::Resident;
        process.waits.unblocked();
        self.release(pid);
    }

    /// Runs `work` on a departing process and its link. If the process must be stopped for the work
    /// it is quiesced and the work is repeated, unless it executes a program meanwhile: then the
    /// move begins again.
    pub(crate) fn with_outgoing(
        &mut self,
        pid: HomePid,
        mut work: impl FnMut(&mut Outgoing, &mut OutgoingSource<'_>, &mut Link) -> Result<bool, SendError>,
    ) {
        loop {
            let group = self.group_progress(pid);
            let Some(process) = self.processes.get_mut(&pid) else { return };
            let State::Outgoing(mut outgoing) = std::mem::replace(&mut process.state, State::Resident) else {
                return;
            };
            let image = outgoing.image.take();
            let (ready, objects) = (outgoing.ready, self.shared_memory.objects());
            let (carried_objects, live_objects) =
                (std::mem::take(&mut outgoing.carried_objects), std::mem::take(&mut outgoing.live_objects));
            let (must_stop, must_measure, measured_at) = (false, false, outgoing.measured_at);
            let mut source = OutgoingSource {
                process,
                image,
                group,
                waker: &self.waker,
                objects,
                ready,
                carried_objects,
                live_objects,
                must_stop,
                measured_at,
                must_measure,
            };
            let done = match self.peers.get_mut(outgoing.peer).and_then(|p| p.link.as_mut()) {
                Some(link) => work(&mut outgoing, &mut source, link),
                None => Err(tern_wire::LinkError::Closed.into()),
            };
            let (must_stop, must_measure) = (source.must_stop, source.must_measure);
            outgoing.image = source.image.take();
            outgoing.ready = source.ready;
            (outgoing.carried_objects, outgoing.live_objects) = (source.carried_objects, source.live_objects);
            if let Some(task) = &mut process.task {
                task.bytes = outgoing.sending.as_ref().map_or(0, ProcessSender::bytes);
                task.frozen_at = outgoing.sending.as_ref().and_then(|s| s.frozen);
            }
            let peer = outgoing.peer;
            process.state = State::Outgoing(outgoing);
            match done {
                Ok(_) | Err(SendError::AddressSpaceBusy) if must_stop => {
                    let quiesced = self.quiesce_resident(pid);
                    let Some(process) = self.processes.get_mut(&pid) else { return };
                    match quiesced {
                        Ok(Quiesced::Stopped) => process.waits.unblocked(),
                        Ok(Quiesced::Gone) => return,
                        // The main loop tries again.
                        Ok(Quiesced::Blocked) if process.waits.set_blocked(true) < MAX_BLOCKED => return,
                        Ok(Quiesced::Blocked) => {
                            if let Err(error) = process.resume_at_home() {
                                self.handle_error(pid, &error);
                            }
                            self.send_to_peer(peer, pid, &Message::Drop);
                            self.requeue_task(pid);
                            return self.cancel_outgoing(pid, Busy::UninterruptibleCall.reason());
                        }
                        Err(error) => return self.handle_error(pid, &error),
                    }
                }
                Ok(_) if must_measure => return self.measure_waits(pid),
                Ok(_) => return,
                Err(error) => {
                    // It may be in the middle of an exec, which only its exec stop reveals.
                    let unclear = matches!(error, SendError::Process(_) | SendError::File(_));
                    if unclear
                        && !process.is_stopped()
                        && matches!(self.quiesce_resident(pid), Ok(Quiesced::Gone))
                    {
                        return;
                    }
                    self.send_to_peer(peer, pid, &Message::Drop);
                    // If only a thread is gone, another one has executed a program, and the move
                    // begins again.
                    if matches!(&error, SendError::Process(error) if error.is_gone()) {
                        self.requeue_task(pid);
                    }
                    return self.cancel_outgoing(pid, &error.to_string());
                }
            }
        }
    }

    pub(crate) fn handle_accepted(&mut self, pid: HomePid) {
        match self.processes.get(&pid).map(|process| &process.state) {
            Some(State::Remigrating(next)) => return self.depart_to_next_node(pid, *next),
            Some(State::Outgoing(outgoing)) => {
                // The peer reports with its first `Accepted` whether it mounts home's files.
                self.set_guest_node(pid, outgoing.peer);
            }
            _ => {}
        }
        if let Some(State::Outgoing(outgoing)) =
            self.processes.get_mut(&pid).map(|process| &mut process.state)
        {
            outgoing.is_accepted = true;
        }
        self.advance_outgoing(pid);
    }

    /// Sends a process that its next node has accepted, as far as the link has room.
    fn advance_outgoing(&mut self, pid: HomePid) {
        self.with_outgoing(pid, |outgoing, source, link| {
            if outgoing.is_accepted && outgoing.source.is_some() {
                outgoing.sending = ProcessSender::begin(&mut outgoing.source, source, link)?;
            }
            match &mut outgoing.sending {
                Some(sending) => sending.advance(source, link),
                None => Ok(false),
            }
        });
    }

    /// Sets the node that holds, or will hold, a process's guest. The node determines which files
    /// need not be sent.
    pub(crate) fn set_guest_node(&mut self, pid: HomePid, peer: PeerId) {
        let Some(peer) = self.peers.get(peer) else { return };
        let shown = self.start.serves_files && peer.mounts_home_files;
        let shows = if shown { MountableFiles::Of(self.start.node) } else { MountableFiles::Nothing };
        if let Some(process) = self.processes.get_mut(&pid) {
            process.files.set_guest(peer.node, shows);
        }
    }

    pub(crate) fn handle_file_request(&mut self, pid: HomePid, indices: &[u32]) {
        self.with_outgoing(pid, |outgoing, _source, _link| match &mut outgoing.sending {
            Some(sending) => sending.handle_file_request(indices).map(|()| false),
            None => Ok(false),
        });
    }

    /// Continues to send every process that leaves.
    pub(crate) fn continue_sending(&mut self) {
        let outgoing: Vec<HomePid> = self
            .processes
            .values()
            .filter(|process| matches!(process.state, State::Outgoing(_)))
            .map(|process| process.pid)
            .collect();
        for pid in outgoing {
            self.check_group_complete(pid);
            self.advance_outgoing(pid);
        }
    }

    /// The destination holds everything: **the point of no return**. From here on the calls of the
    /// new epoch are performed, and those of the old one, if any, are not. A group is handed over
    /// when its last process has arrived.
    pub(crate) fn hand_over(&mut self, pid: HomePid) {
        fault::point("home", Phase::HandOver);
        let Some(process) = self.processes.get_mut(&pid) else { return };
        if let State::Remigrating(next) = process.state {
            process.old_guest_has_new_epoch = false;
            let old = std::mem::replace(&mut process.peer, next);
            process.epoch = process.offered_epoch;
            let epoch = process.epoch;
            process.state = State::Switching(old);
            self.set_guest_node(pid, next);
            self.send_to_peer(next, pid, &Message::Go(epoch));
            // Signals that the old guest may have received too late to pass on.
            self.resend_signals(pid);
            return;
        }
        let State::Outgoing(outgoing) = &mut process.state else { return };
        outgoing.arrived = true;
        self.hand_over_group(pid);
    }

    /// Hands over the group of a process if the group's last process has arrived.
    pub(crate) fn hand_over_group(&mut self, pid: HomePid) {
        let Some(State::Outgoing(outgoing)) = self.processes.get(&pid).map(|process| &process.state) else {
            return;
        };
        let peer = outgoing.peer;
        let group = self.group_of(pid);
        let mut epochs = Vec::with_capacity(group.len());
        for pid in &group {
            let Some(process) = self.processes.get_mut(pid) else { return };
            match &process.state {
                State::Outgoing(outgoing) if outgoing.arrived => {}
                _ => return,
            }
            epochs.push((*pid, process.offered_epoch));
        }
        let is_ready = |process: &Process| matches!(&process.state, State::Outgoing(o) if o.image.is_some() && process.is_stopped());
        if !group.iter().filter_map(|pid| self.processes.get(pid)).all(is_ready) {
            return self.cancel_outgoing(pid, "its node reported it ready before it was sent");
        }
        // `Go` is sent before the processes become deputies, so that the guests need not wait for
        // that. Their first calls wait in the link. Until these are performed nothing that the
        // guests do has an effect, so everything can be revoked.
        let mut sent = Ok(());
        for pid in &group {
            // Pending signals must reach the guest before anything that may reveal that they
            // were sent.
            match self.processes.get_mut(pid).map(Process::take_pending_signals) {
                Some(Ok(signals)) => {
                    for (tid, signal) in signals {
                        sent = sent.and_then(|()| self.peers.send(peer, tid, &signal));
                    }
                }
                Some(Err(error)) => {
                    self.send_to_peer(peer, *pid, &Message::Drop);
                    return self.cancel_outgoing(*pid, &error.to_string());
                }
                None => return,
            }
        }
        for pid in &group {
            let Some(process) = self.processes.get_mut(pid) else { return };
            // Only what it mapped when it was stopped: its guest has nothing else. Until now it had all
            // that the group shares, or that it mapped when it was seized.
            if let State::Outgoing(outgoing) = &process.state {
                process.files.set_objects(&outgoing.live_objects);
            }
            (process.old_guest_has_new_epoch, process.epoch) = (false, process.offered_epoch);
            process.job_stopped = process.is_job_stopped();
            if process.job_stopped {
                sent = sent.and_then(|()| self.peers.send(peer, *pid, &Message::Stop(true)));
            }
        }
        let go = match *epochs {
            [(_, epoch)] => Message::Go(epoch),
            _ => Message::GoGroup(epochs),
        };
        let sent = sent.and_then(|()| self.peers.send(peer, pid, &go));
        // If one cannot become a deputy, the move of the whole group is aborted, and hand-overs
        // made before are revoked. If one is gone, the others move.
        group.into_iter().for_each(|pid| self.make_deputy(pid));
        if sent.is_err() {
            self.peer_lost(peer);
        }
        fault::point("home", Phase::Resume);
    }

    /// Turns a process whose guest was sent `Go` into a deputy. If that fails everything is
    /// revoked.
    fn make_deputy(&mut self, pid: HomePid) {
        let waker = self.waker.clone();
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let state = std::mem::replace(&mut process.state, State::Resident);
        let State::Outgoing(mut outgoing) = state else {
            process.state = state;
            return;
        };
        let Some(image) = outgoing.image.take() else { return };
        let peer = outgoing.peer;
        if let Err((error, back)) = process.become_deputy(&image.0, &waker) {
            tracing::error!(%pid, %error, "a deputy could not be made");
            process.epoch = process.epoch.next();
            self.send_to_peer(peer, pid, &Message::Drop);
            if back {
                self.abort_task(pid, &error.to_string());
                self.detach(pid);
            } else {
                self.handle_error(pid, &error);
            }
            return;
        }
        process.peer = peer;
        outgoing.image = Some(image);
        process.state = State::HandedOver(outgoing);
    }

    /// The guest runs, and so does its whole group: one message has started them all.
    pub(crate) fn guest_running(&mut self, pid: HomePid) {
        for pid in self.group_of(pid) {
            self.confirm_running(pid);
        }
    }

    fn confirm_running(&mut self, pid: HomePid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        match std::mem::replace(&mut process.state, State::Away) {
            State::HandedOver(outgoing) => {
                // The guest does not wait for this. Its calls, if any, are served next.
                self.complete_task(pid);
                self.resend_thresholds(pid);
                let Some(image) = outgoing.image else { return };
                // If no thread can stop, since each is in a call that was pending when the process
                // left, the memory is kept.
                let freed = self
                    .with_any_thread(pid, None, |process, stopped| process.free_memory(stopped, &image.0));
                if let Err(error) = freed {
                    self.handle_error(pid, &error);
                }
            }
            State::Switching(old) => {
                self.send_to_peer(old, pid, &Message::Drop);
                self.complete_task(pid);
                self.resend_thresholds(pid);
            }
            other => process.state = other,
        }
    }

    /// Revokes a hand-over: a link broke, or a node refused, before the guest can have done
    /// anything.
    pub(crate) fn revoke(&mut self, pid: HomePid, why: &str) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let State::HandedOver(outgoing) = &mut process.state else { return };
        let image = outgoing.image.take();
        // From here on all messages of its guest are ignored.
        process.epoch = process.epoch.next();
        let Some(image) = image else {
            let what = "revoked without an image".into();
            return self.handle_error(pid, &tern_tracee::Error::Inconsistent { what, pid: pid.0 });
        };
        process.state = State::Revoked(image, why.to_owned());
        process.peer = PeerId::NONE;
        self.continue_revocation(pid);
    }

    /// Continues the revocations for which a deputy thread has to stop: a thread may be in a call
    /// that was pending when the process left.
    pub(crate) fn continue_revocations(&mut self) {
        let is_revoked = |process: &&Process| matches!(process.state, State::Revoked(..));
        let revoked: Vec<HomePid> = self.processes.values().filter(is_revoked).map(|one| one.pid).collect();
        revoked.into_iter().for_each(|pid| self.continue_revocation(pid));
    }

    fn continue_revocation(&mut self, pid: HomePid) {
        match self.quiesce_deputy(pid) {
            Ok(Quiesced::Stopped) => {}
            Ok(Quiesced::Blocked | Quiesced::Gone) => return,
            Err(error) => return self.handle_error(pid, &error),
        }
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let State::Revoked(image, why) = std::mem::replace(&mut process.state, State::Away) else { return };
        match self.restore_process(pid, &image.0, &image.1) {
            Ok(Some(remainders)) => {
                self.abort_task(pid, &why);
                self.detach_with_remainders(pid, remainders);
            }
            Ok(None) => {}
            Err(error) => self.handle_error(pid, &error),
        }
    }
}
