//! Guests go home or onward, or stay after all.

use crate::company::Company;
use crate::depart::{Departing, Going};
use crate::family::Family;
use crate::forward::Failed;
use crate::member::{Member, State};
use std::collections::HashSet;
use std::time::Instant;
use tern_ids::{Epoch, HomePid};
use tern_migrate::message::{Arrived, Departure, Inbox, Message, send};
use tern_migrate::source::{SendError, Sending};
use tern_wire::Link;

impl Family {
    pub(crate) fn depart(&mut self, pid: HomePid, departure: &Departure) -> Result<(), Failed> {
        if let Departure::Home { together, .. } = departure
            && let Some(State::Departing(departing)) =
                self.members.get_mut(&pid).map(|m| &mut m.process.state)
        {
            // One of them has forked meanwhile.
            departing.together.clone_from(together);
            return Ok(());
        }
        match departure {
            Departure::Home { .. } => self.set_off(pid, departure.clone(), None),
            Departure::Onward { life, address, shim, fingerprint } => {
                self.setting_off.insert(pid, departure.clone());
                self.aside.reach(pid, *life, address.clone(), *shim, *fingerprint);
                Ok(())
            }
        }
    }

    /// The next node of a guest has been reached, or not. It may not be to go there any more, or as another life.
    pub(crate) fn reached(&mut self, pid: HomePid, life: Epoch, link: Result<Box<Link>, String>) {
        let this = |d: &Departure| matches!(d, Departure::Onward { life: other, .. } if *other == life);
        if !self.setting_off.get(&pid).is_some_and(this) {
            return;
        }
        let Some(departure) = self.setting_off.remove(&pid) else { return };
        let done = match link {
            Ok(link) => self.set_off(pid, departure, Some(*link)),
            Err(why) => {
                self.tell(pid, &Message::Stayed(why));
                Ok(())
            }
        };
        if let Err(error) = done {
            self.failed(pid, &error);
        }
    }

    pub(crate) fn set_off(
        &mut self,
        pid: HomePid,
        departure: Departure,
        link: Option<Link>,
    ) -> Result<(), Failed> {
        let Some(member) = self.members.get_mut(&pid) else {
            self.tell(pid, &Message::Stayed("busy: it is being born".into()));
            return Ok(());
        };
        if !member.put_files_down(self.home.as_mut())? {
            self.putting_down.insert(pid, (departure, link));
            return Ok(());
        }
        let begun = match member.movable() {
            _ if !member.can_depart(matches!(departure, Departure::Home { .. })) => {
                Err("busy: it is making a child".into())
            }
            Err(unmovable) => Err(unmovable.to_string()),
            Ok(()) => self.begin_departure(pid, departure, link).map_err(|e| e.to_string()),
        };
        if let Err(why) = begun {
            self.tell(pid, &Message::Stayed(why));
            let Some(process) = self.members.get_mut(&pid).map(|member| &mut member.process) else {
                return Ok(());
            };
            process.files.take_up();
            if let Some(dying) = &mut process.dying {
                // Home is told once more, and ends it as it is.
                dying.told = false;
            }
        }
        Ok(())
    }

    /// Those set off whose files home has by now.
    pub(crate) fn put_files_down(&mut self) {
        for (pid, (departure, link)) in std::mem::take(&mut self.putting_down) {
            if let Err(error) = self.set_off(pid, departure, link) {
                self.failed(pid, &error);
            }
        }
    }

    /// Writes what has waited long enough.
    pub(crate) fn write_behind(&mut self) {
        let due = self.members.values().filter(|member| member.due().is_some());
        for pid in due.map(|member| member.process.pid).collect::<Vec<_>>() {
            let Some(member) = self.members.get_mut(&pid) else { continue };
            if let Err(error) = member.write_behind(self.home.as_mut()) {
                self.failed(pid, &error);
            }
        }
    }

