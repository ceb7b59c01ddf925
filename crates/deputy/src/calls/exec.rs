//! The home half of execve: the deputy executes the program natively, the guest is dropped, and the
//! new program, which is nearly empty, is sent to the guest's node.

use crate::process::Process;
use crate::process::own_mappings::OwnMappings;
use crate::process::state::{MigrationTask, State};
use crate::process::thread::Thread;
use crate::shim::Shim;
use tern_control::executed;
use tern_control::shim::RightsLimit;
use tern_ids::HomePid;
use tern_image::Reserve;
use tern_migrate::message::Message;
use tern_tracee::procfs;
use tern_tracee::stop::{FOLLOW_THREADS, Stopped};
use tern_tracee::{Memory, Result};

impl Shim {
    /// A thread of a process has executed a program. Only that thread is left, with the pid as its
    /// tid.
    pub(crate) fn handle_exec(&mut self, pid: HomePid, stopped: Stopped) -> Result<()> {
        // The child of a thread that was killed in a fork exists, so its guest must be made before the
        // old guest ends. The exit of the first thread is not reported if another one executes, which
        // takes over its tid (`de_thread`, fs/exec.c).
        let threads = self.processes.get(&pid).into_iter().flat_map(|process| process.threads.keys());
        let threads: Vec<HomePid> = threads.copied().collect();
        threads.into_iter().for_each(|tid| self.finish_fork(tid));
        let Some(process) = self.processes.get_mut(&pid) else { return stopped.detach(0) };
        let was_away = process.is_away();
        let at_exec = matches!(process.state, State::AtExec);
        // A move in progress begins again with the new program.
        let outgoing_peer = match &process.state {
            State::Outgoing(outgoing) => Some(outgoing.peer),
            _ => None,
        };
        // A process that was coming home is at its destination already.
        let comes_home = matches!(process.state, State::Returning(_));
        let may_have_carried_objects = process.may_carry_objects();
        let (onward_peer, other_guest) = match process.state {
            State::Remigrating(next) => (Some(next), Some(next)),
            State::Switching(old) => (None, Some(old)),
            _ => (None, None),
        };
        // If a destination is being prepared for the process, the move begins from home when the
        // destination is ready.
        let is_settled = process.is_at_home() || matches!(process.state, State::Away);
        let destination_is_pending = is_settled && process.task.is_some();
        if was_away {
            executed::record(
                &self.start.run_dir,
                pid.0,
                self.peers.node(process.peer).unwrap_or(self.start.node),
            );
        }
        let former = HomePid(stopped.message()? as i32);
        let held = process.threads.get(&former).map_or(0, |thread| thread.held.set());
        if held != 0 {
            stopped.set_sigmask(stopped.sigmask()? & !held)?;
        }
        stopped.set_options(FOLLOW_THREADS)?;
        process.forget_program()?;
        process.state = State::Resident;
        let has_timers = !process.timers.is_empty();
        let peer = outgoing_peer.or(onward_peer).unwrap_or(process.peer);
        if was_away {
            process.epoch = process.epoch.next();
            let holder = process.peer;
            self.send_to_peer(holder, pid, &Message::Drop);
        }
        if let Some(other_guest) = other_guest {
            self.send_to_peer(other_guest, pid, &Message::Drop);
        }
        let Some(stopped) = (if has_timers { self.restore_timers(pid, stopped)? } else { Some(stopped) })
        else {
            return Ok(());
        };
        if comes_home {
            let migration =
                self.processes.get(&pid).and_then(|process| process.task.as_ref()).map(|task| task.migration);
            self.complete_task(pid);
            self.leave_group(migration, pid, may_have_carried_objects, "it executes another program");
            let Some(process) = self.processes.get_mut(&pid) else { return stopped.detach(0) };
            process.set_stopped(stopped)?;
            self.detach(pid);
            return Ok(());
        }
        if destination_is_pending {
            return stopped.resume(0);
        }
        if let Some(peer) = outgoing_peer {
            self.send_to_peer(peer, pid, &Message::Drop);
        }
        if !was_away && !at_exec && outgoing_peer.is_none() {
            let Some(process) = self.processes.get_mut(&pid) else { return stopped.detach(0) };
            process.set_stopped(stopped)?;
            self.detach(pid);
            return Ok(());
        }
        // The stop is inside execve, before its return value is set: run to the edge of user mode.
        let Some(process) = self.processes.get_mut(&pid) else { return stopped.detach(0) };
        process.thread(pid)?.stop_wanted = true;
        tern_tracee::stop::interrupt(pid.0)?;
        stopped.resume(0)?;
        if !self.quiesce_new_program(pid)? {
            return Ok(());
        }
        let Some(process) = self.processes.get_mut(&pid) else { return Ok(()) };
        process.home_record.record_exec();
        if was_away {
            // A move that a caller waits for continues with the new program.
            let from = self.start.node;
            process.task.get_or_insert_with(|| MigrationTask::new(None, from));
            if self.peers.link(peer).is_none() {
                process.home_record.set_reason("its node was out of reach when it executed a program");
                self.abort_task(pid, "its node is out of reach");
                self.detach(pid);
                return Ok(());
            }
        }
        self.begin_outgoing(pid, peer, true);
        Ok(())
    }

    /// Runs a new program from its stop inside execve to the edge of user mode, and restores the
    /// timers that survive an exec. Returns none if the process is gone.
    fn restore_timers(&mut self, pid: HomePid, stopped: Stopped) -> Result<Option<Stopped>> {
        let Some(process) = self.processes.get_mut(&pid) else { return Ok(None) };
        // The stop is inside execve, and calls can be injected only at the edge of user mode.
        process.thread(pid)?.stop_wanted = true;
        tern_tracee::stop::interrupt(pid.0)?;
        stopped.resume(0)?;
        if !self.quiesce_new_program(pid)? {
            return Ok(None);
        }
        let Some(process) = self.processes.get_mut(&pid) else { return Ok(None) };
        process.inject(|process, injection| {
            let reserve = Reserve::map_new(injection)?;
            process.restore_timers(injection, &Memory::open(pid.0)?, reserve)?;
            reserve.release(injection)
        })?;
        let thread = process.thread(pid)?;
        thread.stop_wanted = false;
        Ok(thread.stopped.take())
    }
}

impl Process {
    /// Drops all state of the program that it executed before. Its first thread is the only one.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn forget_program(&mut self) -> Result<()> {
        let pid = self.pid;
        (self.reserve, self.in_parent_memory) = (None, false);
        self.threads = [(pid, Thread::new_resident(pid)?)].into();
        self.detached_waits.clear();
        self.usage.forget_threads();
        self.timers.handle_exec();
        self.exec_count += 1;
        self.own_mappings = OwnMappings::default();
        self.memory = Memory::open(pid.0)?;
        self.command = procfs::command_line(pid.0);
        // Root has requested the move of the program before, with the rights of that one. A user's
        // next program may have more.
        if self.rights == RightsLimit::Any && procfs::status(pid.0)?.uid[0] != 0 {
            self.rights = RightsLimit::User;
        }
        self.files.forget_all();
        self.names.forget();
        self.files.set_proc_thread(pid.0);
        for action in &mut self.actions {
            // exec resets handlers, masks and flags; ignored signals stay ignored.
            *action = [u64::from(action[0] == tern_image::process::SIG_IGN), 0, 0, 0];
        }
        Ok(())
    }
}
