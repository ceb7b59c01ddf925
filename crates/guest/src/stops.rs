//! What the kernel says of the guests: stops, traps, ends.

use crate::family::Family;
use crate::member::{Member, Process, State};
use crate::thread::Thread;
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_tracee::stop::{self, Change, Stop, Stopped};

impl Family {
    pub(crate) fn take_stops(&mut self) {
        if !self.door.has_changes() {
            return;
        }
        let _drained = self.door.clear_children();
        while let Ok(Some((host, change))) = stop::wait(-1, false) {
            let Some((pid, tid)) = self.by_host.get(&host).copied() else {
                self.stray(host, change);
                continue;
            };
            let Some(Member { process, threads }) = self.members.get_mut(&pid) else { continue };
            match change {
                Change::Stopped(stopped) => {
                    let done = match threads.get_mut(&tid) {
                        Some(thread) => take_stop(thread, process, stopped),
                        None => stopped.resume(0),
                    };
                    if let Err(error) = done {
                        self.failed(pid, &error.into());
                    }
                }
                Change::Exited(_) | Change::Killed(..) => self.ended((pid, tid), host, &change),
            }
        }
    }

    /// A thread has ended here.
    fn ended(&mut self, (pid, tid): (HomePid, HomePid), host: i32, how: &Change) {
        let Some(member) = self.members.get_mut(&pid) else { return };
        if member.ended(tid) {
            self.forget(tid, host);
            return;
        }
        // Not by us: then it would be no member any more. One cannot be without the other on both sides, so that the end
        // of any thread is the end of all.
        tracing::warn!(%pid, %tid, ?how, "a guest ended here");
        let all = host == member.process.host;
        // Only two signals end it without a stop at which we would have seen them: SIGKILL, and the SIGSEGV that the
        // kernel forces where there is no stack for a handler.
        let signal = match *how {
            Change::Killed(libc::SIGSEGV, _) => libc::SIGSEGV,
            _ => libc::SIGKILL,
        };
        self.tell(pid, &Message::Died(signal));
        // It cannot come home any more to leave a core there.
        self.tell(pid, &Message::Died(signal));
        // The first thread's end is told when there are no others, and its number is free from then on.
        if all { self.remove(pid) } else { self.end(pid) }
    }

    /// A stop of the helper, or of a process that is no guest (any more).
    pub(crate) fn stray(&mut self, host: i32, change: Change) {
        match change {
            Change::Stopped(stopped) => {
                let _gone = stopped.resume(0);
            }
            _ if self.sandbox.as_ref().is_some_and(|s| s.helper() == host) => {
                tracing::error!("the guests' helper was killed, and all guests with it");
                for pid in self.members.keys().copied().collect::<Vec<_>>() {
                    self.tell(pid, &Message::Died(libc::SIGKILL));
                    self.remove(pid);
                }
            }
            _ => {}
        }
    }

    pub(crate) fn take_traps(&mut self) {
        if !self.trap_ready {
            return;
        }
        for listener in self.listeners() {
            // A few at a time, so that home is heard in between.
            for _ in 0..64 {
                let trap = match listener.receive() {
                    Ok(Some(trap)) => trap,
                    Ok(None) => break,
                    Err(error) => {
                        tracing::warn!(%error, "a trap was lost");
                        break;
                    }
                };
                let (pid, tid) = self.by_host.get(&trap.pid).copied().unwrap_or((HomePid(0), HomePid(0)));
                let home = self.home.as_mut();
                match self.members.get_mut(&pid).map_or(Ok(false), |member| member.trapped(tid, trap, home)) {
                    Ok(true) => {}
                    Ok(false) => {
                        let _refused = listener.fail(trap.id, libc::EPERM);
                        continue;
                    }
                    Err(error) => self.failed(pid, &error),
                }
                // Who waits for an answer cannot trap again: with nobody else, there is nothing to look for.
                let mut threads = self.members.values().flat_map(|m| m.threads.values());
                if threads.all(|t| t.open.is_some()) && !listener.has_aside() {
                    break;
                }
            }
        }
    }

    /// Tells home of those that are to die of a fault of their own.
    pub(crate) fn report_the_dying(&mut self) {
        let untold = |m: &&Member| m.is_live() && m.process.dying.is_some_and(|dying| !dying.told);
        let pids: Vec<HomePid> = self.members.values().filter(untold).map(|m| m.process.pid).collect();
        for pid in pids {
            // One that departs to die has been reported before: this one was to live where it goes.
            self.stay(pid, None);
            // What it has written before is there when its end is known.
            let home = self.home.as_mut();
            match self.members.get_mut(&pid).map(|member| member.put_files_down(home)) {
                Some(Ok(false)) => continue,
                Some(Err(error)) => {
                    self.failed(pid, &error);
                    continue;
                }
                _ => {}
            }
            let Some(dying) = self.members.get_mut(&pid).and_then(|m| m.process.dying.as_mut()) else {
                continue;
            };
            dying.told = true;
            let (by, signal) = (dying.by, dying.signal);
            if let Some(member) = self.members.get_mut(&pid) {
                let used = Message::Used(member.process.meter.used(), member.process.demand);
                self.tell(pid, &used);
            }
            self.tell(by, &Message::Died(signal));
        }
    }

    /// Asks home to fetch those that have come to where they cannot go on here.
    pub(crate) fn report_the_homesick(&mut self) {
        let mut told = Vec::new();
        for member in self.members.values_mut().filter(|m| m.is_live()) {
            if let Some((tid, told_before)) = &mut member.process.homesick
                && !std::mem::replace(told_before, true)
            {
                told.push(*tid);
            }
        }
        for tid in told {
            self.tell(tid, &Message::FetchHome("vdso: it was in the middle of a function of home's".into()));
        }
    }

    /// Brings those to a stand that are to stand, thread by thread as that can be.
    pub(crate) fn bring_to_stand(&mut self) {
        let moves = |m: &&mut Member| {
            matches!(m.process.state, State::Running) && m.process.is_to_stand() && !m.stands()
        };
        let mut failed = Vec::new();
        for member in self.members.values_mut().filter(moves) {
            if let Err(error) = member.halt() {
                failed.push((member.process.pid, error));
            }
        }
        for (pid, error) in failed {
            self.failed(pid, &error.into());
        }
    }
}

fn take_stop(thread: &mut Thread, process: &mut Process, stopped: Stopped) -> tern_tracee::Result<()> {
    process.is_back();
    if stopped.stop == Stop::Call
        && let Some(forking) = thread.forking.take()
    {
        stopped.set_registers(&forking.after)?;
        stopped.set_sigmask(forking.mask)?;
        return thread.run_on(stopped, process);
    }
    match stopped.stop {
        Stop::Signal(signal) => thread.deliver(stopped, signal, process),
        _ if thread.forking.is_some() => stopped.to_call(),
        Stop::Interrupt => match thread.stopped_late(stopped, process)? {
            Some(stopped) => {
                thread.hand_back(&stopped, process)?;
                stopped.resume(0)
            }
            None => Ok(()),
        },
        _ => stopped.resume(0),
    }
}
