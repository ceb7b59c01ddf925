//! Publishing a process's files and CPU time to its fast path ([`crate::fastpath`]), and reclaiming
//! the files.

use crate::fastpath::{self, NativeDescriptors};
use crate::files::connections::NativeWait;
use crate::process::Guest;
use crate::process::shared::Process;
use crate::process::thread::Thread;
use tern_tracee::listener::Notification;
use tern_tracee::stop::{self, Stopped};
use tern_tracee::{Result, procfs};

impl Process {
    /// Reclaims what is published of its files. The thread whose trap is handled is in it, or the only
    /// thread is stopped and outside the fast path. If another thread may be inside, only ends the
    /// publication: a program with several threads has no published files.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn reclaim(&mut self) -> Result<()> {
        if self.connections.others_may_be_inside() {
            self.names.clear();
            return self.unpublish();
        }
        self.reclaim_all()
    }

    /// As [`reclaim`](Self::reclaim); all threads are in a trap, or stopped and outside the fast path.
    fn reclaim_all(&mut self) -> Result<()> {
        if self.fastpath.has_used_connections(&self.memory, self.reserve)? {
            // The program may have learned by a call that a file has changed.
            self.files.invalidate();
            self.names.clear();
        }
        self.fastpath.reclaim(&mut self.files, &self.memory, self.reserve)?;
        self.files.leave_native_call();
        if self.files.is_returning_delegations() && !self.connections.has_other_threads() {
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
        if !self.fastpath.is_patched() || self.shares_parent_memory || self.connections.has_other_threads() {
            return Ok(());
        }
        self.fastpath.count_call((trap.ip, trap.nr), false, &self.memory, self.reserve)?;
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
        self.fastpath.count_call((trap.ip, trap.nr), false, &self.memory, self.reserve)?;
        if self.fastpath.publish_local() { self.republish() } else { Ok(()) }
    }

    /// Prepares for a call on a connection, or one that waits for connections, which is about to be let
    /// through.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn enter_connection_call(&mut self, trap: &Notification) -> Result<()> {
        if self.shares_parent_memory {
            return Ok(());
        }
        let others = self.connections.has_other_threads();
        self.fastpath.count_call((trap.ip, trap.nr), others, &self.memory, self.reserve)?;
        self.fastpath.enter_connection_call();
        self.republish()
    }

    /// Restores the program's code before its memory is shared or sent. Its only thread is in a trap, or
    /// stopped and outside the fast path.
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
        let Some(nr) = registers.call() else { return Ok(()) };
        let Some(began) = fastpath.native_call_began(&registers, memory, *reserve)? else { return Ok(()) };
        fastpath.step_out(&mut registers, memory, *reserve)?;
        stopped.set_registers(&registers)?;
        let call = (nr as u32, registers.arguments());
        self.native_wait = NativeWait::of(call, began);
        self.native_call = Some(call);
        Ok(())
    }

    /// Reclaims at a stop that the shim has requested, possibly for this purpose.
    ///
    /// # Errors
    /// As [`leave_fastpath`](Self::leave_fastpath).
    pub(crate) fn reclaim_at_stop(&mut self, stopped: &Stopped, process: &mut Process) -> Result<()> {
        if process.fastpath.is_patched() {
            self.leave_fastpath(stopped, process)?;
            if process.connections.has_other_threads() {
                process.unpublish()?;
            } else {
                process.reclaim()?;
            }
            self.note_outside(process);
        }
        Ok(())
    }

    /// Records that the thread is outside the fast path: it is in a trap, or stopped.
    pub(crate) fn note_outside(&mut self, process: &Process) {
        self.outside_since = process.fastpath.unpublished();
    }

    /// Records that the thread is outside, if it is blocked in the kernel at an address that is. Nothing
    /// is published.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn look_outside(&mut self, process: &Process) -> Result<()> {
        if procfs::blocked_at(self.host_tid)?.is_some_and(|at| !fastpath::is_inside(at, process.reserve)) {
            self.note_outside(process);
        }
        Ok(())
    }

    /// Whether the thread runs, or is blocked in a call that this node's kernel makes: it is neither
    /// stopped nor in a trap.
    fn may_run(&self, process: &Process) -> bool {
        let is_in_trap = || self.pending.is_some() || process.queued_traps.has_trap_of(self.host_tid);
        !self.is_exiting && self.stopped.is_none() && self.uncreated.is_none() && !is_in_trap()
    }

    /// Whether the thread may be in a call that was let through, or that the fast path's code makes.
    pub(crate) fn may_be_in_native_call(&self, process: &Process) -> bool {
        self.native_call.is_some() || self.may_be_inside(process)
    }

    /// Whether the thread may be in the fast path's code, in a call on a connection or about to make
    /// one.
    pub(crate) fn may_be_inside(&self, process: &Process) -> bool {
        let fastpath = &process.fastpath;
        fastpath.may_use_connections()
            && (fastpath.has_published_connections() || self.outside_since != fastpath.unpublished())
            && self.may_run(process)
    }
}

impl Guest {
    /// Reclaims what is published of its files, and restores the program's code if all delegations
    /// are being returned. Returns false if threads must be stopped first: then they are being
    /// stopped, and the caller tries again.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn reclaim(&mut self) -> Result<bool> {
        let Self { process, threads } = self;
        let has_one_thread = !process.connections.has_other_threads();
        let returns_all = process.files.is_returning_delegations();
        if process.fastpath.may_be_in_use() || returns_all && has_one_thread && process.fastpath.is_patched()
        {
            process.unpublish()?;
            let may_be_inside = |thread: &&Thread| {
                if has_one_thread { thread.may_run(process) } else { thread.may_be_inside(process) }
            };
            let mut are_outside = true;
            for thread in threads.values().filter(may_be_inside) {
                stop::interrupt(thread.host_tid)?;
                are_outside = false;
            }
            if !are_outside {
                return Ok(false);
            }
            process.reclaim_all()?;
        }
        Ok(!(returns_all && process.fastpath.request_unpatch()))
    }

    /// Changes the program's code as the fast path requires, when all threads are stopped. If they cannot
    /// be stopped soon, sites are patched later. The caller repeats this until it is done
    /// ([`Fastpath::awaits_stop`](crate::fastpath::Fastpath::awaits_stop)).
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn change_code(&mut self) -> Result<()> {
        let can_stop = |thread: &Thread| thread.stopped.is_some() || thread.can_stop(&self.process);
        // A child that runs in this memory would also run the code.
        let can_patch = !self.is_forking() && self.threads.values().all(can_stop);
        let must_unpatch = self.process.fastpath.must_unpatch();
        if (must_unpatch || can_patch) && self.quiesce()? {
            self.process.unpublish()?;
            let Process { fastpath, memory, reserve, .. } = &mut self.process;
            fastpath.change_code(memory, *reserve)?;
        } else if !must_unpatch {
            self.process.fastpath.postpone_patching();
        }
        if self.process.fastpath.awaits_stop() { Ok(()) } else { self.resume() }
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
            self.process.unpublish()?;
        }
        Ok(())
    }
}
