//! Messages from guest shims.

use crate::links::peers::PeerId;
use crate::process::state::State;
use crate::shim::Shim;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_migrate::message::{Message, ReceivedMessage};

impl Shim {
    pub(crate) fn handle_messages(&mut self) {
        for at in self.peers.ids() {
            // A limited number at a time, so that one guest does not starve the others.
            for _ in 0..64 {
                let Some(peer) = self.peers.get_mut(at) else { break };
                let Some(link) = &mut peer.link else { break };
                let taken = match link.receive() {
                    Ok(Some(frame)) => {
                        let taken = peer.inbox.take(frame).map_err(|e| e.to_string());
                        link.recycle(peer.inbox.spare());
                        taken
                    }
                    Ok(None) => break,
                    Err(error) => Err(error.to_string()),
                };
                match taken {
                    Ok(Some(arrived)) => self.handle_message(at, arrived),
                    Ok(None) => {}
                    Err(error) => {
                        tracing::warn!(error, "a guest's link failed");
                        self.peer_lost(at);
                    }
                }
            }
        }
    }

    pub(crate) fn handle_message(&mut self, from: PeerId, arrived: ReceivedMessage) {
        let tag = arrived.tag;
        let pid = match arrived.message.is_per_thread() {
            true => self.process_of_thread(tag).map_or(tag, |process| process.pid),
            false => tag,
        };
        let Some(process) = self.processes.get_mut(&pid) else {
            if matches!(arrived.message, Message::NotCreated) && !self.uncreated.contains_key(&tag) {
                self.send_to_peer(from, tag, &Message::CreationUndone);
            }
            // The process has ended here, and its guest has not received that yet.
            if matches!(arrived.message, Message::Reattach(..) | Message::Call(_)) {
                self.send_to_peer(from, pid, &Message::Drop);
            }
            return;
        };
        // Only the shim that holds the process, or is to hold it next, may send messages about it.
        let next = match &process.state {
            State::Outgoing(o) | State::HandedOver(o) => o.peer,
            State::Remigrating(next) => *next,
            _ => process.peer,
        };
        let (holds, will_hold) = (process.is_away() && from == process.peer, from == next);
        match arrived.message {
            Message::Accepted(epoch, shows) if will_hold && epoch == process.offered_epoch => {
                if let Some(peer) = self.peers.get_mut(from) {
                    peer.mounts_home_files = shows;
                }
                self.handle_accepted(pid);
            }
            Message::Declined(epoch, why) if will_hold && epoch == process.offered_epoch => {
                self.handle_declined(pid, &why);
            }
            Message::RequestFiles(epoch, ref indices) if will_hold && epoch == process.offered_epoch => {
                self.handle_file_request(pid, indices);
            }
            Message::Ready(epoch, bytes) if will_hold && epoch == process.offered_epoch => {
                if let (State::Remigrating(_), Some(task)) = (&process.state, &mut process.task) {
                    task.bytes = bytes;
                }
                self.hand_over(pid);
            }
            Message::Running(epoch, us) if (will_hold || holds) && epoch == process.epoch => {
                if let Some(task) = &mut process.task {
                    task.frozen_at = Instant::now().checked_sub(Duration::from_micros(us));
                }
                process.old_guest_has_new_epoch = false;
                self.guest_running(pid);
            }
            Message::Call(request) if holds => {
                if matches!(process.state, State::HandedOver(_) | State::Switching(_)) {
                    self.guest_running(pid);
                }
                self.handle_call(tag, *request);
            }
            // Home has all threads already.
            Message::Threads(_) => {}
            Message::Space(_)
            | Message::Pages(_)
            | Message::DiscardPages(_)
            | Message::Object { .. }
            | Message::Hole { .. }
            | Message::Image(..)
                if holds =>
            {
                self.handle_returning(pid, arrived);
            }
            Message::Departing(migration) if holds => {
                let this = process.task.as_ref().is_some_and(|task| task.migration == migration);
                if let State::Returning(returning) = &mut process.state {
                    returning.has_departed = this;
                }
            }
            Message::DepartureFailed(why) if holds => {
                self.departure_failed(pid, why);
                // A guest that has sent everything is frozen, and cannot know whether home has
                // resumed the process.
                if self
                    .processes
                    .get(&pid)
                    .is_some_and(|process| matches!(process.state, State::Away) && !process.job_stopped)
                {
                    self.send(pid, &Message::Thaw);
                }
            }
            Message::KilledBySignal(signal) if holds => self.handle_killed_by_signal(pid, tag, signal),
            Message::NotCreated if holds && process.is_newborn(tag) => self.undo_creation(tag, from),
            // The number has another user by now, so home's half is gone.
            Message::NotCreated => self.send_to_peer(from, tag, &Message::CreationUndone),
            Message::KilledByNode(why) if holds => self.handle_killed_by_node(pid, &why),
            Message::FetchHome(why) if holds => self.fetch_home(pid, &why),
            Message::Watch(fds) if holds => self.watch_descriptors(pid, &fds),
            Message::Unmapped(objects) if holds => self.release_objects(pid, &objects),
            Message::RequestContent(hash) if holds => self.send_content(tag, from, hash),
            Message::Reattach(epoch, signals) => self.handle_reattach(pid, tag, from, epoch, signals),
            Message::Usage(used, demand) if holds => {
                process.demand = demand;
                self.usage_reported(pid, None, used);
            }
            Message::ThreadUsage(used) if holds && process.threads.contains_key(&tag) => {
                self.usage_reported(pid, Some(tag), used);
            }
            Message::SignalAck(signals, handled) if holds => {
                self.signals_handled(tag, signals, handled);
            }
            Message::Mask(mask) if holds => {
                if let Ok(thread) = process.thread(tag) {
                    thread.set_mask(mask);
                }
                self.release_signals(tag, u64::MAX);
            }
            _ => {}
        }
    }

