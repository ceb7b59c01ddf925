//! Calls in which both halves take part: home's part and this node's part must agree.
//!
//! Home goes first; a call that home refuses has no effect here either. The local part is the
//! guest's own call, which is let through (it affects only the guest, whatever its arguments are),
//! or a call that the shim injects in its place.

use crate::error::GuestResult;
use crate::process::Guest;
use crate::process::memory::GuestMemory;
use crate::process::outbox::Outbox;
use crate::process::shared::Process;
use crate::process::space::GuestSpace;
use crate::process::thread::{PendingCall, Thread};
use tern_ids::HomePid;
use tern_image::FileRef;
use tern_image::content::ContentCache;
use tern_image::process::{Action, SIG_DFL, SIG_IGN, is_ignored_by_default};
use tern_migrate::message::{CallResult, Message};
use tern_syscall::{Arg, ByteBuf, Call, Gathered, Route, SplitCall, UserMemory, reason, route};
use tern_tracee::inject::{Injection, Site};
use tern_tracee::listener::Notification;

/// Where the frame of a handler contains the registers: behind the flags, the link and the stack of
/// `struct ucontext`.
const REGISTERS_IN_FRAME: u64 = 8 + 8 + 24;

/// If the handler whose frame is at `frame` returns to a `syscall` that is not made on this node
/// alone, the stack pointer of that call.
fn call_returned_to(frame: u64, process: &Process) -> Option<u64> {
    // The order of `struct sigcontext`.
    let (rip, rsp, rax, arguments) = (16, 15, 13, [8, 9, 12, 2, 0, 1]);
    let register = |at: u64| process.memory.word(frame + REGISTERS_IN_FRAME + 8 * at).unwrap_or(0);
    let mut instruction = [0; 2];
    let is_read = process.memory.read(register(rip), &mut instruction).is_ok();
    let is_forwarded = || {
        matches!(
            route(register(rax) as u32, &arguments.map(register)),
            Route::Home | Route::Both(_) | Route::Homeward(_)
        )
    };
    (is_read && instruction == [0x0f, 0x05] && is_forwarded()).then(|| register(rsp))
}

impl Thread {
    /// Handles a call in which both halves take part.
    ///
    /// # Errors
    /// As [`handle_trap`](Self::handle_trap).
    pub(crate) fn handle_split(
        &mut self,
        trap: Notification,
        split_call: SplitCall,
        process: &mut Process,
        home: &mut Outbox,
    ) -> GuestResult {
        if split_call == SplitCall::RtSigreturn {
            return self.handle_sigreturn(trap, process, home);
        }
        if matches!(split_call, SplitCall::Exec | SplitCall::Exit) {
            // After an exec the process is the same, and keeps this program's CPU time; after an
            // exit its parent gets it. This is the last occasion to report it.
            home.send(process.pid, process.usage.report());
            return self.forward(trap, process, home);
        }
        if split_call == SplitCall::Msync {
            if process.has_files_in_shared_memory() {
                self.request_home(trap, reason::SHARED_MEMORY, process, home);
                return Ok(());
            }
            return Ok(self.let_through(trap.id)?);
        }
        if split_call == SplitCall::CpuTimer {
            return self.forward_timer_call(trap, process, home);
        }
        let only_queries = match split_call {
            SplitCall::RtSigaction | SplitCall::RtSigprocmask => trap.args[1] == 0,
            _ => false,
        };
        if only_queries {
            return Ok(self.let_through(trap.id)?);
        }
        self.forward(trap, process, home)
    }

