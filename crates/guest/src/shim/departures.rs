//! Messages about departing guests: those that go home or onward, and those that stay after all.

use super::Shim;
use crate::depart::departing::{Departing, Frozen};
use crate::depart::group::GroupProgress;
use crate::depart::send::GuestSource;
use crate::error::GuestResult;
use crate::process::Guest;
use crate::process::shared::State;
use std::collections::HashSet;
use std::time::Instant;
use tern_ids::{Epoch, HomePid};
use tern_migrate::departure_failure::{Busy, DepartureFailure};
use tern_migrate::message::{Departure, Message, Reassembler, ReceivedMessage, send};
use tern_migrate::source::{ProcessSender, SendError};
use tern_wire::Link;

impl Shim {
    pub(super) fn handle_depart(&mut self, pid: HomePid, departure: &Departure) -> GuestResult {
        // Home repeats its request to the whole group if one member was busy. Two repetitions may
        // overlap, if two members were. So the request may reach a guest that is departing already,
        // or has sent everything.
        if let Departure::Home { migration, group: together } = departure {
            match self.members.get_mut(pid).map(|guest| &mut guest.process.state) {
                Some(State::Departing(departing)) => {
                    // A member of the group has forked meanwhile.
                    departing.group.clone_from(together);
                    return Ok(());
                }
                Some(State::Frozen(frozen)) if frozen.homeward == Some(*migration) => return Ok(()),
                _ => {}
            }
        }
        match departure {
            Departure::Home { .. } => self.start_departure(pid, departure.clone(), None),
            Departure::Onward { epoch, address, shim, fingerprint } => {
                self.departures.await_connection(pid, departure.clone());
                self.workers.connect(pid, *epoch, address.clone(), *shim, *fingerprint);
                Ok(())
            }
        }
    }

    /// Handles the outcome of connecting to a guest's next node.
    pub(super) fn handle_connected(&mut self, pid: HomePid, epoch: Epoch, link: Result<Box<Link>, String>) {
        let Some(departure) = self.departures.take_connected(pid, epoch) else { return };
        let done = match link {
            Ok(link) => self.start_departure(pid, departure, Some(*link)),
            Err(why) => {
                self.send_home(pid, &Message::DepartureFailed(why.into()));
                Ok(())
            }
        };
        if let Err(error) = done {
            self.handle_error(pid, &error);
        }
    }

