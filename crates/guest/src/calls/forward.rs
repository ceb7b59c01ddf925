//! Forwarding trapped calls to the deputy, and delivering their results.

use crate::calls::procfs_view;
use crate::error::GuestResult;
use crate::process::Guest;
use crate::process::memory::GuestMemory;
use crate::process::outbox::Outbox;
use crate::process::shared::Process;
use crate::process::thread::{PendingCall, Thread, has_local_part_after_home};
use crate::time::cpu::CpuTimeOf;
use tern_ids::HomePid;
use tern_migrate::CpuTime;
use tern_migrate::message::CallResult;
use tern_syscall::{Arg, GatherError, Route, SplitCall, gather, reason, route, scatter};
use tern_tracee::listener::Notification;
use tern_tracee::registers::restart;
use tern_tracee::stop::{self, Stop};

impl Thread {
    /// Handles a call that the thread has made.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn handle_trap(
        &mut self,
        mut trap: Notification,
        process: &mut Process,
        home: &mut Outbox,
    ) -> GuestResult {
        // A call for CPU time concerns no file, so published files need not be reclaimed.
        let must_stop = process.stop_reasons.is_quiescing() && self.can_stop(process);
        if !must_stop && !self.must_take_signal_first() && self.reply_cpu_time(&trap, process)? {
            return Ok(());
        }
        process.reclaim()?;
        self.note_outside(process);
        if i64::from(trap.nr) == libc::SYS_clone3 {
            match crate::sandbox::clone::translate_clone3(&trap.args, &process.memory) {
                Ok(args) => (trap.nr, trap.args) = (libc::SYS_clone as u32, args),
                Err(errno) => return Ok(self.reply(trap.id, -i64::from(errno))?),
            }
        } else if i64::from(trap.nr) == libc::SYS_clone {
            // The sixth argument is used for translated calls only. Here it is what happens to be
            // in the register.
            trap.args[5] = 0;
        }
        if process.stop_reasons.is_quiescing() && self.can_stop(process) {
            return Ok(self.stop_at_call(&trap, process)?);
        }
        let route = route(trap.nr, &trap.args);
        if route == Route::Both(SplitCall::Fork) && process.holds_forks() && self.can_stop(process) {
            return Ok(self.stop_at_call(&trap, process)?);
        }
        let forks = route == Route::Both(SplitCall::Fork);
        if process.connections.has_other_threads() {
            if forks && process.fastpath.request_unpatch() {
                // The call is made again when all threads are stopped and the code is restored.
                process.queued_traps.push(trap);
                return Ok(());
            }
        } else if forks || route == Route::Both(SplitCall::Thread) {
            process.unpatch();
        }
        if !matches!(route, Route::Here | Route::Timed | Route::Refuse(_)) && self.must_take_signal_first() {
            return Ok(self.reply(trap.id, self.unbegun_restart_code())?);
        }
        if !matches!(route, Route::Here | Route::Timed | Route::Refuse(_))
            && self.handle_connection_call(&mut trap, process, home)?
        {
            return Ok(());
        }
        if !matches!(route, Route::Home) {
            self.sync.restart_code = None;
        }
        match route {
            Route::Here | Route::Timed => Ok(self.let_through(trap.id)?),
            Route::Refuse(errno) => Ok(self.reply(trap.id, -i64::from(errno))?),
            Route::Homeward(reason) => {
                self.request_home(trap, reason, process, home);
                Ok(())
            }
            Route::Home if self.handle_file_call(&trap, process, home)? => Ok(()),
            Route::Home if self.handle_name_call(&trap, process)? => Ok(()),
            Route::Home => self.forward(trap, process, home),
            Route::Both(special) => self.handle_split(trap, special, process, home),
        }
    }

    /// Sends a call home unchanged.
    ///
    /// # Errors
    /// As [`handle_trap`](Self::handle_trap).
    pub(crate) fn forward(
        &mut self,
        trap: Notification,
        process: &mut Process,
        home: &mut Outbox,
    ) -> GuestResult {
        match gather(trap.nr, &trap.args, &mut GuestMemory(&process.memory)) {
            Ok(gathered) if procfs_view::reaches_memory(&gathered.call, process.own_pid) => {
                self.request_home(trap, reason::OWN_MEMORY, process, home);
                Ok(())
            }
            Ok(gathered) => {
                // This call's mask admits a signal that was received from home earlier, and was
                // blocked here while a handler ran. Home would not interrupt the call for that
                // signal.
                let mask = gathered.call.mask().filter(|mask| self.has_deliverable(Some(*mask)));
                match mask.filter(|_| !self.sync.call_pending) {
                    Some(mask) => Ok(self.reply_under_mask(trap.id, restart::NOHAND, mask, process)?),
                    None => self.send_call(trap, gathered, process, home),
                }
            }
            Err(GatherError::Errno(errno)) => Ok(self.reply(trap.id, -i64::from(errno))?),
            Err(GatherError::Homeward(reason)) => {
                self.request_home(trap, reason, process, home);
                Ok(())
            }
            Err(GatherError::Here) => Ok(self.let_through(trap.id)?),
        }
    }

    /// Receives the result of the pending call, and replies to the trap unless a local part
    /// remains to be done.
    fn take_result(
        &mut self,
        mut result: CallResult,
        used: Option<CpuTime>,
        process: &mut Process,
    ) -> GuestResult<Option<(PendingCall, CallResult)>> {
        tracing::trace!(tid = %self.tid, result.number, result.outcome.ret, call = self.sync.call, pending = self.pending.is_some(), "result received");
        let awaited =
            self.pending.take_if(|pending| pending.request.is_some() && result.number == self.sync.call);
        let Some(pending) = awaited else { return Ok(None) };
        self.sync.restart_code = None;
        if !restart::is(result.outcome.ret) {
            self.native_wait = None;
        }
        process.usage.store_home_time(pending.trap.nr, &pending.trap.args, &result.outcome, pending.sent_at);
        if let Some(used) = used {
            crate::time::cpu::add_to_result(pending.trap.nr, &pending.trap.args, used, &mut result.outcome);
        }
        if i64::from(pending.trap.nr) == libc::SYS_epoll_ctl && result.outcome.ret == 0 {
            let event = pending.request.as_ref().and_then(|sent| match sent.call.args.get(3) {
                Some(Arg::Bytes(event)) => Some(event.as_slice()),
                _ => None,
            });
            process.connections.record_epoll_ctl(&pending.trap.args, event);
        }
        if let Some(limits) = result.limits.take() {
            process.set_limits(limits);
        }
        let local = match route(pending.trap.nr, &pending.trap.args) {
            Route::Both(special) => result.outcome.ret >= 0 && has_local_part_after_home(special),
            _ => false,
        };
        if local {
            return Ok(Some((pending, result)));
        }
        self.deliver_result(&pending, &result, process)?;
        Ok(None)
    }

    /// Replies to the trap with a result.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn deliver_result(
        &mut self,
        pending: &PendingCall,
        result: &CallResult,
        process: &mut Process,
    ) -> GuestResult {
        let (id, mut ret) = (pending.trap.id, result.outcome.ret);
        let Some(gathered) = &pending.request else { return Ok(()) };
        if scatter(&gathered.output_buffers, &result.outcome, &mut GuestMemory(&process.memory)).is_err() {
            ret = -i64::from(libc::EFAULT);
        }
        if gathered.is_cut && ret.cast_unsigned() == tern_syscall::limits::MAX_DATA && !self.has_undelivered()
        {
            return Ok(self.continue_long_transfer(id, ret, process)?);
        }
        if let Some(partial) = self.sync.partial.filter(|_| !restart::is(ret) || self.has_undelivered()) {
            self.sync.partial = None;
            return Ok(self.complete_partial(id, &partial, ret, process)?);
        }
        if restart::is(ret) && ret != restart::NOINTR {
            // The thread counts as inside this call until a handler has run or the call is resent.
            self.sync.restart_code = Some(ret);
        }
        let interrupted = restart::is(ret) || ret == -i64::from(libc::EINTR);
        if interrupted && self.has_undelivered() {
            let mask = gathered.call.mask();
            if self.has_deliverable(mask) {
                let Some(mask) = mask else { return Ok(self.reply(id, ret)?) };
                // Home rejected the call because it crossed the signal on its way. Since only the
                // call's mask admits the signal, the signal must interrupt the call.
                let before = ret == restart::NOINTR && !self.has_deliverable(None);
                let ret = if before { restart::NOHAND } else { ret };
                return Ok(self.reply_under_mask(id, ret, mask, process)?);
            }
            // At home the call was interrupted by a signal that is blocked here while a handler
            // runs. Home cannot see that it is blocked. On this node nothing has interrupted the
            // call.
            if !restart::is(ret) {
                return Ok(self.reply_restart(id, restart::NOINTR)?);
            }
        }
        if restart::is(ret) {
            return Ok(self.reply_restart(id, ret)?);
        }
        process.republish()?;
        Ok(self.reply(id, ret)?)
    }

    /// Continues a transfer that is longer than one message can carry, when a piece of it is
    /// complete. The thread itself then makes the call for the rest, and gets the sum of all pieces
    /// as the result. From then on the transfer is handled like any other interrupted transfer.
    fn continue_long_transfer(
        &mut self,
        id: u64,
        moved: i64,
        process: &mut Process,
    ) -> tern_tracee::Result<()> {
        let Some(stopped) = self.stop_in_call(id, process)? else { return Ok(()) };
        let mut registers = stopped.registers()?;
        registers.rax = moved.cast_unsigned();
        let before = self.sync.partial.take();
        self.sync.partial = tern_migrate::partial::long_remainder(&mut registers, before);
        if self.sync.partial.is_none() {
            if let Some(before) = before {
                before.restore_arguments(&mut registers);
                registers.rax = before.total_result(moved).cast_unsigned();
            }
            registers.orig_rax = u64::MAX;
        } else {
            // The call for the rest counts as pending under the next number. So home recognises
            // that it has not received the call, and no handler runs here before the call is sent.
            self.sync.call += 1;
            self.sync.call_pending = true;
        }
        stopped.set_registers(&registers)?;
        self.resume_or_hold(stopped, process)
    }

    /// Completes a partial transfer: the program gets the sum as the result, and its own arguments
    /// back in the registers.
    fn complete_partial(
        &mut self,
        id: u64,
        partial: &tern_migrate::Partial,
        ret: i64,
        process: &mut Process,
    ) -> tern_tracee::Result<()> {
        let Some(stopped) = self.stop_in_call(id, process)? else { return Ok(()) };
        let mut registers = stopped.registers()?;
        partial.restore_arguments(&mut registers);
        (registers.rax, registers.orig_rax) = (partial.total_result(ret).cast_unsigned(), u64::MAX);
        stopped.set_registers(&registers)?;
        self.resume_or_hold(stopped, process)
    }

    /// Replies to a call that has a signal mask of its own (such as ppoll), after a signal that
    /// only this mask admits has interrupted it. The signal is delivered under that mask.
    fn reply_under_mask(
        &mut self,
        id: u64,
        ret: i64,
        mask: u64,
        process: &mut Process,
    ) -> tern_tracee::Result<()> {
        stop::interrupt(self.host_tid)?;
        self.reply(id, ret)?;
        loop {
            let stopped = stop::wait_stop(self.host_tid)?;
            if self.mask_after_handler.is_none() {
                self.mask_after_handler = Some(stopped.sigmask()?);
                stopped.set_sigmask(mask)?;
            }
            match stopped.stop {
                Stop::Interrupt => return stopped.resume(0),
                // A signal that the program's own mask admits too was delivered first. If its
                // handler has begun, the main loop resumes the thread after the stop that the
                // interrupt causes.
                Stop::Signal(signal) => {
                    self.deliver(stopped, signal, process)?;
                    if self.mask_after_handler.is_none() || self.stopped.is_some() {
                        return Ok(());
                    }
                }
                _ => stopped.resume(0)?,
            }
            stop::interrupt(self.host_tid)?;
        }
    }
}

