//! Performs the calls that guests request, by their deputies.
//!
//! A call is performed only for the current epoch, only once, and only if the guest has received
//! every signal sent to it. Otherwise the reply makes the guest take the signal first and repeat
//! the call, as with a signal that arrives just before a call natively.

use crate::calls::kinds::{creates_thread, is_split_call, may_be_internal_call};
use crate::calls::mapping::DescribedMapping;
use crate::calls::prefetch;
use crate::calls::result::{call_result, rejected};
use crate::process::Process;
use crate::process::state::State;
use crate::shim::Shim;
use crate::time::cpu_timers::ClockScope;
use crate::time::timers::is_timer_call;
use std::task::Poll;
use tern_ids::HomePid;
use tern_image::Reserve;
use tern_migrate::message::{CallRequest, CallResult, Message};
use tern_syscall::Arg;
use tern_tracee::registers::restart;
use tern_tracee::stop::Stopped;

/// Preferred address of mappings that only keep a file for the process's return home. If the
/// program has mapped something there the kernel chooses another address.
const PLACEHOLDERS_START: u64 = Reserve::HINT + (2 << 32);

impl Shim {
    /// Handles a call from the guest of a thread.
    pub(crate) fn handle_call(&mut self, tid: HomePid, request: CallRequest) {
        let Some(process) = self.process_of_thread(tid) else { return };
        if process.is_away() {
            process.home_record.clear_stale_reason();
        }
        let (pid, epoch, away, number) = (process.pid, process.epoch, process.is_away(), request.number);
        let Some(thread) = process.threads.get_mut(&tid) else { return };
        tracing::trace!(%tid, request.number, nr = request.call.nr, ?request.epoch, ?epoch, last = ?thread.last_result.as_ref().map(|l| l.number), current = ?thread.current.as_ref().map(|c| c.request.number), "a call");
        if request.epoch != epoch || !away || thread.is_exiting {
            return;
        }
        thread.acknowledge_signals(request.signals);
        if thread.current.as_ref().is_some_and(|c| c.guest_number().is_none()) {
            // The deputy is making an internal call; this one is made when that has finished.
            thread.queued_call = Some(request);
            return;
        }
        // A repeated request: its result may have been lost with the link.
        if let Some(last) = thread.last_result.as_ref().filter(|last| last.number == request.number) {
            let again = Message::Result(Box::new(last.clone()));
            self.send(tid, &again);
            return;
        }
        if let Some(current) = thread.current.as_ref().filter(|c| c.guest_number() == Some(request.number)) {
            let (compound, number) = (&current.compound, request.number);
            if !compound.has_more() && !compound.results.is_empty() {
                // The message may have been lost with the link.
                let done = Message::PreludeDone(number, compound.results.clone());
                self.send(tid, &done);
            }
            return;
        }
        if is_timer_call(request.call.nr) && self.await_pending_signals(tid, &request) {
            return;
        }
        let Some(thread) = self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid))
        else {
            return;
        };
        if !thread.unacked.is_empty() {
            let mut crossed = rejected(number, 0);
            crossed.outcome.ret = request.restart_code.filter(|c| restart::is(*c)).unwrap_or(restart::NOINTR);
            self.send(tid, &Message::Result(Box::new(crossed)));
            return;
        }
        self.invalidate_if_resolution_changes(pid, &request.call);
        let at_home = self.sharer_to_fetch(tid, &request);
        let sharer = at_home.or_else(|| self.last_holder_to_fetch(tid, &request));
        let prelude_only = sharer.is_some() && !request.prelude.is_empty();
        if let Some(sharer) = sharer.filter(|_| !prelude_only) {
            return self.redirect_home(tid, sharer, &request, Vec::new());
        }
        let must_complete = is_split_call(request.call.nr) || may_be_internal_call(request.call.nr);
        // A prelude that has arrived must be made. The process then comes home with its call
        // pending.
        if !must_complete && self.test_freezes(tid, number, false) && request.prelude.is_empty() {
            return;
        }
        if let Some(outcome) = self.answer_timer_call(pid, tid, &request.call) {
            let made = CallResult::new(number, outcome);
            if let Some(thread) =
                self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid))
            {
                thread.last_result = Some(made.clone());
            }
            self.forward_held_signals(tid, &request.call);
            self.send(tid, &Message::Result(Box::new(made)));
            return self.check_timers(pid, ClockScope::All);
        }
        match self.post(tid, request, prelude_only) {
            Ok(true) => self.call_finished(tid),
            Ok(false) => self.note_thread_exit(tid),
            Err(errno) => self.send(tid, &Message::Result(Box::new(rejected(number, errno)))),
        }
    }

    /// Handles a thread whose deputy was asked to exit while other threads live. The exit call
    /// never returns and cannot fail, so the guest thread exits too, without waiting for the
    /// kernel's report: that of the first thread would come only after the last thread's exit.
    pub(crate) fn note_thread_exit(&mut self, tid: HomePid) {
        let Some(process) = self.process_of_thread(tid) else { return };
        let current = process.threads.get(&tid).and_then(|thread| thread.current.as_ref());
        let exits = current.is_some_and(|current| i64::from(current.request.call.nr) == libc::SYS_exit);
        if exits
            && process.live_threads().any(|thread| thread.tid != tid)
            && let Some(thread) = process.threads.get_mut(&tid)
        {
            thread.is_exiting = true;
            process.stop_reading_through(tid);
            self.send(tid, &Message::ThreadExited);
        }
    }

    /// Handles the calls that have finished.
    pub(crate) fn collect_finished_calls(&mut self) {
        if self.was_woken {
            self.waker.clear();
        }
        let threads = self.processes.values().flat_map(|process| process.threads.values());
        let ended: Vec<HomePid> = threads.filter(|t| t.has_finished_call()).map(|t| t.tid).collect();
        for tid in ended {
            self.call_finished(tid);
        }
    }

    /// A call of a thread has finished: its result is sent to the guest. If signals that the call
    /// has sent must be forwarded first, the main loop handles the call again later.
    pub(crate) fn call_finished(&mut self, tid: HomePid) {
        if !self.advance_compound(tid) || self.must_await_sent_signals(tid) {
            return;
        }
        let Some(process) = self.process_of_thread(tid) else { return };
        let pid = process.pid;
        let Some(thread) = process.threads.get_mut(&tid) else { return };
        if thread.draining.is_some() {
            self.finish_draining(tid);
            return;
        }
        // The main loop comes back when the file that the call has mapped is identified.
        let Poll::Ready(described) = self.finished_mapping(tid) else { return };
        let DescribedMapping { mapped, surplus, home_only, .. } = described;
        let Some(process) = self.process_of_thread(tid) else { return };
        let Some(thread) = process.threads.get_mut(&tid) else { return };
        let (Some(current), Some(mailbox)) = (thread.current.take(), &mut thread.mailbox) else { return };
        let outcome = mailbox.collect(&current.layout, current.partial);
        if current.guest_number().is_none() {
            return self.internal_call_finished(tid, current.origin, &outcome);
        }
        let mut result = call_result(&current, outcome);
        self.add_file_notices(pid, &current, &mut result);
        self.report_changed_readiness(pid, &current.request.call.values());
        self.note_lookup(pid, tid, &current, &result.outcome);
        self.add_children_usage(pid, &current.request.call, &mut result.outcome);
        let nr = current.request.call.nr;
        let only_reads =
            i64::from(nr) == libc::SYS_prlimit64 && current.request.call.args[2] == Arg::Value(0);
        if tern_image::limits::may_change(nr) && !only_reads && result.outcome.ret == 0 {
            // The capabilities are the calling thread's own.
            result.limits = tern_image::limits::of(tid.0).ok();
        }
        if let Some(process) = self.process_of_thread(tid)
            && let Some(thread) = process.threads.get_mut(&tid)
        {
            thread.adapt_mask_call(&current.request.call, current.request.signals, &mut result.outcome);
        }
        let timers_due = self.note_timer_call(pid, tid, &current.request.call, &result.outcome);
        let bytes_carried = current.request.call.data_len() + result.outcome.data_len();
        if i64::from(nr) == libc::SYS_mmap && result.outcome.ret >= 0 {
            result.file = mapped;
            if home_only {
                let (at, request) = (result.outcome.ret.cast_unsigned(), &current.request);
                let length = if let Arg::Value(length) = request.call.args[1] { length } else { 0 };
                let unmapped = self.with_deputy(tid, |process, stopped| process.unmap(stopped, at, length));
                if let Err(error) = unmapped {
                    self.handle_error(tid, &error);
                }
                return self.redirect_home(tid, pid, request, result.prelude);
            }
        }
        let view = current.request.procfs_view.as_ref().filter(|_| result.outcome.ret >= 0);
        if let Some(view) = view
            && let Err(error) = self.with_deputy(tid, |process, stopped| {
                process.install_procfs_view(stopped, result.outcome.ret, view)
            })
        {
            self.handle_error(tid, &error);
            return;
        }
        self.forward_held_signals(tid, &current.request.call);
        let Some(process) = self.process_of_thread(tid) else { return };
        process.call_count += 1;
        process.call_bytes += bytes_carried;
        let Some(thread) = process.threads.get_mut(&tid) else { return };
        tracing::trace!(%tid, result.number, result.outcome.ret, "its result");
        thread.last_result = Some(prefetch::without_prefetched_data(&result));
        thread.apply_pending_mask();
        // A call with a local part cannot be left half done. And a guest that was sent a signal
        // cannot be frozen before it has the result of the call that the signal interrupted.
        let must_complete = is_split_call(nr) || may_be_internal_call(nr) || !thread.unacked.is_empty();
        let number = result.number;
        if self.test_freeze.is_some() && !result.prelude.is_empty() {
            self.send(tid, &Message::PreludeDone(number, result.prelude.clone()));
        }
        let prefetches = |shim: &mut Self| !must_complete && shim.start_prefetch(tid, &current, &result);
        if must_complete || !self.test_freezes(tid, number, true) && !prefetches(self) {
            self.send(tid, &Message::Result(Box::new(result)));
        }
        if must_complete && (self.test_freezes(tid, number, true) || self.test_freezes(tid, number, false)) {
            tracing::debug!(%tid, number, "it comes home after this call");
        }
        if let Some((start, length)) = surplus
            && let Err(error) =
                self.with_deputy(tid, |process, stopped| process.unmap(stopped, start, length))
        {
            self.handle_error(tid, &error);
        }
        if timers_due {
            self.check_timers(pid, ClockScope::All);
        }
    }

    /// Takes the result of a thread's call, if it has finished, for a process that comes home.
    pub(crate) fn take_result(&mut self, pid: HomePid, tid: HomePid) {
        let Some(thread) = self.processes.get_mut(&pid).and_then(|process| process.threads.get_mut(&tid))
        else {
            return;
        };
        if let Some(mailbox) = &mut thread.mailbox
            && let Some(current) = thread.current.take_if(|_| mailbox.is_done())
        {
            let outcome = mailbox.collect(&current.layout, current.partial);
            // The last result of the program's own calls may not have been delivered: keep it.
            if current.guest_number().is_none() {
                return;
            }
            let mut result = call_result(&current, outcome);
            self.invalidate_if_resolution_changes(pid, &current.request.call);
            self.add_children_usage(pid, &current.request.call, &mut result.outcome);
            if let Some(process) = self.processes.get_mut(&pid)
                && let Some(thread) = process.threads.get_mut(&tid)
            {
                let request = &current.request;
                thread.adapt_mask_call(&request.call, request.signals, &mut result.outcome);
                thread.last_result = Some(result);
            }
        }
    }

    /// Fetches a process home at this call if a test has requested that.
    fn test_freezes(&mut self, tid: HomePid, number: u64, made: bool) -> bool {
        let processes = &self.processes;
        let away = || processes.get(&tid).is_some_and(|process| matches!(process.state, State::Away));
        let Some(freeze) = self.test_freeze.take_if(|f| (f.number, f.made) == (number, made) && away())
        else {
            return false;
        };
        freeze.mark_reached();
        self.fetch_home(tid, "a test");
        true
    }
}

