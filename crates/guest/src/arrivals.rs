//! Guests come: offered, sent part by part, set going.

use crate::arrive::{self, Arriving};
use crate::cpu::Meter;
use crate::family::Family;
use crate::foreign::Foreign;
use crate::forward::Failed;
use crate::member::{Member, State};
use crate::sandbox::Sandbox;
use crate::thread::Thread;
use std::os::fd::AsFd;
use std::time::Instant;
use tern_ids::HomePid;
use tern_migrate::message::{Arrived, Message, Offer, send};
use tern_migrate::{Phase, fault, wall};
use tern_tracee::{Memory, Stopped};
use tern_wire::Link;

impl Family {
    pub(crate) fn offered(&mut self, offer: &Offer) -> Result<(), Failed> {
        let pid = offer.pid;
        self.home_shim = Some(offer.shim);
        // A process that has executed another program comes again under its old pid.
        self.end(pid);
        let span = tracing::info_span!("migration", id = %offer.migration, %pid);
        let _in = span.enter();
        fault::point("guest", Phase::Offer);
        let begun = arrive::judge(offer, &self.machine, wall::now())
            .and_then(|foreign| self.begin(offer, foreign).map_err(|e| e.to_string()));
        match begun {
            Ok(member) => {
                tracing::info!(command = offer.command, "an offer was accepted");
                self.note(pid, pid, member.process.host);
                self.members.insert(pid, member);
                self.populated = true;
                self.tell(
                    pid,
                    &Message::Accepted(offer.epoch, crate::homes::can(&self.start.run_dir, self.home_node)),
                );
            }
            Err(why) => {
                tracing::info!(why, "an offer was declined");
                self.populated |= self.members.is_empty();
                self.tell(pid, &Message::Declined(offer.epoch, why));
            }
        }
        Ok(())
    }

    pub(crate) fn begin(&mut self, offer: &Offer, foreign: Option<Foreign>) -> anyhow::Result<Member> {
        if self.sandbox.is_none() {
            let Some(shifts) = self.clocks.shifts() else {
                anyhow::bail!("home has not said what its clocks show")
            };
            let sandbox = Sandbox::make(self.identity.0, self.identity.1, shifts)?;
            // Nobody has been forked in it yet.
            if let Err(error) = tern_cgroup::guests::enter(sandbox.helper(), self.start.guest_cpus) {
                tracing::warn!(%error, "these guests are not in a control group of their own; see tern doctor");
            }
            self.sandbox = Some(sandbox);
        }
        let Some(sandbox) = &self.sandbox else { anyhow::bail!("no sandbox") };
        Ok(Arriving::begin(offer.clone(), foreign, sandbox.fork(offer.own_pid)?)?)
    }

    pub(crate) fn decline(&mut self, pid: HomePid, why: &str) {
        let offered = match self.members.get(&pid).map(|m| &m.process) {
            Some(process) if matches!(process.state, State::Arriving(_)) => process.epoch,
            _ => return,
        };
        self.end(pid);
        self.tell(pid, &Message::Declined(offered, why.into()));
    }

    /// The process that is to come with this thread, all of which is here.
    pub(crate) fn of_arriving(&self, tid: HomePid) -> Option<HomePid> {
        let has =
            |member: &Member| matches!(&member.process.state, State::Arriving(arriving) if arriving.has(tid));
        self.members.iter().find(|(_, member)| has(member)).map(|(pid, _)| *pid)
    }

    /// Takes a part of an arriving process; answers go to `source` if it comes from another node.
    pub(crate) fn receive_part(&mut self, arrived: Arrived, source: Option<&mut Link>) -> Result<(), Failed> {
        let pid = arrived.pid;
        if let Message::Image(image, _) = &arrived.message
            && image.threads.iter().any(|t| self.by_home.get(&t.tid).is_some_and(|of| *of != pid))
        {
            let what = "its sender sent a thread that another guest has".into();
            return Err(tern_tracee::Error::Astray { what, pid: pid.0 }.into());
        }
        let Some(member) = self.members.get_mut(&pid).map(|m| &mut m.process) else { return Ok(()) };
        let State::Arriving(arriving) = &mut member.state else { return Ok(()) };
        let bytes_at = arrived.bytes();
        match &arrived.message {
            Message::Crew(numbers) => arriving.take_crew(numbers)?,
            Message::Space(layout) => {
                fault::point("guest", Phase::Prepare);
                let had = arriving.listener().is_some();
                let missing = arriving.take_space((**layout).clone(), &member.memory, &mut self.cache)?;
                keep(self.sandbox.as_ref(), arriving, had)?;
                muster(self.sandbox.as_ref(), arriving, &member.memory)?;
                match source.or(self.home.as_mut()) {
                    Some(link) => send(link, pid, &Message::Want(member.epoch, missing), &[])?,
                    None => return Ok(()),
                }
            }
            Message::File { file, offset } => {
                let had = arriving.listener().is_some();
                arriving.take_file(*file, *offset, bytes_at, &member.memory, &mut self.cache)?;
                keep(self.sandbox.as_ref(), arriving, had)?;
                muster(self.sandbox.as_ref(), arriving, &member.memory)?;
            }
            Message::Pages(runs) => arriving.take_pages(runs, bytes_at, &member.memory)?,
            Message::Object { file, offset } => {
                arriving.take_object(*file, *offset, bytes_at, &self.cache)?;
            }
            Message::Forget(runs) => arriving.forget(runs, &self.cache)?,
            Message::Image(image, talk) => {
                fault::point("guest", Phase::Freeze);
                let Some(sandbox) = &self.sandbox else { return Ok(()) };
                arriving.take_image(image.clone(), talk.clone(), &member.memory, sandbox, &self.cache)?;
                let ready = Message::Ready(member.epoch, talk.sent);
                self.tell(pid, &ready);
            }
            _ => {}
        }
        Ok(())
    }

