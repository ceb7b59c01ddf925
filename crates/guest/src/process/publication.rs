//! Publishing a process's files and CPU time to its fast path ([`crate::fastpath`]), and reclaiming
//! the files.

use crate::fastpath::{NativeDescriptors, native_return_addr};
use crate::files::connections::NativeWait;
use crate::process::Guest;
use crate::process::shared::Process;
use crate::process::thread::Thread;
use tern_tracee::Result;
use tern_tracee::listener::Notification;
use tern_tracee::stop::{self, Stopped};

impl Process {
    /// Reclaims what is published of its files. Its thread is in a trap, or stopped and outside the
    /// fast path.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn reclaim(&mut self) -> Result<()> {
        if self.fastpath.has_used_connections(&self.memory, self.reserve)? {
            // The program may have learned by a call that a file has changed.
            self.files.invalidate();
            self.names.clear();
        }
        self.fastpath.reclaim(&mut self.files, &self.memory, self.reserve)?;
        self.files.leave_native_call();
        if self.files.is_returning_delegations() {
            self.unpatch();
        }
        Ok(())
    }

    /// Records that a call that was let through is over: the thread has trapped or is stopped.
    /// While the fast path is in use, nothing is recorded: until the files are reclaimed, the
    /// thread may be in a call that the fast path's code makes.
    pub(crate) fn end_native_call(&mut self) {
        if !self.fastpath.may_be_in_use() {
            self.files.leave_native_call();
        }
    }

    /// Publishes again the files that were reclaimed. Called right before the reply to a call, when
    /// the file notices that came with home's result have been handled.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn republish(&mut self) -> Result<()> {
        let connections = self.native_connections();
        let Self { fastpath, files, memory, reserve, .. } = self;
        if fastpath.has_files() || !connections.is_empty() {
            fastpath.republish(files, connections, memory, *reserve)
        } else {
            Ok(())
        }
    }

    /// The connections and epoll sets on which the program may make calls without a trap.
    pub(crate) fn native_connections(&self) -> NativeDescriptors {
        // A call may tell others what the program has written.
        let may_call = self.fastpath.is_patched()
            && self.connections.is_used()
            && !self.files.must_flush()
            && !self.files.is_returning_delegations();
        if may_call {
            self.connections.native_descriptors(self.files.local_fds(true))
        } else {
            NativeDescriptors::default()
        }
    }

    /// Publishes the CPU time after a call has asked for it.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn publish_cpu_time(&mut self, trap: &Notification) -> Result<()> {
        if !self.fastpath.is_patched() || self.shares_parent_memory {
            return Ok(());
        }
        self.fastpath.count_call(trap.ip, trap.nr, &self.memory, self.reserve)?;
        match self.usage.cpu_time_not_counted_here() {
            Some(offset) => self.fastpath.publish_cpu_time(offset, &self.memory, self.reserve),
            None => Ok(()),
        }
    }

    /// Prepares for a call on a local file that is about to be let through.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn enter_native_call(&mut self, trap: &Notification) -> Result<()> {
        self.files.enter_native_call();
        if self.shares_parent_memory {
            return Ok(());
        }
        self.fastpath.count_call(trap.ip, trap.nr, &self.memory, self.reserve)?;
        if self.fastpath.publish_local() { self.republish() } else { Ok(()) }
    }

    /// Prepares for a call on a connection, or one that waits for connections, by the only thread,
    /// which is about to be let through.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn enter_connection_call(&mut self, trap: &Notification) -> Result<()> {
        if self.shares_parent_memory {
            return Ok(());
        }
        self.fastpath.count_call(trap.ip, trap.nr, &self.memory, self.reserve)?;
        self.fastpath.enter_connection_call();
        self.republish()
    }

    /// Restores the program's code before its memory is shared or sent. As for
    /// [`reclaim`](Self::reclaim), its thread is in a trap, or stopped and outside the fast path.
    pub(crate) fn unpatch(&mut self) {
        if self.fastpath.is_patched() {
            self.fastpath.unpatch(&self.memory);
        }
    }

    /// Drops all data that was read ahead.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn invalidate_read_ahead(&mut self) -> Result<()> {
        self.files.invalidate();
        self.unpublish()
    }

    /// Has the program's next call on any file or connection trap. It may be running.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn unpublish(&mut self) -> Result<()> {
        self.fastpath.unpublish(&self.memory, self.reserve)
    }
}

