//! Guests go home or onward, or stay after all.

use crate::depart::{Departing, Going};
use crate::family::Family;
use crate::forward::Failed;
use crate::member::{Member, State};
use std::time::Instant;
use tern_ids::{HomePid, MigrationId};
use tern_migrate::message::{Arrived, Departure, Inbox, Message};
use tern_migrate::source::{SendError, Sending};
use tern_tracee::stop::Stopped;
use tern_wire::Link;

impl Family {
    pub(crate) fn depart(&mut self, pid: HomePid, departure: &Departure) -> Result<(), Failed> {
        match departure {
            Departure::Home(_) => self.set_off(pid, departure.clone(), None),
            Departure::Onward { migration, address, shim, fingerprint } => {
                self.setting_off.insert(pid, departure.clone());
                self.aside.reach(pid, *migration, address.clone(), *shim, *fingerprint);
                Ok(())
            }
        }
    }

    /// The next node of a guest has been reached, or not. The migration may be off by now, or begun anew.
    pub(crate) fn reached(&mut self, pid: HomePid, migration: MigrationId, link: Result<Box<Link>, String>) {
        let this = |d: &Departure| matches!(d, Departure::Onward { migration: m, .. } if *m == migration);
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
            self.tell(pid, &Message::Stayed("it is not here".into()));
            return Ok(());
        };
        let (mut dying, mut still) = (None, None);
        match std::mem::replace(&mut member.state, State::Running) {
            State::Held(stopped) => stopped.resume(0)?,
            // It is to die at home: it goes as it stands, and makes its last instruction again there.
            State::Dying { signal, stopped, .. } => (dying, still) = (Some(signal), Some(stopped)),
            other => member.state = other,
        }
        let begun = match member.can_depart() {
            true => self.begin_departure(pid, departure, link, dying, &mut still).map_err(|e| e.to_string()),
            false => Err("busy: it is making a child".into()),
        };
        if let Err(why) = begun {
            self.tell(pid, &Message::Stayed(why));
            if let (Some(member), Some(signal), Some(stopped)) = (self.members.get_mut(&pid), dying, still) {
                // Home is told once more, and ends it as it is.
                member.state = State::Dying { signal, told: false, stopped };
            }
        }
        Ok(())
    }

    pub(crate) fn begin_departure(
        &mut self,
        pid: HomePid,
        departure: Departure,
        mut link: Option<Link>,
        dying: Option<i32>,
        still: &mut Option<Stopped>,
    ) -> anyhow::Result<()> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        let source = member.prepare_departure(&self.cache, still.is_some())?;
        let out = link.as_mut().or(self.home.as_mut()).ok_or(tern_wire::LinkError::Closed)?;
        let mut going = Going { member, cache: &self.cache, stopped: still.take() };
        let sending = Sending::begin(source, &mut going, out);
        *still = going.stopped.take();
        let (sending, stopped) = (sending?, still.take());
        member.state = State::Departing(Box::new(Departing {
            departure,
            link,
            sending,
            stopped,
            dying,
            stirred: (Instant::now(), (0, 0, false)),
        }));
        Ok(())
    }

    pub(crate) fn with_departing(
        &mut self,
        pid: HomePid,
        go: impl FnOnce(&mut Sending, &mut Going<'_>, &mut Link) -> Result<bool, SendError>,
    ) {
        let patience = self.patience();
        let Some(member) = self.members.get_mut(&pid) else { return };
        if !matches!(member.state, State::Departing(_)) {
            return;
        }
        let State::Departing(mut departing) = std::mem::replace(&mut member.state, State::Running) else {
            return;
        };
        let mut going = Going { member, cache: &self.cache, stopped: departing.stopped.take() };
        let done = match departing.link.as_mut().or(self.home.as_mut()) {
            Some(link) => go(&mut departing.sending, &mut going, link),
            None => Err(tern_wire::LinkError::Closed.into()),
        };
        departing.stopped = going.stopped.take();
        match (done, departing.stopped.take()) {
            (Ok(true), Some(stopped)) => {
                member.state = State::Frozen(stopped);
                let leaving = |link| Leaving { pid, link, stirred: Instant::now(), unsent: 0 };
                self.leaving.extend(departing.link.take().map(leaving));
            }
            (Ok(_), stopped) => {
                departing.stopped = stopped;
                let silent = departing.silent() > patience;
                member.state = State::Departing(departing);
                if silent {
                    self.stay(pid, Some("the next node takes nothing".into()));
                }
            }
            (Err(error), stopped) => {
                departing.stopped = stopped;
                member.state = State::Departing(departing);
                self.stay(pid, Some(error.to_string()));
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
            while let Some(State::Departing(departing)) = self.members.get_mut(&pid).map(|m| &mut m.state) {
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
        let departing = |m: &&Member| matches!(m.state, State::Departing(_));
        let pids: Vec<HomePid> = self.members.values().filter(departing).map(|m| m.pid).collect();
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
            if !members.get(&leaving.pid).is_some_and(|m| matches!(m.state, State::Frozen(_))) {
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
        if self.setting_off.remove(&pid).is_some()
            && let Some(why) = &why
        {
            self.tell(pid, &Message::Stayed(why.clone()));
        }
        let Some(member) = self.members.get_mut(&pid) else { return };
        if !matches!(member.state, State::Departing(_)) {
            return;
        }
        let State::Departing(departing) = std::mem::replace(&mut member.state, State::Running) else {
            return;
        };
        match (departing.stopped, departing.dying) {
            (Some(stopped), Some(signal)) => {
                member.state = State::Dying { signal, told: false, stopped };
            }
            (Some(stopped), None) => {
                let _gone = stopped.resume(0);
            }
            (None, _) => {}
        }
        if let Some(why) = why {
            self.tell(pid, &Message::Stayed(why));
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
