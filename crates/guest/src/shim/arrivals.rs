//! Messages about arriving guests: offers, parts of the image, and the start.

use super::Shim;
use crate::arrive::build::{self, Arriving};
use crate::error::{GuestError, GuestResult};
use crate::process::Guest;
use crate::process::outbox::Outbox;
use crate::process::shared::{Process, State};
use crate::process::thread::Thread;
use crate::sandbox::Sandbox;
use crate::vdso::foreign::ForeignVdso;
use crate::workers::MappingUser;
use std::os::fd::AsFd;
use std::time::Instant;
use tern_ids::{ContentHash, HomePid};
use tern_image::content::OpenedFile;
use tern_migrate::message::{Message, Offer, ReceivedMessage, send};
use tern_migrate::{Phase, fault, wall};
use tern_tracee::{Memory, stop};
use tern_wire::Link;

impl Shim {
    pub(super) fn handle_offer(&mut self, offer: &Offer) -> GuestResult {
        let pid = offer.pid;
        self.home.set_shim(offer.shim);
        // A process that has executed another program arrives again under the same pid.
        self.kill(pid);
        let span = tracing::info_span!("migration", id = %offer.migration, %pid);
        let _in = span.enter();
        fault::point("guest", Phase::Offer);
        let result = build::check_offer(offer, &self.machine, wall::now())
            .and_then(|foreign_vdso| self.begin_arrival(offer, foreign_vdso).map_err(|e| e.to_string()));
        match result {
            Ok(guest) => {
                tracing::info!(command = offer.command, "an offer was accepted");
                self.members.insert(guest);
                self.send_home(
                    pid,
                    &Message::Accepted(
                        offer.epoch,
                        crate::files::remote_map::is_available(&self.start.run_dir, self.home.node()),
                    ),
                );
            }
            Err(why) => {
                tracing::info!(why, "an offer was declined");
                self.members.record_declined();
                self.send_home(pid, &Message::Declined(offer.epoch, why));
            }
        }
        Ok(())
    }

    fn begin_arrival(&mut self, offer: &Offer, foreign_vdso: Option<ForeignVdso>) -> anyhow::Result<Guest> {
        let sandbox = self.sandbox.get_or_create(self.start.guest_cpus)?;
        let child = stop::count_as_slept(|| sandbox.fork(offer.own_pid))?;
        let host = child.pid();
        let arriving = Box::new(Arriving::begin(offer.clone(), foreign_vdso, child)?);
        let Offer { pid, own_pid, epoch, reserve, .. } = *offer;
        Ok(Guest::new(Process::new(pid, own_pid, host, epoch, reserve, State::Arriving(arriving))?))
    }

    pub(super) fn decline_arrival(&mut self, pid: HomePid, why: &str) {
        let epoch = match self.members.get(pid).map(|guest| &guest.process) {
            Some(process) if matches!(process.state, State::Arriving(_)) => process.epoch,
            _ => return,
        };
        self.kill(pid);
        self.send_home(pid, &Message::Declined(epoch, why.into()));
    }

    /// The arriving process that has this thread, once its image has arrived.
    pub(super) fn arriving_with_thread(&self, tid: HomePid) -> Option<HomePid> {
        let has = |guest: &Guest| matches!(&guest.process.state, State::Arriving(arriving) if arriving.has_thread(tid));
        self.members.iter().find(|guest| has(guest)).map(|guest| guest.process.pid)
    }

    /// Receives a part of an arriving process. Replies go to `source` if another node sends it, and
    /// home otherwise.
    pub(super) fn receive_part(
        &mut self,
        arrived: ReceivedMessage,
        source: Option<&mut Link>,
    ) -> GuestResult {
        let pid = arrived.tag;
        if let Message::Image(image, _) = &arrived.message
            && image.threads.iter().any(|t| self.members.process_of_thread(t.tid).is_some_and(|of| of != pid))
        {
            let what = "its source sent a thread that another guest has".into();
            return Err(tern_tracee::Error::Inconsistent { what, pid: pid.0 }.into());
        }
        let Some(guest) = self.members.get_mut(pid).map(|guest| &mut guest.process) else { return Ok(()) };
        let State::Arriving(arriving) = &mut guest.state else { return Ok(()) };
        let bytes = arrived.bytes();
        match &arrived.message {
            Message::Threads(numbers) => arriving.receive_tids(numbers)?,
            Message::Space(layout) => {
                fault::point("guest", Phase::Prepare);
                let number = arriving.receive_space((**layout).clone())?;
                let epoch = guest.epoch;
                let to_open = self.cache.to_be_opened(&layout.files);
                if to_open.is_empty() {
                    return self.build_space(pid, number, source);
                }
                let user = MappingUser::Arrival { pid, epoch, layout: number, has_source: source.is_some() };
                self.workers.open_mapped_files(user, (self.local_node.clone(), self.home.node()), to_open);
            }
            Message::File { file, offset } => {
                let had_listener = arriving.listener().is_some();
                arriving.receive_file(*file, *offset, bytes, &guest.memory, &mut self.cache)?;
                share_listener(self.sandbox.get(), arriving, had_listener)?;
                create_threads(self.sandbox.get(), arriving, &guest.memory)?;
            }
            Message::Pages(runs) => arriving.receive_pages(runs, bytes, &guest.memory)?,
            Message::Object { file, offset } => {
                arriving.receive_object(*file, *offset, bytes, &self.cache)?;
            }
            Message::DiscardPages(runs) => arriving.discard_pages(runs, &self.cache)?,
            Message::Image(image, sync) => {
                fault::point("guest", Phase::Freeze);
                let Some(sandbox) = self.sandbox.get() else { return Ok(()) };
                arriving.receive_image(image.clone(), sync.clone(), &guest.memory, sandbox, &self.cache)?;
                let ready = Message::Ready(guest.epoch, sync.sent);
                self.send_home(pid, &ready);
            }
            _ => {}
        }
        Ok(())
    }