    pub(crate) fn handle_declined(&mut self, pid: HomePid, why: &str) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        match std::mem::replace(&mut process.state, State::Away) {
            State::Remigrating(_) => {
                // The current guest was not asked to depart, or continues now.
                self.send(pid, &Message::Thaw);
                self.abort_task(pid, why);
            }
            State::Outgoing(outgoing) => {
                process.state = State::Outgoing(outgoing);
                self.cancel_outgoing(pid, why);
            }
            State::HandedOver(outgoing) => {
                process.state = State::HandedOver(outgoing);
                self.revoke(pid, why);
            }
            State::Switching(old) => {
                process.state = State::Switching(old);
                self.cancel_switch(pid);
            }
            other => process.state = other,
        }
    }

    /// The program was killed at the guest by a fault of its own, so the deputy is killed by the
    /// same signal. A program that is to dump core is fetched home first and faults again there.
    /// That is tried once: a second report means that the guest could not depart.
    pub(crate) fn handle_killed_by_signal(&mut self, pid: HomePid, tid: HomePid, signal: i32) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        if matches!(process.state, State::Away)
            && crate::signals::coredump::is_repeatable_fault(signal)
            && crate::signals::coredump::is_permitted(pid.0)
            && process.home_record.may_fetch_for_core()
        {
            return self.fetch_home(
                pid,
                &format!("core: signal {signal} kills it, and its core can be dumped at home only"),
            );
        }
        if std::mem::replace(&mut process.is_dying, true) {
            return;
        }
        crate::signals::coredump::prevent_core(pid.0);
        tracing::info!(%pid, signal, "the program was killed at its guest");
        // `tid` is the thread that has faulted; its deputy makes no call. If the report is about
        // the whole process, `tid` is the pid: the first thread may have exited, or be in a call
        // that lasts.
        let killed = self
            .with_any_thread(pid, Some(tid), |process, stopped| process.kill_by_signal(stopped, signal))
            .and_then(|done| match (done, self.processes.get_mut(&pid)) {
                // No deputy thread can be stopped now: the signal takes effect when a call ends.
                (None, Some(process)) => process.signal_when_it_wakes(signal),
                _ => Ok(()),
            });
        if let Err(error) = killed {
            self.handle_error(tid, &error);
        }
    }

    /// The guest's node has killed the program, for a reason that is not a fault of the program.
    fn handle_killed_by_node(&mut self, pid: HomePid, why: &str) {
        tracing::warn!(%pid, why, "the guest's node has killed the program");
        self.abort_task(pid, why);
        crate::signals::coredump::prevent_core(pid.0);
        tern_tracee::pidfd::kill(pid.0);
    }
}
