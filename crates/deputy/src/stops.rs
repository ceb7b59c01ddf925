//! What the kernel says of our processes; and how they, and deputies, are brought to a stand.
//!
//! Everything that is reported goes through [`Family::take_change`], also while something is waited for: an exec by one
//! thread, for example, is complete only when the ends of all others have been taken. So who waits for a stand says what
//! he wants (`wanted`), and takes what comes, of whomever, until it has come.

use crate::family::Family;
use crate::member::{Member, State};
use crate::thread::Thread;
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_migrate::partial::rest;
use tern_tracee::stop::{self, Change, Stop, Stopped};
use tern_tracee::vdso::lead_out;
use tern_tracee::{Result, procfs};

/// How long we sleep where the kernel would not wake us.
pub(crate) const NAP: std::time::Duration = std::time::Duration::from_micros(100);

impl Family {
    pub(crate) fn take_stops(&mut self) {
        if self.door.has_changes() || stop::has_kept() {
            let _any = self.take_all_stops();
        }
    }

    /// True if there was any.
    pub(crate) fn take_all_stops(&mut self) -> bool {
        let _drained = self.door.clear_children();
        let mut any = false;
        while let Ok(Some((host, change))) = stop::wait(-1, false) {
            self.take_change(HomePid(host), change);
            any = true;
        }
        any
    }

    fn take_change(&mut self, tid: HomePid, change: Change) {
        match change {
            Change::Stopped(stopped) if self.of_thread(tid).is_some() => {
                if let Err(error) = self.take_stop(tid, stopped) {
                    self.lost(tid, &error);
                }
            }
            // A child, or a new thread, whose parent's own stop, which says so, is still to come.
            Change::Stopped(stopped) => drop(self.newborn.insert(tid.0, stopped)),
            Change::Exited(_) | Change::Killed(..) => {
                self.newborn.remove(&tid.0);
                self.finish_fork(tid);
                if self.members.contains_key(&tid) {
                    // Of the first thread the kernel says so last.
                    self.ended_at_home(tid);
                } else if let Some(member) = self.of_thread(tid) {
                    member.thread_over(tid);
                    let (pid, over) = (member.pid, member.living().next().is_none());
                    // Of a first thread that had ended before it was ours, nobody says anything to us.
                    if over {
                        self.ended_at_home(pid);
                    }
                }
            }
        }
    }

    fn take_stop(&mut self, tid: HomePid, stopped: Stopped) -> Result<()> {
        let Some(member) = self.of_thread(tid) else { return Ok(()) };
        let (pid, away) = (member.pid, member.is_away());
        let Some(thread) = member.threads.get(&tid) else { return Ok(()) };
        let (wanted, lingers) = (thread.wanted, thread.lingering.is_some());
        match (stopped.stop, away || lingers) {
            (Stop::Exec, _) => return self.executed(pid, stopped),
            // Stopped by job control it stands as well as any.
            (Stop::Group(_), _) if wanted => return member.stands_at(stopped),
            (Stop::Group(_), _) => {
                if away && !std::mem::replace(&mut member.job_stopped, true) {
                    self.tell(pid, &Message::Stop(true));
                }
                return stopped.listen();
            }
            (Stop::Interrupt, _) => {
                if away {
                    self.continued(pid);
                }
                let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
                if !away && !lingers {
                    mend(member, tid, &stopped, wanted)?;
                }
                if wanted {
                    let stopped = match &member.state {
                        State::Outbound(outbound) => lead_out(stopped, &member.memory, &outbound.vdso)?,
                        _ => stopped,
                    };
                    return member.stands_at(stopped);
                }
                if away || lingers {
                    // An interrupt that was asked for once too often: the call that it has cut short goes on.
                    return member.go_on(stopped);
                }
                stopped.resume(0)?;
            }
            (Stop::Clone, false) => self.thread_born(pid, &stopped).and_then(|()| stopped.resume(0))?,
            (Stop::Fork | Stop::Vfork | Stop::Clone, true) if away => self.forked(tid, stopped)?,
            (Stop::Signal(signal), true) if away => {
                let message = member.signalled(stopped, signal)?;
                message.into_iter().for_each(|m| self.tell(tid, &m));
            }
            (Stop::Signal(signal), true) => return self.signalled_lingering(tid, stopped, signal),
            (Stop::Signal(signal), false) => {
                // Untraced, a signal that nobody notices would have interrupted nothing.
                if is_unnoticed(tid, signal) {
                    mend(member, tid, &stopped, false)?;
                }
                stopped.resume(signal)?;
            }
            _ => stopped.resume(0)?,
        }
        // The kernel has forgotten at this stop that we wanted another.
        if wanted && self.of_thread(tid).is_some() {
            again(tid)?;
        }
        Ok(())
    }