    /// All of these have arrived, and share memory: they go together. First all begin: a link that is cut while we tell of
    /// one does not end another.
    pub(crate) fn go_together(&mut self, lives: &[(HomePid, tern_ids::Epoch)]) {
        let begun: Vec<_> = lives.iter().map(|(pid, epoch)| self.begin_life(*pid, *epoch)).collect();
        for ((pid, epoch), begun) in lives.iter().zip(begun) {
            let goes = begun.and_then(|begun| begun.map_or(Ok(()), |since| self.live(*pid, *epoch, since)));
            if let Err(error) = goes {
                self.failed(*pid, &error);
            }
        }
    }

    pub(crate) fn go(&mut self, pid: HomePid, epoch: tern_ids::Epoch) -> Result<(), Failed> {
        match self.begin_life(pid, epoch)? {
            Some(since) => self.live(pid, epoch, since),
            None => Ok(()),
        }
    }

    /// What has arrived becomes a guest, which stands; since when it has stood still.
    fn begin_life(&mut self, pid: HomePid, epoch: tern_ids::Epoch) -> Result<Option<Instant>, Failed> {
        fault::point("guest", Phase::HandOver);
        let Some(member) = self.members.get_mut(&pid) else { return Ok(None) };
        let arriving = match std::mem::replace(&mut member.process.state, State::Running) {
            State::Arriving(arriving) => arriving,
            // Sent on, to a node that was lost when home had decided for it already: this life goes on, as a
            // further one.
            State::Frozen => {
                member.process.epoch = epoch;
                member.live_on()?;
                tracing::info!(%pid, ?epoch, "a guest goes on here");
                self.tell(pid, &Message::Running(epoch, 0));
                return Ok(None);
            }
            other => {
                member.process.state = other;
                return Ok(None);
            }
        };
        let frozen = arriving.frozen();
        let wall = member.begin(*arriving, epoch)?;
        // Next to nothing, on nodes whose clocks are kept by NTP: the others can wait for so long.
        let _it_was_judged_when_its_image_came = wall::reach(wall);
        Ok(Some(frozen))
    }

    /// A guest that stands is set going.
    fn live(&mut self, pid: HomePid, epoch: tern_ids::Epoch, frozen: Instant) -> Result<(), Failed> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        member.be_nice(self.start.guest_nice.into());
        member.process.hot.allowed = self.start.hot_calls;
        member.go_on()?;
        let frozen_us = frozen.elapsed().as_micros() as u64;
        let threads: Vec<_> = member.threads.values().map(|t| (t.tid, t.host, t.home_mask)).collect();
        tracing::info!(%pid, ?epoch, threads = threads.len(), "a guest runs");
        self.tell(pid, &Message::Running(epoch, frozen_us));
        for (tid, host, mask) in threads {
            self.note(pid, tid, host);
            // What the last life told home of its mask may have come too late to be heard.
            self.tell(tid, &Message::Mask(mask));
        }
        fault::point("guest", Phase::Resume);
        Ok(())
    }
}

impl Member {
    /// Everything of it is here: its threads stand where they are to go on. What the wall clock showed when it was stopped.
    fn begin(&mut self, arriving: Arriving, epoch: tern_ids::Epoch) -> Result<u64, Failed> {
        let Self { process, threads } = self;
        let mut arrived = arriving.finish()?;
        let images = std::mem::take(&mut arrived.image.threads);
        process.epoch = epoch;
        process.image = Some(arrived.image);
        process.listener = Some(arrived.listener);
        process.shown = arrived.shown;
        process.foreign = arrived.foreign;
        process.since = Instant::now();
        // The first one may have ended.
        let first = arrived.threads.first().map_or(process.host, Stopped::pid);
        process.memory = Memory::open(first)?;
        process.meter = Meter::begin(process.host, arrived.talk.used)?;
        process.halting = true;
        for ((image, stopped), talk) in images.into_iter().zip(arrived.threads).zip(arrived.talk.talks) {
            let names = (image.tid, image.own_tid, stopped.pid());
            let mut thread = Thread::new(process, names, talk, image.sigmask)?;
            thread.raise_carried()?;
            thread.standing = Some(stopped);
            threads.insert(image.tid, thread);
        }
        Ok(arrived.talk.wall)
    }
}

/// Has the helper hold a guest's listener too, once there is one.
fn keep(sandbox: Option<&Sandbox>, arriving: &Arriving, had: bool) -> Result<(), Failed> {
    match (sandbox, arriving.listener()) {
        (Some(sandbox), Some(listener)) if !had => Ok(sandbox.keep(listener.as_fd())?),
        _ => Ok(()),
    }
}

/// Makes the threads of an arriving process of which it is known that it has them, once there is an address space.
fn muster(sandbox: Option<&Sandbox>, arriving: &mut Arriving, memory: &Memory) -> Result<(), Failed> {
    sandbox.map_or(Ok(()), |sandbox| arriving.muster(memory, sandbox))
}
