//! Guests come: offered, sent part by part, set going.

use crate::arrive::{self, Arriving};
use crate::cpu::Meter;
use crate::family::Family;
use crate::forward::Failed;
use crate::member::{Member, State};
use crate::sandbox::Sandbox;
use std::os::fd::AsFd;
use std::time::Instant;
use tern_ids::HomePid;
use tern_migrate::message::{Arrived, Message, Offer, send};
use tern_migrate::{Phase, fault, wall};
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
            .and_then(|()| self.begin(offer).map_err(|e| e.to_string()));
        match begun {
            Ok(member) => {
                tracing::info!(command = offer.command, "an offer was accepted");
                self.by_host.insert(member.host, pid);
                self.members.insert(pid, member);
                self.populated = true;
                self.tell(pid, &Message::Accepted(offer.epoch));
            }
            Err(why) => {
                tracing::info!(why, "an offer was declined");
                self.populated |= self.members.is_empty();
                self.tell(pid, &Message::Declined(offer.epoch, why));
            }
        }
        Ok(())
    }

    pub(crate) fn begin(&mut self, offer: &Offer) -> anyhow::Result<Member> {
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
        Ok(Arriving::begin(offer.clone(), sandbox.fork(offer.own_pid)?)?)
    }

    pub(crate) fn decline(&mut self, pid: HomePid, why: &str) {
        let offered = match self.members.get(&pid) {
            Some(member) if matches!(member.state, State::Arriving(_)) => member.epoch,
            _ => return,
        };
        self.end(pid);
        self.tell(pid, &Message::Declined(offered, why.into()));
    }

    /// Takes a part of an arriving process; answers go to `source` if it comes from another node.
    pub(crate) fn receive_part(&mut self, arrived: Arrived, source: Option<&mut Link>) -> Result<(), Failed> {
        let pid = arrived.pid;
        if matches!(self.members.get(&pid).map(|m| &m.state), Some(State::Running))
            || !self.members.contains_key(&pid)
        {
            return Ok(());
        }
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        let State::Arriving(arriving) = &mut member.state else { return Ok(()) };
        let bytes_at = arrived.bytes();
        match &arrived.message {
            Message::Space(layout) => {
                fault::point("guest", Phase::Prepare);
                let had = arriving.listener().is_some();
                let missing = arriving.take_space((**layout).clone(), &member.memory, &mut self.cache)?;
                keep(self.sandbox.as_ref(), arriving, had)?;
                match source.or(self.home.as_mut()) {
                    Some(link) => send(link, pid, &Message::Want(member.epoch, missing), &[])?,
                    None => return Ok(()),
                }
            }
            Message::File { file, offset } => {
                let had = arriving.listener().is_some();
                arriving.take_file(*file, *offset, bytes_at, &member.memory, &mut self.cache)?;
                keep(self.sandbox.as_ref(), arriving, had)?;
            }
            Message::Pages(runs) => arriving.take_pages(runs, bytes_at, &member.memory)?,
            Message::Forget(runs) => arriving.forget(runs, &self.cache)?,
            Message::Image(image, talk) => {
                fault::point("guest", Phase::Freeze);
                arriving.take_image(image.clone(), talk.clone(), &member.memory, &self.cache)?;
                let ready = Message::Ready(member.epoch, talk.frozen_us, talk.sent);
                self.tell(pid, &ready);
            }
            _ => {}
        }
        Ok(())
    }

    pub(crate) fn go(&mut self, pid: HomePid, epoch: tern_ids::Epoch) -> Result<(), Failed> {
        fault::point("guest", Phase::HandOver);
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        let arriving = match std::mem::replace(&mut member.state, State::Running) {
            State::Arriving(arriving) => arriving,
            // Sent on, to a node that was lost when home had decided for it already: this life goes on, as a
            // further one.
            State::Frozen(stopped) => {
                member.epoch = epoch;
                stopped.resume(0)?;
                tracing::info!(%pid, ?epoch, "a guest goes on here");
                self.tell(pid, &Message::Running(epoch));
                return Ok(());
            }
            other => {
                member.state = other;
                return Ok(());
            }
        };
        let arrived = arriving.finish()?;
        member.epoch = epoch;
        member.home_mask = arrived.image.thread.sigmask;
        member.image = Some(arrived.image);
        member.talk = arrived.talk;
        member.listener = Some(arrived.listener);
        member.shown = arrived.shown;
        member.since = Instant::now();
        member.meter = Meter::begin(member.host, member.talk.used)?;
        member.raise_carried()?;
        // Next to nothing, on nodes whose clocks are kept by NTP: the others can wait for so long.
        std::thread::sleep(wall::wait(member.talk.wall, wall::now()).unwrap_or_default());
        member.be_nice(self.start.guest_nice.into());
        arrived.stopped.resume(0)?;
        tracing::info!(%pid, ?epoch, "a guest runs");
        let mask = member.home_mask;
        self.tell(pid, &Message::Running(epoch));
        // What the last life told home of its mask may have come too late to be heard.
        self.tell(pid, &Message::Mask(mask));
        fault::point("guest", Phase::Resume);
        Ok(())
    }
}

/// Has the helper hold a guest's listener too, once there is one.
fn keep(sandbox: Option<&Sandbox>, arriving: &Arriving, had: bool) -> Result<(), Failed> {
    match (sandbox, arriving.listener()) {
        (Some(sandbox), Some(listener)) if !had => Ok(sandbox.keep(listener.as_fd())?),
        _ => Ok(()),
    }
}
