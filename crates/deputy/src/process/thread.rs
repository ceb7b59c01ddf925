//! One thread of a process.

use crate::calls::current::CurrentCall;
use crate::process::mailbox::Mailbox;
use crate::signals::hold::HeldSignals;
use std::collections::VecDeque;
use std::time::Instant;
use tern_ids::HomePid;
use tern_image::ThreadImage;
use tern_migrate::Partial;
use tern_migrate::message::{CallRequest, CallResult, ThreadSync};
use tern_tracee::Result;
use tern_tracee::procfs::{self, Sleep};
use tern_tracee::registers::restart;
use tern_tracee::siginfo::Siginfo;
use tern_tracee::stop::Stopped;

/// A thread, at home or as the deputy of one that is away.
#[derive(Debug)]
pub(crate) struct Thread {
    pub(crate) tid: HomePid,
    /// Its tid in its own pid namespace.
    pub(crate) own_tid: i32,
    /// The deputy thread whose call has created it or, for a first thread, its process.
    pub(crate) creator: Option<HomePid>,
    pub(crate) mailbox: Option<Mailbox>,
    /// The call that the deputy is making.
    pub(crate) current: Option<CurrentCall>,
    /// The result of its last call, kept until the next call in case it did not arrive.
    pub(crate) last_result: Option<CallResult>,
    /// Number of signals sent to the guest, and those that the guest has not acknowledged.
    pub(crate) signals_sent: u64,
    pub(crate) unacked: VecDeque<(u64, Siginfo)>,
    /// Signals that its deputy leaves in its kernel.
    pub(crate) held: HeldSignals,
    /// The finished part of a transfer that the shim cut short by interrupting the thread at home.
    pub(crate) partial: Option<Partial>,
    /// The sleep in which it was found before it was stopped at home. For `migrate::home_wait` only.
    pub(crate) sleep: Option<Sleep>,
    /// If that is a wait on a futex with a relative time limit: when it ends, once that is known. For
    /// `migrate::home_wait` only.
    pub(crate) futex_wait_end: Option<Instant>,
    /// The stack pointer and the arguments of the wait on a futex in which it was when it last stopped at
    /// home. For `migrate::home_wait` only.
    pub(crate) continued_wait: Option<(u64, [u64; 6])>,
    /// When it was last stopped at home. For `migrate::home_wait` only.
    pub(crate) stopped_at: Option<Instant>,
    /// A call that waits for an internal call to finish.
    pub(crate) queued_call: Option<CallRequest>,
    /// A signal mask that the deputy is to set as soon as it is idle.
    pub(crate) pending_mask: Option<u64>,
    /// It is to stay stopped at its next stop; and that stop, once it has happened.
    pub(crate) stop_wanted: bool,
    pub(crate) stopped: Option<Stopped>,
    /// It is exiting: its deputy was asked to make an exit call, which never returns.
    pub(crate) is_exiting: bool,
    /// It is home, except for its last call.
    pub(crate) draining: Option<Box<Draining>>,
}

/// The state of a draining thread: it is home except for its last call.
#[derive(Debug)]
pub(crate) struct Draining {
    pub(crate) image: ThreadImage,
    pub(crate) pending_signals: Vec<Siginfo>,
    pub(crate) partial: Option<Partial>,
}

impl Draining {
    /// The state of its call and signals, for the node to which its process moves. `current` is the
    /// number of the call.
    pub(crate) fn sync(&self, current: Option<u64>) -> ThreadSync {
        let code = self.image.registers.rax.cast_signed();
        ThreadSync {
            call: current.unwrap_or_default(),
            call_pending: current.is_some(),
            restart_code: Some(code).filter(|code| restart::is(*code) && *code != restart::NOINTR),
            pending_signals: self.pending_signals.iter().map(|info| info.to_vec()).collect(),
            partial: self.partial,
            ..ThreadSync::default()
        }
    }
}

impl Thread {
    /// The record of a thread that runs at home.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn new_resident(tid: HomePid) -> Result<Self> {
        Ok(Self {
            tid,
            own_tid: procfs::status(tid.0)?.own_pid,
            creator: None,
            mailbox: None,
            current: None,
            last_result: None,
            signals_sent: 0,
            unacked: VecDeque::new(),
            held: HeldSignals::default(),
            partial: None,
            sleep: None,
            futex_wait_end: None,
            continued_wait: None,
            stopped_at: None,
            queued_call: None,
            pending_mask: None,
            stop_wanted: false,
            stopped: None,
            is_exiting: false,
            draining: None,
        })
    }

    /// Whether the deputy has finished a call whose result was not taken yet.
    pub(crate) fn has_finished_call(&self) -> bool {
        self.current.is_some() && self.mailbox.as_ref().is_some_and(Mailbox::is_done)
    }

    /// Whether the deputy makes no call.
    pub(crate) fn is_idle(&self) -> bool {
        self.current.is_none() || self.has_finished_call()
    }

    /// Whether a call is pending whose end the main loop must poll for, or signals are held that it
    /// must release when they are overdue.
    pub(crate) fn needs_polling(&self) -> bool {
        self.awaits_release()
            || self.current.as_ref().is_some_and(|current| {
                current.awaits_signals_since.is_some()
                    || self.mailbox.as_ref().is_some_and(Mailbox::needs_polling)
            })
    }

    /// Forgets the first `signals` signals, which the guest has received.
    pub(crate) fn acknowledge_signals(&mut self, signals: u64) {
        while self.unacked.front().is_some_and(|(count, _)| *count <= signals) {
            self.unacked.pop_front();
        }
    }

    /// Clears its state as a deputy.
    pub(crate) fn clear_deputy_state(&mut self) {
        (self.mailbox, self.current, self.last_result) = (None, None, None);
        (self.queued_call, self.pending_mask, self.draining) = (None, None, None);
        self.unacked.clear();
        self.held = HeldSignals::default();
    }
}
