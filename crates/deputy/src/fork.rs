//! The home half of a fork: a real child of the real parent, a deputy itself.

use crate::blob;
use crate::family::Family;
use crate::mailbox::{Bell, Mailbox};
use crate::member::{Member, State};
use tern_ids::HomePid;
use tern_tracee::inject::{Injection, Site};
use tern_tracee::stop::{self, Stop, Stopped};
use tern_tracee::{Error, Result};

impl Family {
    /// A deputy has forked: its child, which shares the parent's mailbox until now, gets one of its own and waits
    /// for calls.
    pub(crate) fn forked(&mut self, pid: HomePid, stopped: Stopped) -> Result<()> {
        let child = HomePid(stopped.message()? as i32);
        let cache = self.start.cache_dir.clone();
        let bell = self.bell.clone();
        let newborn = self.newborn.remove(&child.0);
        let Some(parent) = self.members.get_mut(&pid) else { return stopped.resume(0) };
        match newborn
            .map_or_else(|| stop::wait_stop(child.0), Ok)
            .and_then(|n| parent.child(child, n, &cache, bell))
        {
            Ok(member) => {
                if let Some(current) = &mut parent.current {
                    current.child = Some(child);
                }
                self.members.insert(child, member);
            }
            Err(error) => {
                tracing::error!(%error, %child, "a child could not be held");
                tern_tracee::pidfd::kill(child.0);
            }
        }
        stopped.resume(0)
    }
}

impl Member {
    fn child(
        &self,
        pid: HomePid,
        mut stopped: Stopped,
        cache: &std::path::Path,
        bell: Bell,
    ) -> Result<Member> {
        let reserve =
            self.reserve.ok_or_else(|| Error::Astray { what: "forked at home".into(), pid: pid.0 })?;
        while stopped.stop != Stop::Interrupt {
            stopped.resume(0)?;
            stopped = stop::wait_stop(pid.0)?;
        }
        let mut injection = Injection::begin(stopped, Site(reserve.start + blob::call_site()))?;
        let mailbox = Mailbox::make(&mut injection, reserve, bell)?;
        let registers = Self::blob_registers(injection.before(), reserve);
        let mask = injection.mask();
        injection.finish_with(&registers, mask)?.resume(0)?;
        Ok(Member {
            command: self.command.clone(),
            uid: self.uid,
            state: State::Away,
            epoch: self.epoch,
            offered: self.epoch,
            peer: self.peer,
            reserve: Some(reserve),
            machine: self.machine.clone(),
            mailbox: Some(mailbox),
            actions: self.actions.clone(),
            ..Member::at_home(pid, cache)?
        })
    }
}