    /// Replies to a call for CPU time if home's part is cached; false if it is not.
    pub(crate) fn reply_cpu_time(
        &mut self,
        trap: &Notification,
        process: &mut Process,
    ) -> tern_tracee::Result<bool> {
        if route(trap.nr, &trap.args) != Route::Both(SplitCall::CpuTime) {
            return Ok(false);
        }
        if self.sync.call_pending {
            return Ok(false);
        }
        let Some(outcome) = process.usage.reply(trap.nr, &trap.args) else { return Ok(false) };
        let written = outcome.outs.first().map(|time| GuestMemory(&process.memory).write(trap.args[1], time));
        if !matches!(written, Some(Ok(()))) {
            return Ok(false);
        }
        if i64::from(trap.nr) == libc::SYS_clock_gettime {
            process.publish_cpu_time(trap)?;
        }
        self.sync.restart_code = None;
        self.reply(trap.id, 0)?;
        Ok(true)
    }

    /// Handles a call about a timer. Home's reply depends on the CPU time used so far, so the shim
    /// first sends the CPU time of the process and of this thread. It does not send the CPU time of
    /// other threads: a timer on the clock of another thread is improbable.
    fn forward_timer_call(
        &mut self,
        trap: Notification,
        process: &mut Process,
        home: &mut Outbox,
    ) -> GuestResult {
        let creates = i64::from(trap.nr) == libc::SYS_timer_create;
        if creates && crate::time::cpu::clock_target(trap.args[0] as i32, process.own_pid).is_none() {
            self.request_home(trap, reason::CPU_TIMER, process, home);
            return Ok(());
        }
        home.send(process.pid, process.usage.report());
        home.send(self.tid, Message::ThreadUsage(self.cpu_meter.used()));
        self.forward(trap, process, home)
    }

    /// Handles the return of a signal handler, which restores the earlier mask. Home's mask is set
    /// as well if it differs.
    fn handle_sigreturn(
        &mut self,
        trap: Notification,
        process: &mut Process,
        home: &mut Outbox,
    ) -> GuestResult {
        // The frame begins at the stack pointer, after the return address has been popped.
        const MASK_IN_FRAME: u64 = REGISTERS_IN_FRAME + 256;
        let stack = tern_tracee::procfs::syscall_stack_pointer(self.host_tid)?;
        let mask = process.memory.word(stack + MASK_IN_FRAME).unwrap_or(self.deputy_sigmask);
        if self.expiries != 0 {
            self.handler_returns(mask, call_returned_to(stack, process), home);
        }
        if mask == self.deputy_sigmask {
            return Ok(self.let_through(trap.id)?);
        }
        // Home's mask is set first: a signal that home's new mask admits must be here before the
        // interrupted code resumes. Home rejects the call if it crosses a signal, and the thread
        // then makes its rt_sigreturn again. So home's mask is recorded only when home has set it.
        let set = Arg::Bytes(ByteBuf::from(mask.to_le_bytes().to_vec()));
        let how = Arg::Value(libc::SIG_SETMASK as u64);
        let args = [how, set, Arg::Value(0), Arg::Value(8), Arg::Value(0), Arg::Value(0)];
        let call = Call { nr: libc::SYS_rt_sigprocmask as u32, args };
        self.send_call(trap, Gathered { call, output_buffers: Vec::new(), is_cut: false }, process, home)
    }

    /// Records home's new signal mask. This node's kernel sets the guest's when the call is let
    /// through.
    fn record_sigmask(&mut self, pending: &PendingCall) -> GuestResult {
        if let Some([Arg::Value(how), Arg::Bytes(set), ..]) =
            pending.request.as_ref().map(|sent| &sent.call.args)
        {
            let set = set.as_slice().try_into().map_or(0, u64::from_le_bytes);
            self.deputy_sigmask = match *how as i32 {
                libc::SIG_BLOCK => self.deputy_sigmask | set,
                libc::SIG_UNBLOCK => self.deputy_sigmask & !set,
                _ => set,
            };
        }
        Ok(self.let_through(pending.trap.id)?)
    }
}

/// Whether a call changes the action of a signal.
fn changes_action(trap: &Notification) -> bool {
    i64::from(trap.nr) == libc::SYS_rt_sigaction && trap.args[1] != 0
}

