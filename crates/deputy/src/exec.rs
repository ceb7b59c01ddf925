//! execve comes home: the deputy executes the program natively, the old guest is dropped, and the new image,
//! being nearly empty, is sent where the old one was.

use crate::family::Family;
use crate::member::{State, Task};
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_tracee::procfs;
use tern_tracee::stop::{FOLLOW_EXEC, Stopped};
use tern_tracee::{Memory, Result};

impl Family {
    /// A process has executed a program.
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
        let (onward, spare) = match member.state {
            State::Onward(next) => (Some(next), Some(next)),
            State::Crossing(old) => (None, Some(old)),
            _ => (None, None),
        };
        // A node is being prepared for it; where it was does not matter any more.
        let prepared_soon = matches!(member.state, State::Resident | State::Away) && member.task.is_some();
        stopped.set_options(FOLLOW_EXEC)?;
        // What was known of the old image is gone with it.
        (member.reserve, member.mailbox, member.current, member.last) = (None, None, None, None);
        member.state = State::Resident;
        member.memory = Memory::open(pid.0)?;
        member.command = procfs::command_line(pid.0);
        member.files.forget();
        for action in &mut member.actions {
            // Handlers are reset by exec; ignored signals stay ignored.
            action[0] = u64::from(action[0] == tern_image::process::IGNORE);
        }
        let peer = outbound.or(onward).unwrap_or(member.peer);
        if was_away {
            member.epoch = member.epoch.next();
            let held = member.peer;
            self.tell_peer(held, pid, &Message::Drop);
        }
        if let Some(spare) = spare {
            self.tell_peer(spare, pid, &Message::Drop);
        }
        if comes_home {
            self.report(pid);
            self.let_go(pid, stopped, 0);
            return Ok(());
        }
        if prepared_soon {
            return stopped.resume(0);
        }
        if let Some(peer) = outbound {
            self.tell_peer(peer, pid, &Message::Drop);
        }
        if !was_away && !at_exec && outbound.is_none() {
            self.let_go(pid, stopped, 0);
            return Ok(());
        }
        // The stop is inside execve, whose return value is still to be set: go on to the edge of user mode.
        tern_tracee::stop::interrupt(pid.0)?;
        stopped.resume(0)?;
        let Some(stopped) = self.halt_at_home(pid)? else { return Ok(()) };
        let Some(member) = self.members.get_mut(&pid) else { return stopped.detach(0) };
        if was_away {
            // A move that somebody waits for goes on with the new image.
            let from = self.start.node;
            member.task.get_or_insert_with(|| Task::new(None, from));
            if self.peers[peer].link.is_none() {
                member.reason = "its node was out of reach when it executed a program".into();
                self.refuse(pid, "its node is out of reach");
                self.let_go(pid, stopped, 0);
                return Ok(());
            }
        }
        self.begin_out(pid, stopped, peer, true);
        Ok(())
    }
}