    /// Builds the address space of an arriving guest, and requests the content that is missing from
    /// `source`, or from home.
    fn build_space(&mut self, pid: HomePid, number: u64, source: Option<&mut Link>) -> GuestResult {
        let Some(guest) = self.members.get_mut(pid).map(|guest| &mut guest.process) else { return Ok(()) };
        let State::Arriving(arriving) = &mut guest.state else { return Ok(()) };
        let had_listener = arriving.listener().is_some();
        let Some(missing) = arriving.build_space(number, &guest.memory, &mut self.cache)? else {
            return Ok(());
        };
        share_listener(self.sandbox.get(), arriving, had_listener)?;
        create_threads(self.sandbox.get(), arriving, &guest.memory)?;
        if let Some(link) = source.or(self.home.link()) {
            send(link, pid, &Message::RequestFiles(guest.epoch, missing), &[])?;
        }
        Ok(())
    }

    /// Continues the arrival or the mmap that has waited for mapped files. `opened` has those files
    /// that a worker could open.
    pub(super) fn handle_mapped_files(&mut self, user: MappingUser, opened: Vec<OpenedFile>) {
        let replaced: Vec<_> = opened.into_iter().filter_map(|file| self.cache.add_opened(file)).collect();
        if !replaced.is_empty() {
            self.workers.close(replaced);
        }
        let (pid, epoch, layout, has_source) = match user {
            MappingUser::Call(tid, hash) => return self.continue_mapping(tid, hash),
            MappingUser::Arrival { pid, epoch, layout, has_source } => (pid, epoch, layout, has_source),
        };
        if self.members.get(pid).is_none_or(|guest| guest.process.epoch != epoch) {
            return;
        }
        let mut links = std::mem::take(&mut self.source_links);
        let source = links.iter_mut().find(|source| source.incoming == Some((pid, epoch)));
        let source = source.map(|source| &mut source.link).filter(|_| has_source);
        // If the link over which the layout came is gone, the migration is over.
        if source.is_some() == has_source
            && let Err(error) = self.build_space(pid, layout, source)
        {
            tracing::warn!(%pid, %error, "an arriving guest could not be built");
            self.decline_arrival(pid, &error.to_string());
        }
        self.source_links.append(&mut links);
    }

    /// Continues a thread's mmap of the file with this hash.
    fn continue_mapping(&mut self, tid: HomePid, hash: ContentHash) {
        let Some(pid) = self.members.process_of_thread(tid) else { return };
        let Some(guest) = self.members.get_mut(pid) else { return };
        let mut home = Outbox::default();
        let done = guest.continue_mapping(tid, hash, &mut self.cache, &mut home);
        let sent = self.home.send_all(home);
        if let Err(error) = done.and_then(|()| Ok(sent?)) {
            self.handle_error(pid, &error);
        }
    }

    /// Starts these guests, which share memory and have all arrived. All become guests before the
    /// first is reported as running: a report may find the link broken, and that ends guests that
    /// are still arriving.
    pub(super) fn start_group(&mut self, epochs: &[(HomePid, tern_ids::Epoch)]) {
        let result: Vec<_> = epochs.iter().map(|(pid, epoch)| self.begin_epoch(*pid, *epoch)).collect();
        for ((pid, epoch), result) in epochs.iter().zip(result) {
            let started =
                result.and_then(|result| result.map_or(Ok(()), |since| self.run_guest(*pid, *epoch, since)));
            if let Err(error) = started {
                self.handle_error(*pid, &error);
            }
        }
    }

    pub(super) fn start_guest(&mut self, pid: HomePid, epoch: tern_ids::Epoch) -> GuestResult {
        match self.begin_epoch(pid, epoch)? {
            Some(since) => self.run_guest(pid, epoch, since),
            None => Ok(()),
        }
    }

