//! Internal calls: those that a deputy makes for its shim, not for the program. Their results are
//! not sent to the guest. A call of the guest that arrives meanwhile waits until the internal call
//! has ended.

use crate::calls::current::{CurrentCall, Origin};
use crate::process::thread::Thread;
use crate::shim::Shim;
use crate::signals::order::will_take_signal;
use tern_ids::{Epoch, HomePid};
use tern_migrate::message::CallRequest;
use tern_syscall::{Arg, Call, Outcome};
use tern_tracee::registers::restart;

/// The request for an internal call. Its epoch and number are not used.
pub(crate) fn internal_call(call: tern_syscall::Call) -> CallRequest {
    CallRequest {
        epoch: Epoch(0),
        number: 0,
        signals: 0,
        restart_code: None,
        prelude: Vec::new(),
        max_prefetch: 0,
        call,
        procfs_view: None,
        to_publish: Vec::new(),
    }
}

impl Shim {
    /// Home answers calls about timers itself, perhaps before the deputy has taken the signal of an
    /// expired timer. Natively a pending signal is taken before such a call returns. So if a signal
    /// is pending, this function has the deputy make an internal call, before which the deputy
    /// takes the signal, and queues the guest's call until the internal call has finished. Returns
    /// whether the guest's call was queued.
    pub(crate) fn await_pending_signals(&mut self, tid: HomePid, request: &CallRequest) -> bool {
        self.handle_all_stops();
        let Some(thread) = self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid))
        else {
            return false;
        };
        if !will_take_signal(&[tid]) {
            return false;
        }
        let nothing = [const { Arg::Value(0) }; 6];
        let posted =
            thread.post_internal(Call { nr: libc::SYS_getppid as u32, args: nothing }, Origin::TakeSignals);
        if posted {
            thread.queued_call = Some(request.clone());
        }
        posted
    }

    /// An internal call has finished. A call of the guest that waits for that is made now.
    pub(crate) fn internal_call_finished(&mut self, tid: HomePid, origin: Origin, outcome: &Outcome) {
        let Some(thread) = self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid))
        else {
            return;
        };
        // A call that a signal has interrupted was not made: its mask is set next, unless a newer
        // one replaces it.
        if let Origin::SetMask(mask) = origin
            && restart::is(outcome.ret)
        {
            thread.pending_mask = thread.pending_mask.or(Some(mask));
        }
        thread.apply_pending_mask();
        let to_release = thread.held.to_release();
        self.release_signals(tid, to_release);
        if let Origin::Prefetch(prefetch) = origin {
            self.finish_prefetch(tid, *prefetch, outcome);
        }
        let thread = self.process_of_thread(tid).and_then(|process| process.threads.get_mut(&tid));
        if let Some(next) = thread.and_then(|thread| thread.queued_call.take()) {
            self.handle_call(tid, next);
        }
    }
}

impl Thread {
    /// Makes the deputy follow the program's signal mask, which changed at the guest: a handler
    /// returned, or a move restored it. A deputy that is in a call follows when that has finished.
    pub(crate) fn set_mask(&mut self, mask: u64) {
        self.held.remove(mask);
        self.pending_mask = Some(mask);
        self.apply_pending_mask();
    }

    /// Posts the internal call that sets a pending mask. It may end in a stop, for a signal that it
    /// unblocks, so it is not waited for here.
    pub(crate) fn apply_pending_mask(&mut self) {
        if self.mailbox.is_none() || self.current.is_some() {
            return;
        }
        let Some(mask) = self.pending_mask.take() else { return };
        let set = Arg::Bytes(tern_syscall::ByteBuf::from(mask.to_le_bytes().to_vec()));
        let how = Arg::Value(libc::SIG_SETMASK as u64);
        let args = [how, set, Arg::Value(0), Arg::Value(8), Arg::Value(0), Arg::Value(0)];
        self.post_internal(Call { nr: libc::SYS_rt_sigprocmask as u32, args }, Origin::SetMask(mask));
    }

    /// Has an idle deputy make an internal call, which is not waited for. Returns false if the
    /// deputy is busy or cannot be reached.
    pub(super) fn post_internal(&mut self, call: Call, origin: Origin) -> bool {
        let (Some(mailbox), None) = (&mut self.mailbox, &self.current) else { return false };
        let request = internal_call(call.clone());
        let Ok(layout) = call.lay_out() else { return false };
        if mailbox.post(&layout).is_err() {
            return false;
        }
        mailbox.wake_when_done();
        self.current = Some(CurrentCall { origin, ..CurrentCall::new(request, layout) });
        true
    }
}