    /// A process at home has made a thread, or with odd flags a child, which is none of ours.
    fn thread_born(&mut self, pid: HomePid, stopped: &Stopped) -> Result<()> {
        let tid = HomePid(stopped.message()? as i32);
        if self.of_thread(tid).is_some() {
            // It was found when its process was seized.
            return Ok(());
        }
        let newborn = self.newborn.remove(&tid.0).map_or_else(|| stop::wait_stop(tid.0), Ok);
        let (Ok(newborn), Ok(mut thread)) = (newborn, Thread::at_home(tid)) else { return Ok(()) };
        let Some(member) = self.members.get_mut(&pid) else { return newborn.detach(0) };
        if !procfs::threads(pid.0)?.contains(&tid.0) {
            return newborn.detach(0);
        }
        // Born while the others are brought to a stand: it stands.
        if member.threads.values().any(|other| other.wanted) {
            (thread.wanted, thread.standing) = (true, Some(newborn));
        } else {
            newborn.resume(0)?;
        }
        member.threads.insert(tid, thread);
        Ok(())
    }

    /// The same, while a process at home is awaited. Of its first thread, if that ends before others, the kernel says
    /// nothing.
    fn wait_for_change_but_for_first(&mut self, pid: HomePid) -> Result<()> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        let awaited = member.living().any(|thread| thread.tid == pid && thread.standing.is_none());
        if !awaited || member.living().count() == 1 {
            return self.wait_for_change();
        }
        if procfs::has_ended(pid.0) {
            member.thread(pid)?.ending = true;
            member.look_past(pid);
            return Ok(());
        }
        match stop::wait(-1, false)? {
            Some((host, change)) => self.take_change(HomePid(host), change),
            None => std::thread::sleep(NAP),
        }
        Ok(())
    }

    /// Waits for what the kernel says next of anybody.
    fn wait_for_change(&mut self) -> Result<()> {
        if let Some((host, change)) = stop::wait(-1, true)? {
            self.take_change(HomePid(host), change);
        }
        Ok(())
    }

    /// Brings a process that runs at home to a stand, with all its threads. Signals are delivered on the way, as if we
    /// were not there. False if it is gone, or not ours any more, or does already what comes next: one that was on its
    /// way and executes a program begins anew by itself.
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub(crate) fn halt_at_home(&mut self, pid: HomePid) -> Result<bool> {
        let execs = self.members.get(&pid).map(|member| member.execs);
        loop {
            if self.stands_still(pid) {
                return Ok(false);
            }
            let Some(member) = self.members.get_mut(&pid) else { return Ok(false) };
            let anew = matches!(member.state, State::Outbound(_)) && Some(member.execs) != execs;
            if member.is_away() || anew || member.threads.is_empty() {
                return Ok(false);
            }
            // One that executes a program has its number by now: all others are over, and its stop is to come.
            if member.threads.get(&pid).is_some_and(|first| first.ending) && !procfs::has_ended(pid.0) {
                member.threads.insert(pid, Thread::at_home(pid)?);
            }
            if member.stands() {
                return Ok(true);
            }
            let mut gone = Vec::new();
            for thread in member.threads.values_mut().filter(|t| t.standing.is_none() && !t.ending) {
                if !std::mem::replace(&mut thread.wanted, true) && !again(thread.tid)? {
                    gone.push(thread.tid);
                }
            }
            // Of those whose end has been taken already nothing more will come.
            gone.retain(|tid| procfs::status(tid.0).map_or(true, |s| s.has_ended() && s.tracer == 0));
            for tid in &gone {
                if *tid == pid {
                    self.ended_at_home(pid);
                } else if let Some(member) = self.members.get_mut(&pid) {
                    member.thread_over(*tid);
                }
            }
            if gone.is_empty() {
                self.wait_for_change_but_for_first(pid)?;
            }
        }
    }

    /// Brings a deputy thread to a stand, and sees to what comes first: a signal meets its fate, a fork's child is taken
    /// in, and after an exec there is no deputy any more, nor after its end (`None`).
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn stand(&mut self, tid: HomePid) -> Result<Option<Stopped>> {
        loop {
            let Some(member) = self.of_thread(tid) else { return Ok(None) };
            let away = member.is_away();
            let thread = member.thread(tid)?;
            if thread.ending || !away && thread.lingering.is_none() {
                return Ok(None);
            }
            if let Some(stopped) = thread.standing.take() {
                thread.wanted = false;
                return Ok(Some(stopped));
            }
            if !std::mem::replace(&mut thread.wanted, true) {
                stop::interrupt(tid.0)?;
            }
            self.wait_for_change()?;
        }
    }

    /// Asks all threads of a deputy to stand that is about to be brought to a stand, so that they need not be waited for
    /// one after the other.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn call_to_stand(&mut self, pid: HomePid) -> Result<()> {
        let Some(member) = self.members.get_mut(&pid).filter(|member| member.is_away()) else {
            return Ok(());
        };
        let awaited = member.threads.values_mut().filter(|t| !t.ending && t.standing.is_none() && !t.wanted);
        for thread in awaited {
            thread.wanted = true;
            stop::interrupt(thread.tid.0)?;
        }
        Ok(())
    }

    /// Brings a whole deputy to a stand; false if it is none any more.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn stand_all(&mut self, pid: HomePid) -> Result<bool> {
        self.call_to_stand(pid)?;
        let Some(member) = self.members.get(&pid) else { return Ok(false) };
        let tids: Vec<HomePid> = member.living().map(|thread| thread.tid).collect();
        for tid in tids {
            let Some(stopped) = self.stand(tid)? else { return Ok(false) };
            match self.members.get_mut(&pid) {
                Some(member) => member.stands_at(stopped)?,
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    /// SIGCONT after a group stop shows itself as an interrupt that nobody asked for.
    pub(crate) fn continued(&mut self, pid: HomePid) {
        if self.members.get_mut(&pid).is_some_and(|m| std::mem::take(&mut m.job_stopped)) {
            self.tell(pid, &Message::Stop(false));
        }
    }

    /// Does something with a deputy thread that stands.
    pub(crate) fn with_deputy<T: Default>(
        &mut self,
        tid: HomePid,
        work: impl FnOnce(&mut Member, Stopped) -> Result<T>,
    ) -> Result<T> {
        match (self.stand(tid)?, self.of_thread(tid)) {
            (Some(stopped), Some(member)) => work(member, stopped),
            _ => Ok(T::default()),
        }
    }

    /// Does something with a process away of which some deputy thread stands.
    pub(crate) fn with_process<T: Default>(
        &mut self,
        pid: HomePid,
        work: impl FnOnce(&mut Member, Stopped) -> Result<T>,
    ) -> Result<T> {
        match self.members.get(&pid).map(Member::any) {
            Some(any) => self.with_deputy(any?, work),
            None => Ok(T::default()),
        }
    }
}

/// Whether a process that runs at home ignores this signal, so that the kernel tells only its tracer of it.
fn is_unnoticed(tid: HomePid, signal: i32) -> bool {
    let among = |set: u64| set >> (signal - 1) & 1 == 1;
    procfs::status(tid.0).is_ok_and(|status| {
        among(status.ignored) || !among(status.caught) && tern_image::process::is_ignored_by_default(signal)
    })
}

/// Asks a thread to stand; false if it is gone, which it says by itself unless that has been heard.
fn again(tid: HomePid) -> Result<bool> {
    match stop::interrupt(tid.0) {
        Err(error) if error.is_gone() => Ok(false),
        done => done.map(|()| true),
    }
}

/// Mends what our interruption has done to a thread that runs at home. If it is to stay standing, the part of a transfer
/// that is done is noted.
fn mend(member: &mut Member, tid: HomePid, stopped: &Stopped, stands: bool) -> Result<()> {
    let mut registers = stopped.registers()?;
    let before = registers;
    crate::signal::mend(&mut registers);
    let thread = member.thread(tid)?;
    if stands && let Some(cut) = rest(&mut registers, thread.partial) {
        thread.partial = Some(cut);
    }
    if registers != before { stopped.set_registers(&registers) } else { Ok(()) }
}