impl Thread {
    /// Moves a stopped thread out of the fast path's code. Returns whether that code was copying: a
    /// fault then comes from the copy, not from an instruction of the program.
    ///
    /// # Errors
    /// If it is gone, or is at an address in that code that it cannot have reached.
    pub(crate) fn leave_fastpath(&self, stopped: &Stopped, process: &Process) -> Result<bool> {
        if !process.fastpath.is_patched() {
            return Ok(false);
        }
        let mut registers = stopped.registers()?;
        match process.fastpath.step_out(&mut registers, &process.memory, process.reserve)? {
            Some(stage) => {
                stopped.set_registers(&registers)?;
                Ok(stage.may_fault())
            }
            None => Ok(false),
        }
    }

    /// If a stopped thread is in a call that the fast path's code has made on a connection, or right
    /// behind it, makes it count as being in that call, made by the program's own `syscall`.
    ///
    /// # Errors
    /// As [`leave_fastpath`](Self::leave_fastpath).
    pub(crate) fn adopt_native_call(&mut self, stopped: &Stopped, process: &Process) -> Result<()> {
        let Process { fastpath, memory, reserve, .. } = process;
        if !fastpath.may_use_connections() {
            return Ok(());
        }
        let mut registers = stopped.registers()?;
        let Some(nr) = registers.call().filter(|_| registers.rip == native_return_addr(*reserve)) else {
            return Ok(());
        };
        fastpath.step_out(&mut registers, memory, *reserve)?;
        stopped.set_registers(&registers)?;
        let call = (nr as u32, registers.arguments());
        self.native_wait = NativeWait::of(call, fastpath.wait_began(memory, *reserve)?);
        self.native_call = Some(call);
        Ok(())
    }

    /// Reclaims at a stop that the shim has requested, possibly for this purpose.
    ///
    /// # Errors
    /// As [`leave_fastpath`](Self::leave_fastpath).
    pub(crate) fn reclaim_at_stop(&self, stopped: &Stopped, process: &mut Process) -> Result<()> {
        if process.fastpath.is_patched() {
            self.leave_fastpath(stopped, process)?;
            process.reclaim()?;
        }
        Ok(())
    }
}

impl Guest {
    /// Reclaims what is published of its files, and restores the program's code if all delegations
    /// are being returned. Returns false if the thread must be stopped first: then it is being
    /// stopped, and the caller tries again.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn reclaim(&mut self) -> Result<bool> {
        let Self { process, threads } = self;
        let returns_all = process.files.is_returning_delegations();
        if !(process.fastpath.may_be_in_use() || returns_all && process.fastpath.is_patched()) {
            return Ok(true);
        }
        let Some(thread) = threads.values().next() else { return Ok(true) };
        let is_in_trap = thread.pending.is_some() || process.queued_traps.has_trap_of(thread.host_tid);
        if is_in_trap || thread.stopped.is_some() {
            process.reclaim()?;
            return Ok(true);
        }
        stop::interrupt(thread.host_tid)?;
        Ok(false)
    }

    /// Reclaims the files that are due, or begins to. If there are none, ends other publications
    /// after their term.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn reclaim_due(&mut self) -> Result<()> {
        let (must_reclaim, must_unpublish) = self.process.fastpath.due_actions();
        if must_reclaim {
            self.reclaim()?;
        } else if must_unpublish {
            let Process { fastpath, memory, reserve, .. } = &mut self.process;
            fastpath.unpublish(memory, *reserve)?;
        }
        Ok(())
    }
}