impl Guest {
    /// Receives the result of a thread's pending call. A result that is not awaited (any more) is
    /// dropped: the call will be sent again. A call whose local part remains to be done is
    /// returned with its result.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn take_result(
        &mut self,
        tid: HomePid,
        mut result: CallResult,
    ) -> GuestResult<Option<(PendingCall, CallResult)>> {
        self.repeat_undecided_wait(tid, &mut result);
        let used = self.cpu_time_asked_for(tid, &result);
        let Self { process, threads } = self;
        threads.get_mut(&tid).map_or(Ok(None), |thread| thread.take_result(result, used, process))
    }

    /// The CPU time used while away, for a pending call that asks for CPU time.
    fn cpu_time_asked_for(&mut self, tid: HomePid, result: &CallResult) -> Option<CpuTime> {
        let trap = self.threads.get(&tid)?.pending.as_ref()?.trap;
        if result.outcome.ret < 0 || route(trap.nr, &trap.args) != Route::Both(SplitCall::CpuTime) {
            return None;
        }
        match crate::time::cpu::call_target(trap.nr, &trap.args, self.process.own_pid)? {
            CpuTimeOf::Process => Some(self.process.usage.cpu_time()),
            CpuTimeOf::Caller => self.threads.get_mut(&tid).map(|thread| thread.cpu_meter.used()),
            CpuTimeOf::Thread(own) => self
                .threads
                .values_mut()
                .find(|thread| thread.own_tid == own)
                .map(|thread| thread.cpu_meter.used()),
        }
    }
}
