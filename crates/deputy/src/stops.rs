//! What the kernel says of our processes; and how a deputy is brought to a stand.

use crate::family::Family;
use crate::member::{Member, State};
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_tracee::stop::{self, Change, Stop, Stopped};

impl Family {
    pub(crate) fn take_stops(&mut self) {
        if self.door.has_changes() {
            self.take_all_stops();
        }
    }

    pub(crate) fn take_all_stops(&mut self) {
        let _drained = self.door.clear_children();
        while let Ok(Some((host, change))) = stop::wait(-1, false) {
            let pid = HomePid(host);
            match change {
                Change::Stopped(stopped) if self.members.contains_key(&pid) => {
                    if let Err(error) = self.take_stop(pid, stopped) {
                        self.lost(pid, &error);
                    }
                }
                // A child whose parent's own stop, which says so, is still to come.
                Change::Stopped(stopped) => drop(self.newborn.insert(host, stopped)),
                Change::Exited(_) | Change::Killed(..) => {
                    self.newborn.remove(&host);
                    self.ended_at_home(pid);
                }
            }
        }
    }

    pub(crate) fn take_stop(&mut self, pid: HomePid, stopped: Stopped) -> tern_tracee::Result<()> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        match (stopped.stop, member.is_away()) {
            (Stop::Exec, _) => self.executed(pid, stopped),
            (Stop::Fork | Stop::Vfork | Stop::Clone, true) => self.forked(pid, stopped),
            (Stop::Group(_), away) => {
                if away {
                    member.job_stopped = true;
                    self.tell(pid, &Message::Stop(true));
                }
                stopped.listen()
            }
            (Stop::Signal(signal), true) => {
                let message = member.signalled(stopped, signal)?;
                message.into_iter().for_each(|m| self.tell(pid, &m));
                Ok(())
            }
            (Stop::Signal(signal), false) if matches!(member.state, State::Lingering(_)) => {
                if let Some((stopped, signal)) = member.signalled_lingering(stopped, signal)? {
                    self.let_go(pid, stopped, signal);
                }
                Ok(())
            }
            (Stop::Signal(signal), false) => stopped.resume(signal),
            (Stop::Interrupt, true) => {
                self.continued(pid);
                self.members.get_mut(&pid).map_or(Ok(()), |m| m.go_on(stopped))
            }
            // An interrupt that was asked for once too often: the call that it has cut short goes on.
            (Stop::Interrupt, false) if matches!(member.state, State::Lingering(_)) => member.go_on(stopped),
            (Stop::Interrupt, false) => {
                let mut registers = stopped.registers()?;
                let before = registers;
                crate::signal::mend(&mut registers);
                if registers != before {
                    stopped.set_registers(&registers)?;
                }
                stopped.resume(0)
            }
            _ => stopped.resume(0),
        }
    }

    /// Brings a deputy to a stand, and sees to what comes first: a signal meets its fate, a fork's child is taken
    /// in, and after an exec there is no deputy any more, nor after its end (`None`).
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn stand(&mut self, pid: HomePid) -> tern_tracee::Result<Option<Stopped>> {
        loop {
            stop::interrupt(pid.0)?;
            let stopped = stop::wait_stop(pid.0)?;
            match stopped.stop {
                Stop::Interrupt => {
                    self.continued(pid);
                    return Ok(Some(stopped));
                }
                // Stopped by job control: it stands as well as any.
                Stop::Group(_) => return Ok(Some(stopped)),
                _ => self.take_stop(pid, stopped)?,
            }
            let deputy = |m: &Member| m.is_away() || matches!(m.state, State::Lingering(_));
            if !self.members.get(&pid).is_some_and(deputy) {
                return Ok(None);
            }
        }
    }

    /// SIGCONT after a group stop shows itself as an interrupt that nobody asked for.
    pub(crate) fn continued(&mut self, pid: HomePid) {
        if self.members.get_mut(&pid).is_some_and(|m| std::mem::take(&mut m.job_stopped)) {
            self.tell(pid, &Message::Stop(false));
        }
    }

    /// Does something with a deputy that stands.
    pub(crate) fn with_deputy<T: Default>(
        &mut self,
        pid: HomePid,
        work: impl FnOnce(&mut Member, Stopped) -> tern_tracee::Result<T>,
    ) -> tern_tracee::Result<T> {
        match (self.stand(pid)?, self.members.get_mut(&pid)) {
            (Some(stopped), Some(member)) => work(member, stopped),
            _ => Ok(T::default()),
        }
    }
}
