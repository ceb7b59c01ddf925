//! Children and threads that home has created and this node's kernel refuses.
//!
//! The call fails with this kernel's error, but only when home has removed its half: until then the
//! thread that made the call is held at its stop, and makes no other call and runs no handler.
//!
//! Meanwhile a wait of another thread finds the child at home, running. A wait that does not block
//! would return that no child has ended, while there may be no child. So while it is unknown whether
//! a child can be created, and for calls that were sent before a child was removed, such a result is
//! not delivered, and the call is made again, with two exceptions. The program knows a child that
//! the call names, so that child exists. And if a child was created after the call's first result, the
//! result is right: forks that succeed do not delay a wait, however many there are.

use crate::process::Guest;
use crate::process::thread::{PendingCall, Thread};
use tern_ids::HomePid;
use tern_migrate::message::CallResult;
use tern_syscall::{Outcome, Route, SplitCall, route};
use tern_tracee::Result;
use tern_tracee::listener::Notification;
use tern_tracee::registers::{Registers, restart};
use tern_tracee::stop::Stopped;

/// Offset of si_pid.
const PID_OFFSET: usize = 16;

/// A thread that could not create a child or thread here.
#[derive(Debug)]
pub(crate) struct Uncreated {
    /// The child or thread, by its id at home.
    child: HomePid,
    /// Whether it would be a child of the thread's process.
    is_own_child: bool,
    /// The thread, at the end of the injected clone.
    held: Stopped,
    /// Its registers after the call, and its signal mask.
    after: Registers,
    mask: u64,
}

impl Thread {
    /// This kernel has refused to create the child or thread `child`, for this call. `held` is this
    /// thread at the end of the injected clone; it had these registers and this signal mask before.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn hold_until_undone(
        &mut self,
        (child, trap): (HomePid, &Notification),
        held: Stopped,
        (before, mask): (Registers, u64),
    ) -> Result<()> {
        let after = Registers { rax: held.registers()?.rax, orig_rax: u64::MAX, ..before };
        let is_own_child = creates_own_child(trap);
        self.uncreated = Some(Box::new(Uncreated { child, is_own_child, held, after, mask }));
        Ok(())
    }
}

impl Guest {
    /// Home has removed its half of this child or thread: the call of the thread that was to create
    /// it fails now.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn fail_creation(&mut self, tid: HomePid, child: HomePid) -> Result<()> {
        let Self { process, threads } = self;
        let Some(thread) = threads.get_mut(&tid) else { return Ok(()) };
        let Some(uncreated) = thread.uncreated.take_if(|uncreated| uncreated.child == child) else {
            return Ok(());
        };
        let Uncreated { is_own_child, held, after, mask, .. } = *uncreated;
        held.set_registers(&after)?;
        held.set_sigmask(mask)?;
        thread.resume_or_hold(held, process)?;
        if is_own_child {
            threads.values_mut().for_each(|thread| thread.last_call_before_removal = thread.sync.call);
        }
        Ok(())
    }

    /// Has the wait of a thread made again if it has found only running children, and one of them
    /// was perhaps a child that was not created.
    pub(crate) fn repeat_undecided_wait(&mut self, tid: HomePid, result: &mut CallResult) {
        let Some(Thread { pending: Some(pending), .. }) = self.threads.get(&tid) else { return };
        if !names_no_child(&pending.trap) || restart::is(result.outcome.ret) {
            return;
        }
        let none_ended = found_none_ended(pending, &result.outcome);
        let (created, is_undecided) = (self.process.children_created, self.has_undecided_child());
        let Some(thread) = self.threads.get_mut(&tid) else { return };
        // A call that is sent again keeps its number, and home may send its first result.
        let crossed_removal = result.number <= thread.last_call_before_removal;
        let was_created = thread.undecided_wait.is_some_and(|before| before != created);
        if none_ended && !was_created && (crossed_removal || is_undecided) {
            thread.undecided_wait.get_or_insert(created);
            result.outcome = Outcome { ret: restart::NOINTR, outs: Vec::new() };
        } else {
            thread.undecided_wait = None;
        }
    }

    /// Whether it is unknown if a child of this process can be created here, or one that cannot is
    /// being removed at home.
    fn has_undecided_child(&self) -> bool {
        let may_create =
            |pending: &PendingCall| pending.request.is_some() && creates_own_child(&pending.trap);
        self.threads.values().any(|thread| {
            thread.uncreated.as_ref().is_some_and(|uncreated| uncreated.is_own_child)
                || thread.pending.as_ref().is_some_and(may_create)
        })
    }
}

/// Whether this call is to create a child of the process that makes it, and not a thread or a child
/// of its parent.
pub(crate) fn creates_own_child(trap: &Notification) -> bool {
    let is_sibling = i64::from(trap.nr) == libc::SYS_clone && trap.args[0] & libc::CLONE_PARENT as u64 != 0;
    route(trap.nr, &trap.args) == Route::Both(SplitCall::Fork) && !is_sibling
}

/// Whether this call waits for children that it does not name: any, or those of a process group.
fn names_no_child(trap: &Notification) -> bool {
    match i64::from(trap.nr) {
        libc::SYS_wait4 => trap.args[0] as i32 <= 0,
        libc::SYS_waitid => matches!(trap.args[0] as u32, libc::P_ALL | libc::P_PGID),
        _ => false,
    }
}

/// Whether this result of a wait states that there are children, but none has ended.
fn found_none_ended(pending: &PendingCall, outcome: &Outcome) -> bool {
    match i64::from(pending.trap.nr) {
        _ if outcome.ret != 0 => false,
        libc::SYS_wait4 => true,
        // Without a siginfo the result does not show whether a child was found.
        libc::SYS_waitid if pending.trap.args[2] != 0 => {
            let info = outcome.outs.first().map(|out| out.as_slice());
            info.and_then(|info| info.get(PID_OFFSET..)?.first_chunk()).is_some_and(|pid| *pid == [0; 4])
        }
        _ => false,
    }
}