    /// Turns an arrived process into a guest, which is still stopped. Returns since when it has
    /// been stopped.
    fn begin_epoch(&mut self, pid: HomePid, epoch: tern_ids::Epoch) -> GuestResult<Option<Instant>> {
        fault::point("guest", Phase::HandOver);
        let Some(guest) = self.members.get_mut(pid) else { return Ok(None) };
        let arriving = match std::mem::replace(&mut guest.process.state, State::Running) {
            State::Arriving(arriving) => arriving,
            // It was sent onward, and the next node was lost after home had decided for that node.
            // The guest continues here with a new epoch.
            State::Frozen(_) => {
                guest.process.epoch = epoch;
                guest.continue_here()?;
                tracing::info!(%pid, ?epoch, "a guest continues here");
                // Home forgets with each epoch what it is to report.
                let readiness = guest.process.connections.readiness_request();
                self.send_home(pid, &Message::Running(epoch, 0));
                if let Some(request) = readiness {
                    self.send_home(pid, &request);
                }
                return Ok(None);
            }
            other => {
                guest.process.state = other;
                return Ok(None);
            }
        };
        let frozen_since = arriving.frozen_since();
        let wall = guest.install_image(*arriving, epoch)?;
        // On nodes whose clocks NTP synchronises the wait is near zero, so blocking the main loop
        // is acceptable.
        let _checked_by_receive_image = wall::wait_until(wall);
        Ok(Some(frozen_since))
    }

    /// Resumes a guest that has begun.
    fn run_guest(&mut self, pid: HomePid, epoch: tern_ids::Epoch, frozen_since: Instant) -> GuestResult {
        let Some(guest) = self.members.get_mut(pid) else { return Ok(()) };
        guest.set_nice(self.start.guest_nice.into());
        guest.process.fastpath.is_allowed = self.start.fastpath;
        guest.resume()?;
        let frozen_us = frozen_since.elapsed().as_micros() as u64;
        let threads: Vec<_> = guest.threads.values().map(|t| (t.tid, t.host_tid, t.deputy_sigmask)).collect();
        tracing::info!(%pid, ?epoch, threads = threads.len(), "a guest runs");
        self.send_home(pid, &Message::Running(epoch, frozen_us));
        for (tid, host, mask) in threads {
            self.members.register_thread(pid, tid, host);
            // The deputy's mask may be another one, for example if the thread moved inside a
            // handler.
            self.send_home(tid, &Message::Mask(mask));
        }
        fault::point("guest", Phase::Resume);
        Ok(())
    }
}

impl Guest {
    /// Installs the parts of an arrived process. Its threads are stopped. Returns the wall-clock
    /// time at which the process was stopped at its source.
    fn install_image(&mut self, arriving: Arriving, epoch: tern_ids::Epoch) -> Result<u64, GuestError> {
        let Self { process, threads } = self;
        let mut arrived = arriving.finish()?;
        let images = std::mem::take(&mut arrived.image.threads);
        process.epoch = epoch;
        process.image = Some(arrived.image);
        process.listener = Some(arrived.listener);
        process.mapped_files = arrived.mapped_files;
        process.foreign_vdso = arrived.foreign_vdso;
        // The first thread may have ended.
        let first = arrived.threads.first().map_or(process.host_pid, |(first, _)| first.pid());
        process.memory = Memory::open(first)?;
        process.usage.begin_epoch(process.host_pid, arrived.sync.used)?;
        process.stop_reasons.set_quiescing(true);
        for ((image, (stopped, wait_until)), sync) in
            images.into_iter().zip(arrived.threads).zip(arrived.sync.threads)
        {
            let names = (image.tid, image.own_tid, stopped.pid());
            let mut thread = Thread::new(process, names, sync, image.sigmask)?;
            thread.raise_carried()?;
            thread.stopped = Some(stopped);
            thread.futex_wait_end = wait_until;
            threads.insert(image.tid, thread);
        }
        Ok(arrived.sync.wall)
    }
}

/// Has the helper hold a copy of the guest's notification fd, as soon as there is one.
fn share_listener(sandbox: Option<&Sandbox>, arriving: &Arriving, had_listener: bool) -> GuestResult {
    match (sandbox, arriving.listener()) {
        (Some(sandbox), Some(listener)) if !had_listener => Ok(sandbox.keep_fd(listener.as_fd())?),
        _ => Ok(()),
    }
}

/// Creates the announced threads of an arriving process, once its address space is built.
fn create_threads(sandbox: Option<&Sandbox>, arriving: &mut Arriving, memory: &Memory) -> GuestResult {
    sandbox.map_or(Ok(()), |sandbox| arriving.create_threads(memory, sandbox))
}