    pub(crate) fn begin_departure(
        &mut self,
        pid: HomePid,
        departure: Departure,
        mut link: Option<Link>,
    ) -> anyhow::Result<()> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        let source = member.prepare_departure(&self.cache)?;
        let out = link.as_mut().or(self.home.as_mut()).ok_or(tern_wire::LinkError::Closed)?;
        let first = match &departure {
            Departure::Home { migration, .. } => Message::Departing(*migration),
            Departure::Onward { life, .. } => Message::Brings(*life),
        };
        send(out, pid, &first, &[])?;
        let (company, carries) = (Company::none(), HashSet::new());
        let going = &mut Going { member, cache: &self.cache, company, ready: false, carries };
        let Some(sending) = Sending::begin(&mut Some(source), going, out)? else { return Ok(()) };
        let stirred = (Instant::now(), (0, 0, false));
        let together = match departure {
            Departure::Home { together, .. } => together,
            Departure::Onward { .. } => Vec::new(),
        };
        let carries = HashSet::new();
        let departing = Departing { together, ready: false, carries, link, sending, stirred };
        member.process.state = State::Departing(Box::new(departing));
        Ok(())
    }

    pub(crate) fn with_departing(
        &mut self,
        pid: HomePid,
        go: impl FnOnce(&mut Sending, &mut Going<'_>, &mut Link) -> Result<bool, SendError>,
    ) {
        let (patience, company) = (self.patience(), self.company(pid));
        let Some(member) = self.members.get_mut(&pid) else { return };
        if !matches!(member.process.state, State::Departing(_)) {
            return;
        }
        let state = std::mem::replace(&mut member.process.state, State::Running);
        let State::Departing(mut departing) = state else { return };
        let (ready, carries) = (departing.ready, std::mem::take(&mut departing.carries));
        let mut going = Going { member, cache: &self.cache, company, ready, carries };
        let done = match departing.link.as_mut().or(self.home.as_mut()) {
            Some(link) => go(&mut departing.sending, &mut going, link),
            None => Err(tern_wire::LinkError::Closed.into()),
        };
        (departing.ready, departing.carries) = (going.ready, going.carries);
        match done {
            Ok(true) => {
                member.process.carried = departing.carries;
                member.process.state = State::Frozen;
                let leaving = |link| Leaving { pid, link, stirred: Instant::now(), unsent: 0 };
                self.leaving.extend(departing.link.take().map(leaving));
            }
            Ok(false) => {
                let silent = departing.silent() > patience;
                member.process.state = State::Departing(departing);
                if silent {
                    self.stay(pid, Some("the next node takes nothing".into()));
                }
            }
            Err(error) => {
                member.process.state = State::Departing(departing);
                self.stay(pid, Some(error.to_string()));
                if let SendError::Process(error) = error
                    && error.is_gone()
                {
                    self.failed(pid, &error.into());
                }
            }
        }
    }

    pub(crate) fn wanted(&mut self, pid: HomePid, indices: &[u32]) -> Result<(), Failed> {
        self.with_departing(pid, |sending, going, _link| sending.wanted(indices, going).map(|()| false));
        Ok(())
    }

    pub(crate) fn take_from_next(&mut self) {
        let pids: Vec<HomePid> = self.members.keys().copied().collect();
        for pid in pids {
            while let Some(State::Departing(departing)) =
                self.members.get_mut(&pid).map(|m| &mut m.process.state)
            {
                let Some(link) = &mut departing.link else { break };
                match link.receive() {
                    Ok(Some(frame)) => match Inbox::default().take(frame) {
                        Ok(Some(Arrived { message: Message::Want(_, indices), .. })) => {
                            drop(self.wanted(pid, &indices));
                        }
                        _ => self.stay(pid, Some("the next node broke the protocol".into())),
                    },
                    Ok(None) => break,
                    Err(error) => self.stay(pid, Some(error.to_string())),
                }
            }
        }
    }

    pub(crate) fn go_on_departing(&mut self) {
        let departing = |m: &&Member| matches!(m.process.state, State::Departing(_));
        let pids: Vec<HomePid> = self.members.values().filter(departing).map(|m| m.process.pid).collect();
        for pid in pids {
            self.with_departing(pid, |sending, going, link| sending.advance(going, link));
        }
    }

    /// Sends what is left for the next nodes of guests that have been sent off. A link is kept, also with nothing left
    /// to send, until home has decided: then the next node has everything, or needs nothing.
    pub(crate) fn see_off(&mut self) {
        let mut failed = Vec::new();
        let (members, patience) = (&self.members, self.patience());
        self.leaving.retain_mut(|leaving| {
            if !members.get(&leaving.pid).is_some_and(|m| matches!(m.process.state, State::Frozen)) {
                return false;
            }
            let why = match leaving.go_on() {
                Ok(()) if leaving.stirred.elapsed() <= patience => return true,
                Ok(()) => "the next node takes nothing".into(),
                Err(error) => error.to_string(),
            };
            failed.push((leaving.pid, why));
            false
        });
        for (pid, why) in failed {
            // It may have arrived there all the same: whether it did, only home knows. It stands still until home
            // says `Thaw`, or that it is over.
            self.tell(pid, &Message::Stayed(why));
        }
    }

    /// A departure is off: the guest runs on.
    pub(crate) fn stay(&mut self, pid: HomePid, why: Option<String>) {
        let (setting_off, putting_down) = (self.setting_off.remove(&pid), self.putting_down.remove(&pid));
        if (setting_off.is_some() || putting_down.is_some())
            && let Some(why) = &why
        {
            self.tell(pid, &Message::Stayed(why.clone()));
        }
        let Some(member) = self.members.get_mut(&pid) else { return };
        if putting_down.is_some() {
            member.process.files.take_up();
        }
        if !matches!(member.process.state, State::Departing(_)) {
            return;
        }
        // Threads that stand for it go on, if there is no other reason.
        let gone = member.live_on();
        if let Some(why) = why {
            self.tell(pid, &Message::Stayed(why));
        }
        if let Err(error) = gone {
            self.failed(pid, &error.into());
        }
    }
}

/// The link over which a guest was sent on, with what has not left yet.
#[derive(Debug)]
pub(crate) struct Leaving {
    pub(crate) pid: HomePid,
    pub(crate) link: Link,
    /// When something of it left last.
    pub(crate) stirred: Instant,
    pub(crate) unsent: usize,
}

impl Leaving {
    /// Sends what can be sent. It is read as well: closed with something unread, the link would be reset, and what the
    /// next node has not read yet would be lost.
    pub(crate) fn go_on(&mut self) -> Result<(), tern_wire::LinkError> {
        for _ in 0..64 {
            if self.link.receive()?.is_none() {
                break;
            }
        }
        self.link.flush()?;
        if std::mem::replace(&mut self.unsent, self.link.unsent()) != self.link.unsent() {
            self.stirred = Instant::now();
        }
        Ok(())
    }
}
