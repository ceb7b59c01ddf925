//! What home says, and the shims of earlier lives.

use crate::family::Family;
use crate::forward::Failed;
use crate::member::State;
use std::time::Instant;
use tern_ids::HomePid;
use tern_migrate::message::{Arrived, Message};
use tern_tracee::stop::Siginfo;

impl Family {
    pub(crate) fn take_messages(&mut self) {
        // A few at a time: a link that is never idle must not keep us from our other duties.
        for _ in 0..64 {
            if !self.home_ready {
                break;
            }
            let Some(home) = &mut self.home else { break };
            let taken = match home.receive() {
                Ok(Some(frame)) => self.inbox.take(frame).map_err(|e| e.to_string()),
                Ok(None) => break,
                Err(error) => Err(error.to_string()),
            };
            self.heard = Instant::now();
            match taken {
                Ok(Some(arrived)) => self.take_message(arrived),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(error, "the link to home is cut");
                    self.lose_home();
                }
            }
        }
        self.take_from_sources();
        self.take_from_next();
    }

    pub(crate) fn take_from_sources(&mut self) {
        let mut sources = std::mem::take(&mut self.sources);
        sources.retain_mut(|(link, inbox)| {
            for _ in 0..64 {
                match link.receive() {
                    Ok(Some(frame)) => match inbox.take(frame) {
                        Ok(Some(arrived)) => {
                            let pid = arrived.pid;
                            if let Err(error) = self.receive_part(arrived, Some(link)) {
                                tracing::warn!(%pid, %error, "an arrival failed");
                                self.decline(pid, &error.to_string());
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
        self.sources.append(&mut sources);
    }

    pub(crate) fn take_message(&mut self, arrived: Arrived) {
        let pid = arrived.pid;
        let failed = match &arrived.message {
            Message::Offer(offer) => self.offered(offer),
            Message::Space(_)
            | Message::File { .. }
            | Message::Pages(_)
            | Message::Forget(_)
            | Message::Image(..) => {
                let done = self.receive_part(arrived, None);
                if let Err(error) = done {
                    tracing::warn!(%pid, %error, "an arrival failed");
                    self.decline(pid, &error.to_string());
                }
                Ok(())
            }
            Message::Go(epoch) => self.go(pid, *epoch),
            Message::Depart(departure) => self.depart(pid, departure),
            Message::Clocks(home) => {
                self.clocks.heard(*home);
                self.tell(HomePid(0), &Message::Beat);
                Ok(())
            }
            Message::Drop => {
                self.end(pid);
                Ok(())
            }
            Message::Thaw => self.thaw(pid),
            Message::Want(_, indices) => self.wanted(pid, indices),
            Message::Result(_) => self.result(arrived),
            Message::Content { hash, offset } => {
                let (hash, offset) = (*hash, *offset);
                match self.members.get_mut(&pid) {
                    Some(member) => member.take_content(hash, offset, arrived.bytes(), &mut self.cache),
                    None => Ok(()),
                }
            }
            Message::Signal(count, info) => {
                match (self.members.get_mut(&pid), Siginfo::try_from(info.as_slice())) {
                    (Some(member), Ok(info)) => member.raise(*count, info).map_err(Failed::from),
                    _ => Ok(()),
                }
            }
            Message::Stop(stop) => self.job_control(pid, *stop),
            _ => Ok(()),
        };
        if let Err(error) = failed {
            self.failed(pid, &error);
        }
    }

    pub(crate) fn result(&mut self, arrived: Arrived) -> Result<(), Failed> {
        let pid = arrived.pid;
        let Message::Result(result) = arrived.message else { return Ok(()) };
        if result.child.is_some() {
            // It cannot go while it makes a child; home asks again in a moment.
            self.stay(pid, Some("busy: it is making a child".into()));
        }
        let Some(member) = self.members.get_mut(&pid).filter(|m| m.is_live()) else { return Ok(()) };
        let Some((open, result)) = member.answered(*result)? else { return Ok(()) };
        if let Some(child) = result.child {
            let Some(sandbox) = &self.sandbox else { return Ok(()) };
            match member.fork(&open, child, result.outcome.ret as i32, sandbox) {
                Ok(child) => {
                    self.by_host.insert(child.host, child.pid);
                    self.members.insert(child.pid, child);
                }
                Err(error) => {
                    tracing::error!(%error, "a fork failed here");
                    self.tell(child, &Message::Died(libc::SIGKILL));
                }
            }
            return Ok(());
        }
        member.local_part(open, result, &mut self.cache, self.home.as_mut())
    }

    pub(crate) fn job_control(&mut self, pid: HomePid, stop: bool) -> Result<(), Failed> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        if stop {
            if matches!(member.state, State::Running) && member.can_halt() {
                let stopped = member.halt()?;
                member.state = State::Held(stopped);
            }
            return Ok(());
        }
        self.thaw(pid)
    }

    pub(crate) fn thaw(&mut self, pid: HomePid) -> Result<(), Failed> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        match std::mem::replace(&mut member.state, State::Running) {
            State::Frozen(stopped) | State::Held(stopped) => stopped.resume(0)?,
            State::Departing(departing) => {
                member.state = State::Departing(departing);
                self.stay(pid, None);
            }
            other => member.state = other,
        }
        Ok(())
    }
}
