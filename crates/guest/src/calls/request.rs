//! The requests for calls that home makes. Only this module builds them, so that no request goes
//! home before what must precede it:
//! * The pending writes, closes and offsets of delegated files are the request's prelude, which home
//!   runs first. So an effect of a call is never visible without the writes before it.
//! * Descriptors of local files that are no longer delegated are closed in the guest, so that no
//!   child can inherit the file.
//! * Home's cached CPU time becomes invalid, because home's part changes.
//!
//! While a call is pending, nothing is left to send: its request has carried everything. Only two
//! other messages make earlier writes visible: the report of a fatal signal, and a departure. Both
//! wait until all delegations are returned
//! ([`Guest::return_delegations`](crate::process::Guest::return_delegations)).

use crate::calls::procfs_view;
use crate::error::GuestResult;
use crate::files::internal_call::{CallPurpose, InternalCall};
use crate::process::outbox::Outbox;
use crate::process::shared::Process;
use crate::process::thread::{PendingCall, Thread};
use std::time::Instant;
use tern_migrate::message::{CallRequest, Message};
use tern_syscall::{ByteBuf, Call, Gathered};
use tern_tracee::listener::Notification;

impl Thread {
    /// Sends a call home. Its result is then the reply to the trap.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn send_call(
        &mut self,
        trap: Notification,
        gathered: Gathered,
        process: &mut Process,
        home: &mut Outbox,
    ) -> GuestResult {
        // After a stop the kernel restarts a pending call by itself. The call keeps its number,
        // by which home finds what it has done already.
        if !std::mem::take(&mut self.sync.call_pending) {
            self.sync.call += 1;
        }
        process.usage.invalidate_home_time();
        process.fastpath.unpublish_cpu_time(&process.memory, process.reserve)?;
        let prelude = process.files.prelude_for_call(self.sync.call, trap.nr, &trap.args);
        self.close_stale_fds(&trap, &mut process.files);
        let (request, sent_at) = (Some(gathered), Instant::now());
        self.pending =
            Some(PendingCall { trap, request, prelude, homeward_reason: None, file: None, sent_at });
        tracing::trace!(tid = %self.tid, number = self.sync.call, nr = trap.nr, "call sent");
        self.send_pending(process, home);
        Ok(self.raise_deferred()?)
    }

    /// Requests that the process goes home for a call.
    pub(crate) fn request_home(
        &mut self,
        trap: Notification,
        reason: &str,
        process: &Process,
        home: &mut Outbox,
    ) {
        let name = tern_syscall::row(trap.nr).map_or("?", |row| row.name);
        let homeward_reason = Some(format!("{reason}: {name} is made at home only"));
        let (prelude, sent_at) = (Vec::new(), Instant::now());
        self.pending =
            Some(PendingCall { trap, request: None, prelude, homeward_reason, file: None, sent_at });
        self.send_pending(process, home);
    }

    /// Sends the request of the pending call, for the first time or on a new link.
    pub(crate) fn send_pending(&self, process: &Process, home: &mut Outbox) {
        let Some(pending) = &self.pending else { return };
        match (&pending.request, &pending.homeward_reason) {
            (Some(gathered), _) => {
                let max_prefetch = process.files.prefetch_len(pending.trap.nr);
                let procfs_view = procfs_view::view(&gathered.call, process).map(ByteBuf::from);
                let (prelude, call) = (pending.prelude.clone(), gathered.call.clone());
                let request = self.request(self.sync.call, prelude, call, process);
                let closes = i64::from(pending.trap.nr) == libc::SYS_close;
                let to_publish = if closes { process.to_publish() } else { Vec::new() };
                let request = CallRequest { max_prefetch, procfs_view, to_publish, ..request };
                home.send(self.tid, Message::Call(Box::new(request)));
            }
            (None, Some(reason)) => home.send(self.tid, Message::FetchHome(reason.clone())),
            (None, None) => {}
        }
    }

    /// Whether the thread's deputy makes a call, or may be making one: it makes one at a time.
    pub(crate) fn is_deputy_busy(&self) -> bool {
        self.pending.as_ref().is_some_and(|pending| pending.request.is_some())
            || self.internal_call.is_some()
            || self.sync.call_pending
    }

    /// Sends an internal call for the process's files: a flush, and the call for `purpose` if there
    /// is one. Sends nothing while the thread's deputy is busy, because then everything was sent
    /// already.
    pub(crate) fn send_internal_call(
        &mut self,
        purpose: Option<CallPurpose>,
        process: &mut Process,
        home: &mut Outbox,
    ) {
        if self.is_deputy_busy() || self.is_exiting {
            return;
        }
        let number = self.sync.call + 1;
        let (prelude, noop) = process.files.prelude_for_internal_call(number);
        let Some(call) = purpose.map(CallPurpose::call).or(noop) else { return };
        self.sync.call = number;
        let prelude_len = prelude.len();
        let message = Message::Call(Box::new(self.request(number, prelude, call, process)));
        self.internal_call =
            Some(Box::new(InternalCall { number, prelude_len, message, purpose, sent_at: Instant::now() }));
        self.resend_internal_call(home);
    }

    /// Sends the internal call, for the first time or on a new link.
    pub(crate) fn resend_internal_call(&self, home: &mut Outbox) {
        if let Some(internal_call) = &self.internal_call {
            home.send(self.tid, internal_call.message.clone());
        }
    }

    fn request(&self, number: u64, prelude: Vec<Call>, call: Call, process: &Process) -> CallRequest {
        CallRequest {
            epoch: process.epoch,
            number,
            signals: self.sync.signals,
            restart_code: self.sync.restart_code,
            prelude,
            max_prefetch: 0,
            call,
            procfs_view: None,
            to_publish: Vec::new(),
        }
    }
}
