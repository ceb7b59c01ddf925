//! What the kernel says of the guests: stops, traps, ends.

use crate::family::Family;
use crate::member::{Member, State};
use tern_migrate::message::Message;
use tern_tracee::stop::{self, Change, Stop};

impl Family {
    pub(crate) fn take_stops(&mut self) {
        if !self.door.has_changes() {
            return;
        }
        let _drained = self.door.clear_children();
        while let Ok(Some((host, change))) = stop::wait(-1, false) {
            let Some(pid) = self.by_host.get(&host).copied() else {
                self.stray(host, change);
                continue;
            };
            let Some(member) = self.members.get_mut(&pid) else { continue };
            match change {
                Change::Stopped(stopped) => {
                    if let Err(error) = take_stop(member, stopped) {
                        self.failed(pid, &error.into());
                    }
                }
                Change::Exited(_) | Change::Killed(..) => {
                    // Not by us: then it would be no member any more.
                    tracing::warn!(%pid, ?change, "a guest ended here");
                    self.tell(pid, &Message::Died(libc::SIGKILL));
                    self.remove(pid);
                }
            }
        }
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
                let pid = self.by_host.get(&trap.pid).copied();
                let Some((pid, member)) = pid.and_then(|p| self.members.get_mut(&p).map(|m| (p, m))) else {
                    let _refused = listener.fail(trap.id, libc::EPERM);
                    continue;
                };
                if let Err(error) = member.trapped(trap, self.home.as_mut()) {
                    self.failed(pid, &error);
                }
                // Who waits for an answer cannot trap again: with nobody else, there is nothing to look for.
                if self.members.values().all(|m| m.open.is_some()) && !listener.has_aside() {
                    break;
                }
            }
        }
    }

    pub(crate) fn report_the_dying(&mut self) {
        let mut dying = Vec::new();
        for member in self.members.values_mut() {
            if let State::Dying { signal, told, .. } = &mut member.state
                && !std::mem::replace(told, true)
            {
                dying.push((member.pid, *signal));
            }
        }
        for (pid, signal) in dying {
            self.tell(pid, &Message::Died(signal));
        }
    }
}

fn take_stop(member: &mut Member, stopped: stop::Stopped) -> tern_tracee::Result<()> {
    if let State::Forking(forking) = &member.state
        && stopped.stop == Stop::Call
    {
        stopped.set_registers(&forking.after)?;
        stopped.set_sigmask(forking.mask)?;
        member.state = State::Running;
        return stopped.resume(0);
    }
    match stopped.stop {
        Stop::Signal(signal) => member.deliver(stopped, signal),
        _ if matches!(member.state, State::Forking(_)) => stopped.to_call(),
        _ => stopped.resume(0),
    }
}
