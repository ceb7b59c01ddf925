//! Calls on connections that are on this node, and calls before which they are returned.

use super::OtherCalls;
use super::epoll_sets::waits_for_set;
use super::plan::Plan;
use super::waiting::{NativeWait, WaitSet};
use crate::error::GuestResult;
use crate::process::Guest;
use crate::process::outbox::Outbox;
use crate::process::shared::Process;
use crate::process::thread::Thread;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;
use tern_ids::HomePid;
use tern_syscall::is_transfer;
use tern_tracee::Result;
use tern_tracee::inject::{Injection, Site};
use tern_tracee::listener::Notification;
use tern_tracee::procfs;
use tern_tracee::registers::{Registers, restart};
use tern_tracee::stop::{self, Stop, Stopped};

impl Process {
    /// Records which calls the threads other than this one, which has trapped, are in.
    pub(crate) fn note_other_calls(&mut self, threads: &BTreeMap<HomePid, Thread>, tid: HomePid) {
        self.note_thread_count(threads);
        if !self.connections.is_used() && !self.fastpath.may_use_connections() {
            return;
        }
        let mut others = OtherCalls::default();
        for thread in threads.values().filter(|thread| thread.tid != tid && !thread.is_exiting) {
            let at_home = thread.pending.as_ref().map(|pending| {
                let sent = pending.request.as_ref().map(|request| &request.call);
                ((pending.trap.nr, pending.trap.args), sent)
            });
            others.add(at_home, thread.native_call, thread.may_be_inside(self));
        }
        self.connections.set_others(others);
    }

    /// Records whether the process has several threads. One that is exiting runs no program.
    pub(crate) fn note_thread_count(&mut self, threads: &BTreeMap<HomePid, Thread>) {
        let count = threads.values().filter(|thread| !thread.is_exiting).count();
        self.connections.set_thread_count(count);
    }
}

impl Guest {
    /// Whether a thread may be in a call that was let through.
    pub(crate) fn is_in_native_call(&self) -> bool {
        self.threads.values().any(|thread| thread.may_be_in_native_call(&self.process))
    }

    /// Interrupts the threads that may be in calls which were let through. The main loop resumes them.
    /// Returns whether there are any.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn interrupt_native_calls(&mut self) -> GuestResult<bool> {
        self.process.unpublish()?;
        let Self { process, threads } = self;
        for thread in threads.values_mut() {
            if thread.native_call.is_none() && thread.may_be_inside(process) {
                thread.look_outside(process)?;
            }
            if thread.may_be_in_native_call(process) {
                stop::interrupt(thread.host_tid)?;
            }
        }
        Ok(self.is_in_native_call())
    }
}

