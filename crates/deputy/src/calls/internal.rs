//! Internal calls: those that a deputy makes for its shim, not for the program. Their results are
//! not sent to the guest. A call of the guest that arrives meanwhile waits until the internal call
//! has ended.

use crate::calls::compound::Compound;
use crate::process::thread::{CurrentCall, Thread};
use crate::shim::Shim;
use crate::signals::order::will_take_signal;
use tern_ids::{Epoch, HomePid};
use tern_migrate::message::CallRequest;
use tern_syscall::{Arg, Call};

/// The call number of internal calls, which the program did not make.
pub(crate) const INTERNAL_CALL_NUMBER: u64 = u64::MAX;

/// The request for an internal call. Its result is not sent to the guest.
pub(crate) fn internal_call(call: tern_syscall::Call) -> CallRequest {
    CallRequest {
        epoch: Epoch(0),
        number: INTERNAL_CALL_NUMBER,
        signals: 0,
        restart_code: None,
        prelude: Vec::new(),
        max_prefetch: 0,
        call,
        procfs_view: None,
    }
}

/// The signal mask that an internal call is to set, if it is to set one.
pub(crate) fn mask_of(request: &CallRequest) -> Option<u64> {
    if i64::from(request.call.nr) != libc::SYS_rt_sigprocmask {
        return None;
    }
    let Arg::Bytes(mask) = &request.call.args[1] else { return None };
    Some(u64::from_le_bytes(mask.as_slice().try_into().ok()?))
}

impl Shim {
    /// Home answers calls about timers itself, perhaps before the deputy has taken the signal of an
    /// expired timer. Natively a pending signal is taken before such a call returns. So if a signal
    /// is pending, has the deputy make an internal call, before which it takes the signal, and
    /// queues the guest's call until that has finished. Returns whether it did.
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
        let posted = thread.post_internal(Call { nr: libc::SYS_getppid as u32, args: nothing });
        if posted {
            thread.queued_call = Some(request.clone());
        }
        posted
    }
}

impl Thread {
    /// Makes the deputy follow the program's signal mask, which changed at the guest: a handler
    /// returned, or a move restored it. A deputy that is in a call follows when that has finished.
    pub(crate) fn set_mask(&mut self, mask: u64) {
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
        self.post_internal(Call { nr: libc::SYS_rt_sigprocmask as u32, args });
    }

    /// Has an idle deputy make an internal call, which is not waited for. Returns false if the
    /// deputy is busy or cannot be reached.
    fn post_internal(&mut self, call: Call) -> bool {
        let (Some(mailbox), None) = (&mut self.mailbox, &self.current) else { return false };
        let request = internal_call(call.clone());
        let Ok(layout) = call.lay_out() else { return false };
        if mailbox.post(&layout).is_err() {
            return false;
        }
        mailbox.wake_when_done();
        self.current = Some(CurrentCall::new(request, layout, false, Compound::default()));
        true
    }
}
