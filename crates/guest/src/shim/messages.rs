//! Messages from home, and from the previous nodes of arriving guests.

use super::Shim;
use crate::error::GuestResult;
use crate::process::Guest;
use crate::process::outbox::Outbox;
use crate::process::shared::{Process, State};
use crate::process::thread::PendingCall;
use crate::workers::MappingUser;
use tern_ids::HomePid;
use tern_migrate::departure_failure::Busy;
use tern_migrate::message::{Message, ReceivedMessage};
use tern_syscall::{Outcome, Route, SplitCall, route};
use tern_tracee::siginfo::Siginfo;

/// After this many signals an acknowledgement is sent; until then home keeps them.
const SIGNAL_ACK_INTERVAL: u64 = 64;

impl Shim {
    pub(super) fn receive_from_home(&mut self) {
        // A limited number, so that a busy link does not starve the rest of the loop.
        for _ in 0..64 {
            let Some(message) = self.home.receive() else { break };
            match message {
                Ok(Some(arrived)) => self.handle_message(arrived),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(error, "the link to home is cut");
                    self.drop_home_link();
                }
            }
        }
        self.receive_from_sources();
        self.receive_from_next();
    }

    pub(super) fn receive_from_sources(&mut self) {
        let mut source_links = std::mem::take(&mut self.source_links);
        source_links.retain_mut(|source| {
            for _ in 0..64 {
                match source.link.receive() {
                    Ok(Some(frame)) => match source.inbox.take(frame) {
                        Ok(Some(ReceivedMessage { tag, message: Message::TransferFor(epoch), .. })) => {
                            source.incoming = Some((tag, epoch));
                        }
                        Ok(Some(arrived)) => {
                            let pid = arrived.tag;
                            let current = self.members.get(pid).map(|guest| (pid, guest.process.epoch));
                            // If the process has executed another program meanwhile, its new image
                            // arrives from home, and this link may still carry parts of the old
                            // one.
                            if current.is_none() || source.incoming != current {
                                continue;
                            }
                            if let Err(error) = self.receive_part(arrived, Some(&mut source.link)) {
                                tracing::warn!(%pid, %error, "an arriving guest could not be built");
                                self.decline_arrival(pid, &error.to_string());
                            }
                        }
                        Ok(None) => {}
                        Err(_) => return false,
                    },
                    Ok(None) => return true,
                    Err(_) => return false,
                }
            }
            true
        });
        self.source_links.append(&mut source_links);
    }

    pub(super) fn handle_message(&mut self, arrived: ReceivedMessage) {
        if arrived.message.is_per_thread() {
            // Messages for threads that have ended or never existed are dropped.
            if let Some(pid) =
                self.members.process_of_thread(arrived.tag).or_else(|| self.arriving_with_thread(arrived.tag))
                && let Err(error) = self.handle_thread_message(pid, arrived)
            {
                self.handle_error(pid, &error);
            }
            return;
        }
        let pid = arrived.tag;
        let failed = match &arrived.message {
            Message::Offer(offer) => self.handle_offer(offer),
            Message::Threads(_)
            | Message::Space(_)
            | Message::File { .. }
            | Message::Object { .. }
            | Message::Pages(_)
            | Message::DiscardPages(_)
            | Message::Image(..) => {
                let done = self.receive_part(arrived, None);
                if let Err(error) = done {
                    tracing::warn!(%pid, %error, "an arriving guest could not be built");
                    self.decline_arrival(pid, &error.to_string());
                }
                Ok(())
            }
            Message::Go(epoch) => self.start_guest(pid, *epoch),
            Message::GoGroup(epochs) => {
                self.start_group(epochs);
                Ok(())
            }
            Message::Depart(departure) => self.handle_depart(pid, departure),
            Message::Clocks(home) => {
                self.sandbox.receive_clocks(*home);
                self.send_home(HomePid(0), &Message::Heartbeat);
                Ok(())
            }
            Message::Drop => {
                self.kill(pid);
                Ok(())
            }
            Message::Thaw => self.thaw(pid),
            Message::RequestFiles(_, indices) => self.handle_file_request(pid, indices),
            Message::Stop(stop) => self.job_control(pid, *stop),
            Message::Names(_) => {
                if let (Some(guest), Message::Names(notice)) = (self.members.get_mut(pid), arrived.message) {
                    guest.process.names.handle_notice(notice);
                }
                return;
            }
            Message::ConnectionLost(fd) => {
                if let Some(guest) = self.members.get_mut(pid) {
                    guest.process.connections.lose(*fd);
                }
                Ok(())
            }
            Message::Readiness(report) => {
                self.act_on(pid, |guest, home| {
                    if report.iter().any(|(_, readiness)| readiness.is_none()) {
                        // The guest must not wait for such a descriptor without a trap.
                        guest.process.unpublish()?;
                    }
                    let can_continue = guest.process.connections.receive_readiness(report);
                    if can_continue { guest.handle_queued_traps(home) } else { Ok(()) }
                });
                Ok(())
            }
            Message::CreationUndone => {
                self.fail_creation(pid);
                Ok(())
            }
            Message::WatchUsage(at) => {
                if let Some(guest) = self.members.get_mut(pid) {
                    guest.set_cpu_threshold(None, *at);
                }
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(error) = failed {
            self.handle_error(pid, &error);
        }
    }

    /// Handles a message for one thread of a guest.
    fn handle_thread_message(&mut self, pid: HomePid, arrived: ReceivedMessage) -> GuestResult {
        let tid = arrived.tag;
        match &arrived.message {
            Message::Result(_) => self.handle_result(pid, arrived),
            Message::PreludeDone(number, returned) => {
                if let Some(guest) = self.members.get_mut(pid) {
                    guest.process.files.confirm(*number, returned);
                    let Process { fastpath, memory, reserve, .. } = &mut guest.process;
                    fastpath.unpublish(memory, *reserve)?;
                }
                Ok(())
            }
            Message::ThreadExited => {
                let Some(guest) = self.members.get_mut(pid) else { return Ok(()) };
                if guest.let_exit(tid)? {
                    // The guest's memory is read through this thread while the memory is sent. Home
                    // repeats its request to depart.
                    self.cancel_departure(pid, Some(Busy::FirstThreadEnding.into()));
                }
                Ok(())
            }
            Message::WatchThreadUsage(at) => {
                if let Some(guest) = self.members.get_mut(pid) {
                    guest.set_cpu_threshold(Some(tid), *at);
                }
                Ok(())
            }
            Message::Content { hash, offset } => {
                let Some(Guest { process, threads }) = self.members.get_mut(pid) else { return Ok(()) };
                let Some(thread) = threads.get_mut(&tid) else { return Ok(()) };
                thread.receive_content(*hash, *offset, arrived.bytes(), process, &mut self.cache)
            }
            Message::NoContent(hash) => {
                let thread = self.members.get_mut(pid).and_then(|guest| guest.threads.get_mut(&tid));
                thread.map_or(Ok(()), |thread| thread.fail_mapping(*hash))
            }
            Message::Signal(count, info) => {
                let Some(Guest { process, threads }) = self.members.get_mut(pid) else { return Ok(()) };
                if let State::Arriving(arriving) = &mut process.state {
                    arriving.receive_signal(tid, *count, info);
                    return Ok(());
                }
                // The sender may have changed a file before it sent the signal.
                process.invalidate_read_ahead()?;
                if let (Some(thread), Ok(info)) = (threads.get_mut(&tid), Siginfo::try_from(info.as_slice()))
                {
                    thread.accept_signal(*count, info)?;
                    // The thread's calls acknowledge signals too, but the thread may make none. A
                    // signal that arrives while the image is in transit is not part of the image,
                    // and is not acknowledged, so that home sends it again to the next epoch.
                    if count.is_multiple_of(SIGNAL_ACK_INTERVAL) && matches!(process.state, State::Running) {
                        self.send_home(tid, &Message::SignalAck(*count, 0));
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn handle_result(&mut self, pid: HomePid, arrived: ReceivedMessage) -> GuestResult {
        let tid = arrived.tag;
        let Message::Result(result) = arrived.message else { return Ok(()) };
        let Some(guest) = self.members.get_mut(pid) else { return Ok(()) };
        let is_internal = guest.receive_notices(tid, &result, &self.local_node);
        let local_part = if is_internal { None } else { guest.take_result(tid, *result)? };
        let Some((pending, result)) = local_part else {
            self.try_act_on(pid, Guest::handle_queued_traps)?;
            return Ok(());
        };
        match (route(pending.trap.nr, &pending.trap.args), result.child) {
            (Route::Both(SplitCall::Fork), Some(child)) => {
                self.fork_guest(pid, tid, &pending, (child, &result.outcome));
                Ok(())
            }
            (Route::Both(SplitCall::Thread), Some(child)) => {
                let Some(sandbox) = self.sandbox.get() else { return Ok(()) };
                match guest.create_thread(tid, &pending, (child, result.outcome.ret as i32), sandbox)? {
                    Some(host) => self.members.register_thread(pid, child, host),
                    None => self.report_uncreated(child, tid),
                }
                Ok(())
            }
            (Route::Both(SplitCall::Fork | SplitCall::Thread), None) => {
                let what = "home has created a child without a pid".into();
                Err(tern_tracee::Error::Inconsistent { what, pid: tid.0 }.into())
            }
            _ => {
                let mut home = Outbox::default();
                let done = guest.do_local_part(tid, pending, result, &mut self.cache, &mut home);
                let done = done.and_then(|to_open| guest.handle_queued_traps(&mut home).map(|()| to_open));
                let sent = self.home.send_all(home);
                if let Some(file) = done? {
                    let user = MappingUser::Call(tid, file.hash);
                    let opener = (self.local_node.clone(), self.home.node());
                    self.workers.open_mapped_files(user, opener, vec![file]);
                }
                Ok(sent?)
            }
        }
    }

    fn fork_guest(&mut self, pid: HomePid, tid: HomePid, pending: &PendingCall, child: (HomePid, &Outcome)) {
        // A guest cannot depart while it forks; home repeats its request to depart.
        if let Some(process) = self.members.get_mut(pid).map(|guest| &mut guest.process)
            && matches!(process.state, State::Departing(_))
        {
            process.stop_reasons.hold_forks();
        }
        self.cancel_departure(pid, Some(Busy::Forking.into()));
        let (Some(guest), Some(sandbox)) = (self.members.get_mut(pid), self.sandbox.get()) else { return };
        match guest.fork(tid, pending, child, sandbox) {
            Ok(Some(forked)) => self.members.insert(forked),
            Ok(None) => self.report_uncreated(child.0, tid),
            Err(error) => {
                tracing::error!(%error, "a fork could not be made here");
                self.send_home(child.0, &Message::KilledBySignal(libc::SIGKILL));
            }
        }
    }

    /// Stops or resumes a guest for job control. The main loop carries out a stop, since some
    /// threads may be unable to stop at once.
    fn job_control(&mut self, pid: HomePid, stop: bool) -> GuestResult {
        let Some(guest) = self.members.get_mut(pid) else { return Ok(()) };
        guest.process.stop_reasons.set_job_stopped(stop);
        guest.process.invalidate_read_ahead()?;
        if !stop && matches!(guest.process.state, State::Running) {
            guest.resume()?;
        }
        Ok(())
    }

    fn thaw(&mut self, pid: HomePid) -> GuestResult {
        let Some(guest) = self.members.get_mut(pid) else { return Ok(()) };
        guest.process.stop_reasons.set_cut_off(false);
        match guest.process.state {
            State::Running => guest.resume()?,
            State::Frozen(_) => guest.continue_here()?,
            State::Departing(_) => self.cancel_departure(pid, None),
            State::Arriving(_) => {}
        }
        Ok(())
    }
}
