//! execve comes home: the deputy executes the program natively, the old guest is dropped, and the new image,
//! being nearly empty, is sent where the old one was.

use crate::family::Family;
use crate::member::{State, Task};
use crate::thread::Thread;
use tern_control::executed;
use tern_ids::HomePid;
use tern_image::Reserve;
use tern_migrate::message::Message;
use tern_tracee::procfs;
use tern_tracee::stop::{FOLLOW_THREADS, Stopped};
use tern_tracee::{Memory, Result};

impl Family {
    /// A process has executed a program, by any of its threads: only that one is left, and has the process' number.
    pub(crate) fn executed(&mut self, pid: HomePid, stopped: Stopped) -> Result<()> {
        let Some(member) = self.members.get_mut(&pid) else { return stopped.detach(0) };
        let was_away = member.is_away();
        let at_exec = matches!(member.state, State::AtExec);
        // A move that was under way begins again with the new program.
        let outbound = match &member.state {
            State::Outbound(outbound) => Some(outbound.peer),
            _ => None,
        };
        // It is where it was to go to.
        let comes_home = matches!(member.state, State::Inbound(_));
        let carried = member.may_carry();
        let (onward, spare) = match member.state {
            State::Onward(next) => (Some(next), Some(next)),
            State::Crossing(old) => (None, Some(old)),
            _ => (None, None),
        };
        // A node is being prepared for it; where it was does not matter any more.
        let prepared_soon = matches!(member.state, State::Resident | State::Away) && member.task.is_some();
        if was_away {
            executed::note(&self.start.run_dir, pid.0, self.peers[member.peer].node);
        }
        stopped.set_options(FOLLOW_THREADS)?;
        // What was known of the old image is gone with it.
        (member.reserve, member.lent) = (None, false);
        member.threads = [(pid, Thread::at_home(pid)?)].into();
        member.shares.clear();
        member.timers.executed();
        member.watched.clear();
        member.refire.clear();
        member.execs += 1;
        (member.rooms, member.free_rooms, member.leftover) = (0, Vec::new(), Vec::new());
        member.holders.clear();
        member.state = State::Resident;
        member.memory = Memory::open(pid.0)?;
        member.command = procfs::command_line(pid.0);
        member.files.forget();
        member.names.forget();
        member.files.look_through(pid.0);
        for action in &mut member.actions {
            // Handlers are reset by exec; ignored signals stay ignored.
            action[0] = u64::from(action[0] == tern_image::process::IGNORE);
        }
        let timed = !member.timers.all.is_empty();
        let peer = outbound.or(onward).unwrap_or(member.peer);
        if was_away {
            member.epoch = member.epoch.next();
            let held = member.peer;
            self.tell_peer(held, pid, &Message::Drop);
        }
        if let Some(spare) = spare {
            self.tell_peer(spare, pid, &Message::Drop);
        }
        let Some(stopped) = (if timed { self.set_timers(pid, stopped)? } else { Some(stopped) }) else {
            return Ok(());
        };
        if comes_home {
            let migration = self.members.get(&pid).and_then(|m| m.task.as_ref()).map(|task| task.migration);
            self.report(pid);
            self.go_without(migration, pid, carried, "it executes another program");
            let Some(member) = self.members.get_mut(&pid) else { return stopped.detach(0) };
            member.stands_at(stopped)?;
            self.let_go(pid);
            return Ok(());
        }
        if prepared_soon {
            return stopped.resume(0);
        }
        if let Some(peer) = outbound {
            self.tell_peer(peer, pid, &Message::Drop);
        }
        if !was_away && !at_exec && outbound.is_none() {
            let Some(member) = self.members.get_mut(&pid) else { return stopped.detach(0) };
            member.stands_at(stopped)?;
            self.let_go(pid);
            return Ok(());
        }
        // The stop is inside execve, whose return value is still to be set: go on to the edge of user mode.
        let Some(member) = self.members.get_mut(&pid) else { return stopped.detach(0) };
        member.thread(pid)?.wanted = true;
        tern_tracee::stop::interrupt(pid.0)?;
        stopped.resume(0)?;
        if !self.halt_at_home(pid)? {
            return Ok(());
        }
        let Some(member) = self.members.get_mut(&pid) else { return Ok(()) };
        if was_away {
            // A move that somebody waits for goes on with the new image.
            let from = self.start.node;
            member.task.get_or_insert_with(|| Task::new(None, from));
            if self.peers[peer].link.is_none() {
                member.reason = "its node was out of reach when it executed a program".into();
                self.refuse(pid, "its node is out of reach");
                self.let_go(pid);
                return Ok(());
            }
        }
        self.begin_out(pid, peer, true);
        Ok(())
    }

    /// Gives a new program, stopped at its beginning, the timers that outlast an exec. Nothing if it is gone.
    fn set_timers(&mut self, pid: HomePid, stopped: Stopped) -> Result<Option<Stopped>> {
        let Some(member) = self.members.get_mut(&pid) else { return Ok(None) };
        // As below: calls are made from the edge of user mode.
        member.thread(pid)?.wanted = true;
        tern_tracee::stop::interrupt(pid.0)?;
        stopped.resume(0)?;
        if !self.halt_at_home(pid)? {
            return Ok(None);
        }
        let Some(member) = self.members.get_mut(&pid) else { return Ok(None) };
        member.inject(|member, injection| {
            let reserve = Reserve::take(injection)?;
            member.give_timers(injection, &Memory::open(pid.0)?, reserve)?;
            reserve.release(injection)
        })?;
        let thread = member.thread(pid)?;
        thread.wanted = false;
        Ok(thread.standing.take())
    }
}
