//! One thread of a process of ours.

use crate::back::Lingering;
use crate::begins::Brought;
use crate::chain::Chain;
use crate::mailbox::Mailbox;
use std::collections::VecDeque;
use std::time::Instant;
use tern_ids::HomePid;
use tern_migrate::Partial;
use tern_migrate::message::{CallRequest, CallResult};
use tern_syscall::Layout;
use tern_tracee::siginfo::Siginfo;
use tern_tracee::stop::Stopped;
use tern_tracee::{Result, procfs};

/// A thread, at home or as deputy of one that is away.
#[derive(Debug)]
pub(crate) struct Thread {
    pub(crate) tid: HomePid,
    /// Its number as it sees it.
    pub(crate) own_tid: i32,
    pub(crate) mailbox: Option<Mailbox>,
    /// The call that the deputy is making.
    pub(crate) current: Option<Current>,
    /// The last call that it has made, in case its result did not arrive.
    pub(crate) last: Option<CallResult>,
    /// How many signals have been sent to the guest, and those that it may not have taken over.
    pub(crate) signals: u64,
    pub(crate) unheard: VecDeque<(u64, Siginfo)>,
    /// A transfer that our first interruption cut short.
    pub(crate) partial: Option<Partial>,
    /// The file that its last call has opened, whose result is told when the deputy has read what comes along.
    pub(crate) brought: Option<Box<Brought>>,
    /// A call that waits for one of ours to end.
    pub(crate) next_call: Option<CallRequest>,
    /// A signal mask that the deputy is to follow as soon as it is idle.
    pub(crate) mask_due: Option<u64>,
    /// It is to stand when it stops next, and when it does, how.
    pub(crate) wanted: bool,
    pub(crate) standing: Option<Stopped>,
    /// It is ending: it has been asked for an exit that nobody answers.
    pub(crate) ending: bool,
    /// At home, but for its last call.
    pub(crate) lingering: Option<Box<Lingering>>,
}

/// A call that a deputy is making.
#[derive(Debug)]
pub(crate) struct Current {
    pub(crate) request: CallRequest,
    pub(crate) layout: Layout,
    pub(crate) since: Instant,
    /// The part that is done, if we have interrupted a transfer.
    pub(crate) partial: Option<Partial>,
    /// The child of a fork, or a new thread.
    pub(crate) child: Option<HomePid>,
    /// The child is to run in its parent's memory away.
    pub(crate) lends: bool,
    /// What is made before the guest's call, if that is not made yet, and what came of it.
    pub(crate) chain: Chain,
}

impl Current {
    /// A call that is just posted.
    pub(crate) fn new(request: CallRequest, layout: Layout, lends: bool, chain: Chain) -> Self {
        Self { request, layout, since: Instant::now(), partial: None, child: None, lends, chain }
    }
}

impl Thread {
    /// A thread that runs at home, as it is now.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn at_home(tid: HomePid) -> Result<Self> {
        Ok(Self {
            tid,
            own_tid: procfs::status(tid.0)?.own_pid,
            mailbox: None,
            current: None,
            last: None,
            signals: 0,
            unheard: VecDeque::new(),
            partial: None,
            brought: None,
            next_call: None,
            mask_due: None,
            wanted: false,
            standing: None,
            ending: false,
            lingering: None,
        })
    }

    /// Whether the deputy has made a call whose result has not been taken.
    pub(crate) fn has_ended(&self) -> bool {
        self.current.is_some() && self.mailbox.as_ref().is_some_and(Mailbox::is_done)
    }

    /// Its guest has taken over so many signals.
    pub(crate) fn heard(&mut self, signals: u64) {
        while self.unheard.front().is_some_and(|(count, _)| *count <= signals) {
            self.unheard.pop_front();
        }
    }

    /// Forgets what it was as a deputy.
    pub(crate) fn is_home(&mut self) {
        (self.mailbox, self.current, self.last) = (None, None, None);
        (self.brought, self.next_call, self.mask_due, self.lingering) = (None, None, None, None);
        self.unheard.clear();
    }
}