/// Reads a signal action, in the kernel's form, from the guest's memory.
fn read_action(process: &Process, at: u64) -> tern_tracee::Result<Action> {
    let mut action = [0; 4];
    for (word, at) in action.iter_mut().zip((at..).step_by(8)) {
        *word = process.memory.word(at)?;
    }
    Ok(action)
}

impl Thread {
    /// Changes a signal's action in the thread's place, so that it has taken effect before the next
    /// change is made.
    fn inject_sigaction(
        &mut self,
        pending: &PendingCall,
        process: &mut Process,
        cache: &ContentCache,
    ) -> tern_tracee::Result<()> {
        let Some(stopped) = self.stop_in_call(pending.trap.id, process)? else { return Ok(()) };
        let mut injection = Injection::begin(stopped, Site(process.reserve.start))?;
        let (mut registers, mask) = (*injection.saved_registers(), injection.saved_mask());
        let mut space = GuestSpace::for_single_calls(&mut injection, &self.listener, cache);
        let ret = space.call_through(libc::SYS_rt_sigaction, pending.trap.args)?;
        (registers.rax, registers.orig_rax) = (ret.cast_unsigned(), u64::MAX);
        let stopped = injection.finish_with(&registers, mask)?;
        self.resume_or_hold(stopped, process)
    }
}

impl Guest {
    /// Handles a call that a thread has made; false if there is no such thread.
    ///
    /// If two threads change signal actions, the second waits until both parts of the first change
    /// are done. Otherwise the order at home and here could differ. If the process is quiesced
    /// meanwhile, the second call is restarted.
    ///
    /// # Errors
    /// As [`Thread::handle_trap`].
    pub(crate) fn handle_trap(
        &mut self,
        tid: HomePid,
        trap: Notification,
        home: &mut Outbox,
    ) -> GuestResult<bool> {
        let changes = changes_action(&trap) && self.is_action_change_pending();
        let is_quiescing = self.process.stop_reasons.is_quiescing();
        let waits = !is_quiescing && (changes || self.has_internal_call());
        let is_awaited = self.threads.get_mut(&tid).is_some_and(Thread::makes_awaited_call);
        if !waits && self.pass_redundant_default(tid, &trap)? {
            self.report_after_call(tid, is_awaited, home);
            return Ok(true);
        }
        let has_too_many = !is_quiescing && self.has_max_threads(&trap);
        let Self { process, threads } = self;
        process.note_other_calls(threads, tid);
        let Some(thread) = threads.get_mut(&tid) else { return Ok(false) };
        process.end_native_call();
        thread.native_call = None;
        thread.note_call(trap.nr);
        if !(is_quiescing && thread.can_stop(process)) && thread.let_futex_wait(&trap, process)? {
            // It concerns no file, and needs nothing of home.
        } else if waits {
            process.queued_traps.push(trap);
        } else if has_too_many {
            thread.request_home(trap, reason::THREADS, process, home);
        } else {
            thread.handle_trap(trap, process, home)?;
            self.report_after_call(tid, is_awaited, home);
        }
        Ok(true)
    }

    /// Makes the report that follows a call to which a handler has returned.
    fn report_after_call(&mut self, tid: HomePid, is_awaited: bool, home: &mut Outbox) {
        if is_awaited && let Some(thread) = self.threads.get_mut(&tid) {
            thread.report_after_call(&self.process, home);
        }
    }