    pub(super) fn start_departure(
        &mut self,
        pid: HomePid,
        departure: Departure,
        link: Option<Link>,
    ) -> GuestResult {
        let Some(is_done) = self.try_act_on(pid, Guest::return_delegations)? else {
            self.send_home(pid, &Message::DepartureFailed(Busy::BeingCreated.into()));
            return Ok(());
        };
        if !is_done {
            self.departures.await_confirmation(pid, departure, link);
            return Ok(());
        }
        let Some(guest) = self.members.get_mut(pid) else { return Ok(()) };
        let must_await_fork = guest.process.stop_reasons.forks_held_until().is_some() && guest.is_forking();
        if must_await_fork {
            guest.process.stop_reasons.hold_forks();
        }
        let mut gone = None;
        let result: Result<(), DepartureFailure> = match guest.check_movable() {
            _ if !guest.can_depart(matches!(departure, Departure::Home { .. })) => Err(Busy::Forking.into()),
            _ if must_await_fork => {
                // The pending fork would cancel this departure too.
                Err(Busy::Forking.into())
            }
            Err(unmovable) => Err(unmovable.to_string().into()),
            Ok(()) => self.begin_sending(pid, departure, link).map_err(|error| {
                let why = error.to_string().into();
                gone = error.gone();
                why
            }),
        };
        if let Err(why) = result {
            self.send_home(pid, &Message::DepartureFailed(why));
            let Some(process) = self.members.get_mut(pid).map(|guest| &mut guest.process) else {
                return Ok(());
            };
            process.files.allow_delegations();
            process.stop_reasons.report_signal_again();
        }
        // The kernel has reported the end of the guest, and does not report it again.
        gone.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Starts departures that waited for home to confirm pending writes.
    pub(super) fn retry_departures(&mut self) {
        for (pid, departure, link) in self.departures.take_awaiting_confirmation() {
            if let Err(error) = self.start_departure(pid, departure, link) {
                self.handle_error(pid, &error);
            }
        }
    }

    /// Does the work of guests that is due at a set time, without an event.
    pub(super) fn do_due_work(&mut self) {
        let due = self.members.iter().filter(|guest| guest.due().is_some());
        for pid in due.map(|guest| guest.process.pid).collect::<Vec<_>>() {
            self.act_on(pid, Guest::do_due_work);
        }
    }

    pub(super) fn begin_sending(
        &mut self,
        pid: HomePid,
        departure: Departure,
        mut link: Option<Link>,
    ) -> Result<(), SendError> {
        let Some(guest) = self.members.get_mut(pid) else { return Ok(()) };
        let to_new_process = matches!(departure, Departure::Onward { .. });
        let source = guest.prepare_departure(&self.cache, to_new_process)?;
        let next_link = link.as_mut().or(self.home.link()).ok_or(tern_wire::LinkError::Closed)?;
        let first_message = match &departure {
            Departure::Home { migration, .. } => Message::Departing(*migration),
            Departure::Onward { epoch, .. } => Message::TransferFor(*epoch),
        };
        send(next_link, pid, &first_message, &[])?;
        let (group, carried_objects) = (GroupProgress::alone(), HashSet::new());
        let guest_source = &mut GuestSource {
            guest,
            cache: &self.cache,
            workers: &self.workers,
            group,
            is_ready: false,
            carried_objects,
        };
        let Some(sending) = ProcessSender::begin(&mut Some(source), guest_source, next_link)? else {
            return Ok(());
        };
        let last_progress = (Instant::now(), (0, 0, false));
        let (homeward, group) = match departure {
            Departure::Home { migration, group } => (Some(migration), group),
            Departure::Onward { .. } => (None, Vec::new()),
        };
        let (is_ready, carried_objects) = (false, HashSet::new());
        let departing =
            Departing { group, is_ready, carried_objects, homeward, link, sending, last_progress };
        guest.process.state = State::Departing(Box::new(departing));
        Ok(())
    }

    pub(super) fn with_departing(
        &mut self,
        pid: HomePid,
        go: impl FnOnce(&mut ProcessSender, &mut GuestSource<'_>, &mut Link) -> Result<bool, SendError>,
    ) {
        let (timeout, group) =
            (self.link_timeout(), GroupProgress::of(pid, |member| self.members.get(member)));
        let Some(guest) = self.members.get_mut(pid) else { return };
        if !matches!(guest.process.state, State::Departing(_)) {
            return;
        }
        let state = std::mem::replace(&mut guest.process.state, State::Running);
        let State::Departing(mut departing) = state else { return };
        let (is_ready, carried_objects) =
            (departing.is_ready, std::mem::take(&mut departing.carried_objects));
        let mut guest_source = GuestSource {
            guest,
            cache: &self.cache,
            workers: &self.workers,
            group,
            is_ready,
            carried_objects,
        };
        let done = match departing.link.as_mut().or(self.home.link()) {
            Some(link) => go(&mut departing.sending, &mut guest_source, link),
            None => Err(tern_wire::LinkError::Closed.into()),
        };
        (departing.is_ready, departing.carried_objects) =
            (guest_source.is_ready, guest_source.carried_objects);
        match done {
            Ok(true) => {
                let (carried_objects, homeward) = (departing.carried_objects, departing.homeward);
                guest.process.state = State::Frozen(Frozen { carried_objects, homeward });
                if let Some(link) = departing.link.take() {
                    self.departures.keep_link(pid, link);
                }
            }
            Ok(false) => {
                let is_stalled = departing.time_without_progress() > timeout;
                guest.process.state = State::Departing(departing);
                if is_stalled {
                    self.cancel_departure(pid, Some("the next node does not receive".into()));
                }
            }
            Err(error) => {
                guest.process.state = State::Departing(departing);
                self.cancel_departure(pid, Some(error.to_string().into()));
                if let Some(error) = error.gone() {
                    self.handle_error(pid, &error.into());
                }
            }
        }
    }

    pub(super) fn handle_file_request(&mut self, pid: HomePid, indices: &[u32]) -> GuestResult {
        self.with_departing(pid, |sending, _source, _link| {
            sending.handle_file_request(indices).map(|()| false)
        });
        Ok(())
    }

    pub(super) fn receive_from_next(&mut self) {
        let pids: Vec<HomePid> = self.members.pids();
        for pid in pids {
            while let Some(State::Departing(departing)) =
                self.members.get_mut(pid).map(|guest| &mut guest.process.state)
            {
                let Some(link) = &mut departing.link else { break };
                match link.receive() {
                    Ok(Some(frame)) => match Reassembler::default().take(frame) {
                        Ok(Some(ReceivedMessage { message: Message::RequestFiles(_, indices), .. })) => {
                            drop(self.handle_file_request(pid, &indices));
                        }
                        _ => self.cancel_departure(pid, Some("the next node broke the protocol".into())),
                    },
                    Ok(None) => break,
                    Err(error) => self.cancel_departure(pid, Some(error.to_string().into())),
                }
            }
        }
    }

    pub(super) fn advance_departures(&mut self) {
        let departing = |guest: &&Guest| matches!(guest.process.state, State::Departing(_));
        let pids: Vec<HomePid> =
            self.members.iter().filter(departing).map(|guest| guest.process.pid).collect();
        for pid in pids {
            self.with_departing(pid, |sending, guest_source, link| sending.advance(guest_source, link));
        }
    }

    /// Drains the links to the next nodes of guests that have been sent.
    pub(super) fn drain_links(&mut self) {
        let (members, timeout) = (&self.members, self.link_timeout());
        let is_undecided =
            |pid| members.get(pid).is_some_and(|guest| matches!(guest.process.state, State::Frozen(_)));
        let failed = self.departures.drain(timeout, is_undecided);
        for (pid, why) in failed {
            // The guest may nevertheless have arrived at the next node; only home can find out. The
            // guest here stays stopped until home sends `Thaw` or ends it.
            self.send_home(pid, &Message::DepartureFailed(why.into()));
        }
    }

    /// Cancels a departure: the guest continues here.
    pub(super) fn cancel_departure(&mut self, pid: HomePid, why: Option<DepartureFailure>) {
        let (was_waiting, was_returning) = self.departures.cancel(pid);
        if was_waiting && let Some(why) = &why {
            self.send_home(pid, &Message::DepartureFailed(why.clone()));
        }
        let Some(guest) = self.members.get_mut(pid) else { return };
        if was_returning {
            guest.process.files.allow_delegations();
        }
        if !matches!(guest.process.state, State::Departing(_)) {
            return;
        }
        // Its stopped threads resume, if there is no other reason to stay stopped.
        let resumed = guest.continue_here();
        if let Some(why) = why {
            self.send_home(pid, &Message::DepartureFailed(why));
        }
        if let Err(error) = resumed {
            self.handle_error(pid, &error.into());
        }
    }
}
