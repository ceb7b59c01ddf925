//! Pending writes, seeks and closes on delegated files, which must run before the guest's call and
//! before anything else can observe what the guest does later (`files/delegation.rs`).

use crate::calls::current::{Compound, CurrentCall, Origin};
use crate::calls::kinds::{forks_or_exits, may_be_internal_call, puts_child_in_parent_memory};
use crate::calls::result::{call_result, rejected};
use crate::process::thread::Thread;
use crate::shim::Shim;
use tern_ids::HomePid;
use tern_migrate::message::{CallRequest, CallResult, Message};
use tern_syscall::Outcome;
use tern_tracee::registers::restart;

/// Upper bound on the calls of one prelude: more than a guest may have files delegated.
const MAX_PRELUDE_CALLS: usize = 256;

impl Shim {
    /// Has the deputy make a call, and its prelude before that (only the prelude if
    /// `prelude_only`). Returns true if the first call posted has finished already.
    pub(crate) fn post(
        &mut self,
        tid: HomePid,
        mut request: CallRequest,
        prelude_only: bool,
    ) -> std::result::Result<bool, i32> {
        if request.prelude.len() > MAX_PRELUDE_CALLS
            || !request.prelude.iter().all(Compound::allowed_in_prelude)
        {
            tracing::warn!(%tid, "a guest sent a prelude that is not allowed");
            return Err(libc::ENOSYS);
        }
        let (first, mut compound) = Compound::begin(std::mem::take(&mut request.prelude), request.call);
        if prelude_only {
            (compound.prelude_only, _) = (true, compound.remaining.pop_back());
        }
        self.post_next(tid, CallRequest { call: first, ..request }, compound, Origin::Guest)
    }

    /// Has the deputy make the next call of a request. Returns true if it has finished already.
    pub(crate) fn post_next(
        &mut self,
        tid: HomePid,
        mut request: CallRequest,
        compound: Compound,
        origin: Origin,
    ) -> std::result::Result<bool, i32> {
        let process = self.process_of_thread(tid).ok_or(libc::ESRCH)?;
        let child_in_parent_memory = puts_child_in_parent_memory(&request.call);
        process.adapt_to_home(&mut request.call);
        let layout = request.call.clone().lay_out().map_err(|malformed| {
            tracing::warn!(%tid, %malformed, "a guest sent a malformed call");
            libc::ENOSYS
        })?;
        let mailbox = process.threads.get(&tid).and_then(|thread| thread.mailbox.as_ref());
        if mailbox.is_some_and(|mailbox| !mailbox.fits(layout.size())) {
            let grown =
                self.with_deputy(tid, |process, stopped| process.grow_mailbox(stopped, layout.size()));
            grown.map_err(|_e| libc::ENOMEM)?;
        }
        let process = self.process_of_thread(tid).ok_or(libc::ESRCH)?;
        let transfers = Compound::allowed_in_prelude(&request.call) || may_be_internal_call(request.call.nr);
        let current =
            CurrentCall { origin, child_in_parent_memory, compound, ..CurrentCall::new(request, layout) };
        if process.job_stopped && transfers {
            return self.perform_while_stopped(tid, current);
        }
        process.threads.get_mut(&tid).ok_or(libc::ESRCH)?.post(current)
    }

    /// A call of a thread has finished: posts what follows it. Returns true if the guest's own call
    /// has finished.
    pub(crate) fn advance_compound(&mut self, tid: HomePid) -> bool {
        loop {
            let Some(thread) = self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid))
            else {
                return false;
            };
            let Some(current) = thread.current.take_if(|current| current.compound.has_more()) else {
                return true;
            };
            let Some(mailbox) = &mut thread.mailbox else { return false };
            let outcome = mailbox.collect(&current.layout, current.partial);
            if !self.continue_compound(tid, current, &outcome) {
                return false;
            }
        }
    }

    /// A prelude call has finished: posts the next call of the request. Returns true if that next
    /// call has finished as well. If a signal comes first, the guest repeats the calls that were
    /// not made. If a seek failed, the guest gets the error.
    fn continue_compound(&mut self, tid: HomePid, mut current: CurrentCall, outcome: &Outcome) -> bool {
        let number = current.request.number;
        let nr = i64::from(current.request.call.nr);
        let Some(process) = self.process_of_thread(tid) else { return false };
        let interrupted = restart::is(outcome.ret);
        if !interrupted {
            process.delegations.prelude_call_done(&current.request.call, outcome.ret);
            current.compound.results.push(outcome.ret);
        }
        let Some(thread) = process.threads.get_mut(&tid) else { return false };
        // As before any call: the guest must first handle the signals that it has not acknowledged.
        let stop = interrupted || !thread.unacked.is_empty();
        let failed = nr == libc::SYS_lseek && outcome.ret < 0 && !interrupted;
        let next = if stop || failed { None } else { current.compound.remaining.pop_front() };
        let Some(next) = next else {
            let ret = if failed { outcome.ret } else { restart::NOINTR };
            let result = call_result(&current, Outcome { ret, outs: Vec::new() });
            thread.last_result = Some(result.clone());
            thread.apply_pending_mask();
            self.send(tid, &Message::Result(Box::new(result)));
            return false;
        };
        let compound = std::mem::take(&mut current.compound);
        let (results, last) = (compound.results.clone(), compound.remaining.is_empty());
        let request = CallRequest { call: next, ..current.request };
        match self.post_next(tid, request, compound, Origin::Guest) {
            Ok(true) => return true,
            Ok(false) => {
                // The guest's own call may block for ever.
                if last {
                    self.send(tid, &Message::PreludeDone(number, results));
                }
                self.note_thread_exit(tid);
            }
            Err(errno) => {
                let result = CallResult { prelude: results, ..rejected(number, errno) };
                if let Some(thread) =
                    self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid))
                {
                    thread.last_result = Some(result.clone());
                }
                self.send(tid, &Message::Result(Box::new(result)));
            }
        }
        false
    }

    /// Makes a call on a delegated file by injection, in a deputy that job control has stopped.
    /// Such calls do not block. The deputy stays stopped.
    fn perform_while_stopped(
        &mut self,
        tid: HomePid,
        current: CurrentCall,
    ) -> std::result::Result<bool, i32> {
        let made = self.with_deputy(tid, |process, stopped| {
            let (mut injection, _) = process.injection(stopped)?;
            let thread = process.thread(tid)?;
            let laid = thread.mailbox.as_mut().map(|mailbox| mailbox.stage(&current.layout));
            if let Some(Ok(args)) = laid {
                let ret = injection.call(i64::from(current.layout.nr()), args)?;
                let thread = process.thread(tid)?;
                thread.mailbox.iter_mut().for_each(|mailbox| mailbox.complete(ret));
                thread.current = Some(current);
            }
            let stopped = injection.finish()?;
            process.resume_unnoticed(stopped).map(|()| true)
        });
        made.map_err(|_gone| libc::ESRCH)
    }
}

impl Thread {
    /// Has the deputy make a call that fits its mailbox. Returns true if it has finished already.
    fn post(&mut self, current: CurrentCall) -> std::result::Result<bool, i32> {
        let mailbox = self.mailbox.as_mut().ok_or(libc::ESRCH)?;
        mailbox.post(&current.layout)?;
        // The ptrace event of a fork or exit must be handled before the call can finish.
        let must_not_wait = forks_or_exits(current.request.call.nr) || self.stopped.is_some();
        self.current = Some(current);
        if !must_not_wait && mailbox.wait_inline() {
            return Ok(true);
        }
        mailbox.wake_when_done();
        Ok(false)
    }
}