impl Thread {
    /// Lets a call on a connection of this node through, or has it wait until a connection is taken
    /// or returned; false if it concerns no connection of this node.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn handle_connection_call(
        &mut self,
        trap: &mut Notification,
        process: &mut Process,
        home: &mut Outbox,
    ) -> GuestResult<bool> {
        process.connections.end_set_change(self.tid);
        self.native_wait = self.native_wait.take().filter(|wait| wait.continues_in(trap));
        if !process.connections.is_used() {
            self.leave_wait_to_home(trap);
            return Ok(false);
        }
        for fd in process.connections.forget_changed(trap.nr, &trap.args) {
            process.files.add_stale_fd(fd);
        }
        let is_fresh = !self.sync.call_pending && self.sync.partial.is_none();
        let is_departing = process.files.is_returning_delegations();
        let may_wait_here = is_fresh && !is_departing;
        let is_open_here = |fd| process.files.is_local(fd);
        let plan = match WaitSet::of(trap, &process.memory) {
            Some(WaitSet::Known(fds)) => process.connections.plan_wait(fds, may_wait_here, is_open_here),
            None if waits_for_set(trap.nr) => {
                process.connections.plan_epoll_wait(trap, may_wait_here, is_open_here)
            }
            _ => process.connections.plan(trap.nr, &trap.args, is_fresh, is_departing),
        };
        if plan.is_made_here() && process.files.must_flush() {
            // The call may tell others what the program has written.
            return self.queue_behind_internal_call(*trap, None, process, home);
        }
        match plan {
            Plan::Other => {
                process.connections.begin_set_change(self.tid, trap);
                for fd in process.connections.forget_used_at_home(trap.nr, &trap.args) {
                    process.files.add_stale_fd(fd);
                }
                self.leave_wait_to_home(trap);
                return Ok(false);
            }
            Plan::LeaveToHome(set) => {
                for fd in process.connections.sets.leave_to_home(set) {
                    process.files.add_stale_fd(fd);
                }
                self.leave_wait_to_home(trap);
                return Ok(false);
            }
            Plan::Arrange(set) => {
                if !self.arrange_set(trap, set, process)? {
                    process.connections.sets.refuse(set);
                    return self.handle_connection_call(trap, process, home);
                }
                return Ok(true);
            }
            Plan::Take(fd) => process.connections.begin_take(fd),
            Plan::Return(fd) => process.connections.begin_return(fd),
            Plan::Watch(fds) => home.send(process.pid, process.connections.watched.begin(fds)),
            Plan::AwaitNativeCalls => process.connections.awaits_native_calls = true,
            Plan::Wait => {}
            Plan::LetThrough(fds) => match fds.iter().find(|fd| !self.open_in_guest(trap, **fd, process)) {
                None => {
                    // The program may learn by the call that a file has changed.
                    process.invalidate_read_ahead()?;
                    process.names.clear();
                    self.close_stale_fds(trap, &mut process.files);
                    self.sync.restart_code = None;
                    let call = (trap.nr, trap.args);
                    self.native_call = Some(call);
                    match &mut self.native_wait {
                        Some(wait) => wait.repeat(),
                        new => *new = NativeWait::of(call, Instant::now()),
                    }
                    process.enter_connection_call(trap)?;
                    self.let_through(trap.id)?;
                    return Ok(true);
                }
                Some(failed) => process.connections.begin_return_for(*failed, &fds),
            },
        }
        process.queued_traps.push(*trap);
        Ok(true)
    }

    /// Has home make a wait that was interrupted here for the rest of its time.
    fn leave_wait_to_home(&self, trap: &mut Notification) {
        if let Some(wait) = &self.native_wait {
            wait.limit_to_rest(trap);
        }
    }

    /// When the shim must interrupt the thread's wait, because its time is over.
    pub(crate) fn wait_must_end_at(&self) -> Option<Instant> {
        self.native_wait.as_ref().filter(|_| self.native_call.is_some())?.must_end_at()
    }

    /// Prepares a thread that was interrupted by the shim, perhaps in a call that was let through. A
    /// transfer that was cut short is completed by home, and one that has failed for the
    /// interruption only is repeated.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn settle_native_transfer(&mut self, stopped: &Stopped) -> Result<()> {
        let mut registers = stopped.registers()?;
        let Some(nr) = registers.call() else { return Ok(()) };
        if let Some(partial) = tern_migrate::partial::remainder(&mut registers, None) {
            if self.has_deliverable(None) {
                // A signal cuts the transfer short, as at home.
                return Ok(());
            }
            // The call for the rest counts as pending under the next number: home sees that it has not
            // received the call, and no handler runs here before the call is sent.
            self.sync.call += 1;
            (self.sync.partial, self.sync.call_pending) = (Some(partial), true);
        } else if registers.rax.cast_signed() == -i64::from(libc::EINTR)
            && is_transfer(nr as u32)
            && !self.has_deliverable(None)
        {
            // A socket with a time limit of its own reports a signal, but none was delivered.
            (registers.rax, registers.orig_rax) = (nr, u64::MAX);
            registers.rip -= 2;
        } else {
            return Ok(());
        }
        stopped.set_registers(&registers)
    }

    /// Prepares a thread that has stopped, perhaps in a call that was let through and waits. If no
    /// handler runs, the call is made again, for the rest of its time; if this is over, the call ends.
    /// Until then the thread counts as inside it.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn settle_native_wait(&mut self, stopped: &Stopped) -> Result<()> {
        let mut registers = stopped.registers()?;
        if !self.has_let_through(&registers) {
            return Ok(());
        }
        // epoll_wait reports any stop.
        let is_reported = waits_for_set(registers.orig_rax as u32)
            && registers.rax.cast_signed() == -i64::from(libc::EINTR)
            && stopped.stop == Stop::Interrupt
            && !self.has_deliverable(None);
        if is_reported {
            registers.rax = restart::NOHAND.cast_unsigned();
        }
        let is_over = self.wait_must_end_at().is_some_and(|until| until <= Instant::now());
        if is_over && (is_reported || registers.restart_code().is_some()) && !self.has_deliverable(None) {
            (registers.rax, registers.orig_rax) = (0, u64::MAX);
            self.native_wait = None;
            stopped.set_registers(&registers)?;
        } else if is_reported || registers.restart_from_start() {
            if let Some(wait) = &mut self.native_wait {
                wait.interrupt();
            }
            stopped.set_registers(&registers)?;
        }
        self.sync.restart_code = registers.restart_code();
        Ok(())
    }

    /// Whether these registers may be those of the thread inside a call that was let through.
    pub(crate) fn has_let_through(&self, registers: &Registers) -> bool {
        self.native_call
            .is_some_and(|(nr, args)| registers.call() == Some(nr.into()) && registers.arguments() == args)
    }

    /// If a thread has stopped after a call that was let through and has raised SIGPIPE, has it make
    /// the call again, at home, so that the signal comes from home like all others. The signal of this
    /// kernel, which may not have been delivered yet, is dropped.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn repeat_broken_transfer(
        &mut self,
        stopped: &Stopped,
        process: &mut Process,
    ) -> Result<bool> {
        if self.native_call.is_none() || self.raised.has(libc::SIGPIPE) {
            return Ok(false);
        }
        let mut registers = stopped.registers()?;
        let has_failed = registers.rax.cast_signed() == -i64::from(libc::EPIPE);
        let Some(nr) = registers.call().filter(|nr| has_failed && is_transfer(*nr as u32)) else {
            return Ok(false);
        };
        // With MSG_NOSIGNAL there is no signal.
        let is_raised = stopped.stop == Stop::Signal(libc::SIGPIPE)
            || procfs::status(self.host_tid)?.pending >> (libc::SIGPIPE - 1) & 1 == 1;
        if is_raised {
            process.connections.stop_local_calls(registers.rdi as i32);
            (registers.rax, registers.orig_rax) = (nr, u64::MAX);
            registers.rip -= 2;
            stopped.set_registers(&registers)?;
        }
        Ok(is_raised)
    }

    /// Brings the guest's epoll set up to date, by calls in its place, and has it make its call again.
    /// False if this node cannot make the set; the thread still waits in its trap then.
    fn arrange_set(&mut self, trap: &Notification, set: i32, process: &mut Process) -> GuestResult<bool> {
        let members = process.connections.sets.members(set);
        if !members.iter().all(|fd| self.open_in_guest(trap, *fd, process)) {
            return Ok(false);
        }
        let Process { connections, files, .. } = process;
        let open = |created: BorrowedFd<'_>| {
            self.listener.add_fd(trap.id, created, set).inspect(|()| files.remove_stale_fd(set))
        };
        if let Err(error) = connections.sets.open(set, open) {
            tracing::info!(%error, fd = set, "the guest cannot have an epoll set");
            return Ok(false);
        }
        self.close_stale_fds(trap, &mut process.files);
        let Some(stopped) = self.stop_in_call(trap.id, process)? else { return Ok(true) };
        let mut injection = Injection::begin(stopped, Site(process.reserve.start))?;
        let (mut registers, mask) = (*injection.saved_registers(), injection.saved_mask());
        let scratch = process.reserve.scratch();
        let mut has_failed = false;
        for change in process.connections.sets.changes(set) {
            process.memory.write(scratch, &change.event())?;
            let args = [set as u64, change.operation as u64, change.fd as u64, scratch, 0, 0];
            let ret = self.listener.call_through(&mut injection, libc::SYS_epoll_ctl, args, None)?;
            // A member that is to be deleted may have been closed.
            if ret < 0 && change.operation != libc::EPOLL_CTL_DEL {
                tracing::info!(errno = -ret, fd = change.fd, "an epoll set cannot have a member here");
                has_failed = true;
            }
        }
        process.connections.sets.finish_changes(set);
        if has_failed {
            process.connections.sets.refuse(set);
        }
        // Otherwise a handler has begun, after which the kernel restarts the call.
        if registers.rip == trap.ip && registers.restart_code().is_some() {
            (registers.rax, registers.orig_rax) = (trap.nr.into(), u64::MAX);
            registers.rip -= 2;
        }
        let stopped = injection.finish_with(&registers, mask)?;
        self.resume_or_hold(stopped, process)?;
        Ok(true)
    }

    /// Gives the guest a descriptor of a connection, or of a file that reports the readiness of a
    /// descriptor at home, if it has none yet. False if that fails.
    fn open_in_guest(&self, trap: &Notification, fd: i32, process: &mut Process) -> bool {
        let Process { connections, files, .. } = process;
        let mut add = |file: BorrowedFd<'_>| {
            self.listener.add_fd(trap.id, file, fd).inspect(|()| files.remove_stale_fd(fd))
        };
        let socket = connections.by_fd.get_mut(&fd).and_then(|known| known.socket.as_mut());
        let opened = match socket {
            Some(local) if local.in_guest => Ok(()),
            Some(local) => add(local.socket.as_fd()).inspect(|()| {
                local.in_guest = true;
                connections.watched.replace(fd);
                connections.sets.replace(fd);
            }),
            None => connections.watched.open(fd, |file| add(file.as_fd())),
        };
        if let Err(error) = &opened {
            tracing::info!(%error, fd, "the guest cannot have a descriptor");
        }
        opened.is_ok()
    }
}