    /// Lets a call through that sets a signal's action to the default if it already is the default;
    /// false for any other call. Home need not see such calls: posix_spawn, system and popen make
    /// one for every signal, about sixty calls.
    ///
    /// Nevertheless the call goes home
    /// * if there are other threads: a change of theirs could overtake one that is let through.
    /// * if the signal is ignored by default: setting the action discards pending signals of that
    ///   number, also at home.
    /// * if home may have received the call already, which is so while its number is pending.
    fn pass_redundant_default(&mut self, tid: HomePid, trap: &Notification) -> tern_tracee::Result<bool> {
        let Self { process, threads } = self;
        if !changes_action(trap) || process.stop_reasons.is_quiescing() || threads.len() > 1 {
            return Ok(false);
        }
        let Some(thread) = threads.get_mut(&tid).filter(|thread| !thread.sync.call_pending) else {
            return Ok(false);
        };
        let [signal, at, ..] = trap.args;
        let signal = signal as i32;
        let Ok(new_action) = read_action(process, at) else { return Ok(false) };
        let Some(known) = process.action(signal) else { return Ok(false) };
        let defaults = known[0] == SIG_DFL && new_action[0] == SIG_DFL;
        if !defaults || is_ignored_by_default(signal) || matches!(signal, libc::SIGKILL | libc::SIGSTOP) {
            return Ok(false);
        }
        *known = new_action;
        thread.sync.restart_code = None;
        thread.let_through(trap.id)?;
        Ok(true)
    }

    /// Whether a change of a signal's action is pending.
    fn is_action_change_pending(&self) -> bool {
        self.threads
            .values()
            .any(|thread| thread.pending.as_ref().is_some_and(|pending| changes_action(&pending.trap)))
    }

    /// Handles traps that waited for another call, if that is complete.
    ///
    /// # Errors
    /// As [`Thread::handle_trap`].
    pub(crate) fn handle_queued_traps(&mut self, home: &mut Outbox) -> GuestResult {
        // Some may have to wait again.
        let mut left = self.process.queued_traps.len();
        while left > 0
            && !self.is_action_change_pending()
            && !self.has_internal_call()
            && !self.process.connections.is_busy()
            && let Some(trap) = self.process.queued_traps.pop()
        {
            left -= 1;
            let tid =
                self.threads.values().find(|thread| thread.host_tid == trap.pid).map(|thread| thread.tid);
            if let Some(tid) = tid {
                self.handle_trap(tid, trap, home)?;
            }
        }
        Ok(())
    }

    /// Does the local part of a thread's call after home has done its part. If the call maps a file
    /// that this node must first open itself, returns that file;
    /// [`continue_mapping`](Self::continue_mapping) then continues the call.
    ///
    /// # Errors
    /// If the guest is gone, or home is unreachable.
    pub(crate) fn do_local_part(
        &mut self,
        tid: HomePid,
        pending: PendingCall,
        result: CallResult,
        cache: &mut ContentCache,
        home: &mut Outbox,
    ) -> GuestResult<Option<FileRef>> {
        if pending.trap.nr as i64 == libc::SYS_rt_sigaction {
            self.record_action(&pending)?;
        }
        let Self { process, threads } = self;
        let has_one_thread = threads.len() == 1;
        let Some(thread) = threads.get_mut(&tid) else { return Ok(None) };
        match pending.trap.nr as i64 {
            libc::SYS_rt_sigaction if !has_one_thread => thread.inject_sigaction(&pending, process, cache)?,
            libc::SYS_rt_sigprocmask | libc::SYS_rt_sigreturn => thread.record_sigmask(&pending)?,
            libc::SYS_mmap => return thread.begin_mapping(pending, result, process, cache, home),
            _ => thread.let_through(pending.trap.id)?,
        }
        Ok(None)
    }

    fn record_action(&mut self, pending: &PendingCall) -> GuestResult {
        let [signal, at, ..] = pending.trap.args;
        let signal = signal as i32;
        let action = read_action(&self.process, at)?;
        if let Some(known) = self.process.action(signal) {
            *known = action;
        }
        // The kernel will now discard this signal in all threads, as it does at home.
        if action[0] == SIG_IGN || action[0] == SIG_DFL && is_ignored_by_default(signal) {
            for thread in self.threads.values_mut() {
                thread.raised.discard(signal);
            }
        }
        Ok(())
    }
}
