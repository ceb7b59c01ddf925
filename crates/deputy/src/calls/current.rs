//! The call that a deputy is making.

use super::mapping::DescribedMapping;
use std::collections::VecDeque;
use std::time::Instant;
use tern_ids::{Epoch, HomePid};
use tern_migrate::Partial;
use tern_migrate::message::{CallRequest, CallResult};
use tern_syscall::{Call, MailboxLayout};

/// A call that a deputy is making.
#[derive(Debug)]
pub(crate) struct CurrentCall {
    /// Why it makes the call.
    pub(super) origin: Origin,
    pub(crate) request: CallRequest,
    pub(crate) layout: MailboxLayout,
    pub(crate) posted_at: Instant,
    /// When the shim must end it: it was interrupted, and its socket sets a time limit.
    pub(crate) must_end_at: Option<Instant>,
    /// The part of the transfer that was done before it was interrupted.
    pub(crate) partial: Option<Partial>,
    /// The child of a fork, or a new thread.
    pub(crate) child: Option<HomePid>,
    /// Away, the child runs in its parent's memory.
    pub(crate) child_in_parent_memory: bool,
    /// When the result began to wait for the forwarding of the signals that the call has sent.
    pub(crate) awaits_signals_since: Option<Instant>,
    /// A signal has ended the call, which has a signal mask of its own, and its handler now runs at
    /// the guest. The deputy blocks what that handler blocks.
    pub(crate) is_under_handler: bool,
    /// How often a worker was asked to identify the file that the call has mapped.
    pub(super) file_requests: u32,
    /// The mapping that the call has made, while it is not yet known whether the file can become shared
    /// memory.
    pub(super) mapping: Option<DescribedMapping>,
    /// The calls of the request that are still to be made, and the results of those that were.
    pub(crate) compound: Compound,
}

/// Why a deputy makes a call. For all but the first kind the result is not sent to the guest.
#[derive(Debug)]
pub(crate) enum Origin {
    /// Its guest has requested it.
    Guest,
    /// It sets its own signal mask to the program's.
    SetMask(u64),
    /// It takes the pending signals before the call.
    TakeSignals,
    /// It reads the start of a file that it has opened. The result of the open is sent after that.
    Prefetch(Box<Prefetch>),
}

impl CurrentCall {
    /// A call of the guest that was just posted.
    pub(crate) fn new(request: CallRequest, layout: MailboxLayout) -> Self {
        Self {
            origin: Origin::Guest,
            request,
            layout,
            posted_at: Instant::now(),
            must_end_at: None,
            partial: None,
            child: None,
            child_in_parent_memory: false,
            awaits_signals_since: None,
            is_under_handler: false,
            file_requests: 0,
            mapping: None,
            compound: Compound::default(),
        }
    }

    /// The deputy's own signal mask that the call sets, if it is an internal call for that.
    pub(crate) fn mask_being_set(&self) -> Option<u64> {
        if let Origin::SetMask(mask) = self.origin { Some(mask) } else { None }
    }

    /// The number that the guest has given the call; none for an internal call.
    pub(crate) fn guest_number(&self) -> Option<u64> {
        matches!(self.origin, Origin::Guest).then_some(self.request.number)
    }
}

/// The calls of a request that are still to be made, and the results of those that were.
#[derive(Debug, Default)]
pub(crate) struct Compound {
    /// Calls still to be made. The guest's own call is last, if it is to be made at all.
    pub(super) remaining: VecDeque<Call>,
    /// Only the prelude is made. The guest then requests its own call again.
    pub(super) prelude_only: bool,
    /// The results of the prelude's calls so far.
    pub(super) results: Vec<i64>,
}

impl Compound {
    /// Splits the calls of a request, in order, into the first one and the rest.
    pub(super) fn begin(before: Vec<Call>, call: Call) -> (Call, Self) {
        let mut remaining = VecDeque::from(before);
        let Some(first) = remaining.pop_front() else { return (call, Self::default()) };
        remaining.push_back(call);
        (first, Self { remaining, ..Self::default() })
    }

    /// Whether the request is incomplete after the call that was made.
    pub(crate) fn has_more(&self) -> bool {
        self.prelude_only || !self.remaining.is_empty()
    }

    /// Whether a guest may have this call made in a prelude.
    pub(super) fn allowed_in_prelude(call: &Call) -> bool {
        [libc::SYS_pwrite64, libc::SYS_lseek, libc::SYS_close].contains(&i64::from(call.nr))
    }
}

/// A file whose first bytes the deputy is reading.
#[derive(Debug)]
pub(crate) struct Prefetch {
    pub(super) fd: i32,
    /// Number of bytes requested.
    pub(super) length: u64,
    /// The result of the open, sent after the read if `epoch` is still current.
    pub(super) result: CallResult,
    pub(super) epoch: Epoch,
}