impl Process {
    /// Enlarges the mailbox of a stopped deputy for a large call, and resumes the deputy.
    pub(crate) fn grow_mailbox(&mut self, stopped: Stopped, size: usize) -> tern_tracee::Result<()> {
        let tid = HomePid(stopped.pid());
        let (mut injection, reserve) = self.injection(stopped)?;
        let mailbox = self.thread(tid)?.mailbox.as_mut();
        let made = mailbox.map_or(Ok(()), |mailbox| mailbox.grow(&mut injection, reserve, size));
        let stopped = injection.finish()?;
        self.resume_unnoticed(stopped).and(made)
    }

    /// Has a stopped deputy remove a mapping, and resumes it.
    fn unmap(&mut self, stopped: Stopped, start: u64, length: u64) -> tern_tracee::Result<()> {
        self.own_mappings.unmapped(start, start + length.next_multiple_of(tern_tracee::PAGE));
        let mut injection = self.injection(stopped)?.0;
        let _gone_already = injection.call(libc::SYS_munmap, [start, length, 0, 0, 0, 0])?;
        let stopped = injection.finish()?;
        self.resume_unnoticed(stopped)
    }

    /// Changes a call that also has a local part into home's part of it.
    pub(crate) fn adapt_to_home(&mut self, call: &mut tern_syscall::Call) {
        match i64::from(call.nr) {
            // Handlers run at the guest. Here the signal has its default action and is forwarded.
            libc::SYS_rt_sigaction => {
                let [Arg::Value(signal), Arg::Bytes(action), ..] = &mut call.args else { return };
                let Some(known) = self.actions.get_mut((*signal as usize).wrapping_sub(1)) else { return };
                if let Some((words, [])) = action.as_chunks::<8>().into() {
                    for (word, bytes) in known.iter_mut().zip(words) {
                        *word = u64::from_le_bytes(*bytes);
                    }
                }
                if known[0] > 1
                    && !tern_image::process::is_ignored_by_default(*signal as i32)
                    && let Some(handler) = action.get_mut(..8)
                {
                    handler.fill(0);
                }
            }
            // The thread's stack and the addresses for its tid concern the guest only.
            libc::SYS_clone if creates_thread(call) => {
                let shared = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND;
                let flags = shared | libc::CLONE_THREAD | libc::CLONE_SYSVSEM;
                call.args = [const { Arg::Value(0) }; 6];
                call.args[0] = Arg::Value(flags as u64);
            }
            // The same holds for a child's memory and tid addresses. At home it is a child only in
            // what concerns the system: its parent, what it shares, its exit signal.
            libc::SYS_clone => {
                let away = libc::CLONE_VM
                    | libc::CLONE_VFORK
                    | libc::CLONE_SETTLS
                    | libc::CLONE_PARENT_SETTID
                    | libc::CLONE_CHILD_SETTID
                    | libc::CLONE_CHILD_CLEARTID
                    | libc::CLONE_UNTRACED;
                let [flags, stack, _pidfd, child_tid, tls, _] = &mut call.args;
                if let Arg::Value(flags) = flags {
                    *flags &= u64::from(u32::MAX) & !u64::from(away.cast_unsigned());
                }
                for other in [stack, child_tid, tls] {
                    *other = Arg::Value(0);
                }
            }
            libc::SYS_clone3 | libc::SYS_vfork | libc::SYS_fork => {
                call.nr = libc::SYS_fork as u32;
                call.args = [const { Arg::Value(0) }; 6];
            }
            // Any address will do: the mapping only keeps the file for the return home.
            libc::SYS_mmap => {
                let all = self.own_mappings.placeholders().iter().copied().chain(self.pending_placeholders());
                let mebibytes: u64 = all.map(|(start, end)| ((end - start) >> 20) + 1).sum();
                call.args[0] = Arg::Value(PLACEHOLDERS_START + ((mebibytes % (1 << 20)) << 20));
                if let Arg::Value(flags) = &mut call.args[3] {
                    *flags &= !((libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) as u64);
                }
            }
            _ => {}
        }
    }

    /// The address ranges of placeholder mappings that are being made, or are made and not recorded
    /// yet.
    pub(crate) fn pending_placeholders(&self) -> impl Iterator<Item = (u64, u64)> {
        let calls = self.threads.values().filter_map(|thread| Some(&thread.current.as_ref()?.request.call));
        calls.filter(|call| i64::from(call.nr) == libc::SYS_mmap).filter_map(|call| match call.args {
            [Arg::Value(at), Arg::Value(length), ..] => Some((at, at.saturating_add(length))),
            _ => None,
        })
    }
}
