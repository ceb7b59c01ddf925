//! One thread of a guest: its ids, its calls and signals, and whether it is stopped.
//!
//! The functions here need this thread only. They are given the state that its process shares
//! ([`Process`]).

use crate::calls::uncreated::Uncreated;
use crate::files::connections::{NativeWait, RunningCall};
use crate::files::internal_call::InternalCall;
use crate::process::raised_signals::RaisedSignals;
use crate::process::shared::Process;
use crate::signals::AwaitedCall;
use crate::time::cpu::CpuMeter;
use rustix::process::{Pid, setpriority_process};
use std::rc::Rc;
use std::time::Instant;
use tern_ids::HomePid;
use tern_image::FileRef;
use tern_migrate::message::ThreadSync;
use tern_syscall::{Call, Gathered, Route, SplitCall};
use tern_tracee::listener::{Listener, Notification};
use tern_tracee::registers::{Registers, restart};
use tern_tracee::stop::{self, Stopped};
use tern_tracee::{Error, Result};

/// A thread of a guest.
#[derive(Debug)]
pub(crate) struct Thread {
    /// Its tid at home.
    pub(crate) tid: HomePid,
    /// Its tid in its own pid namespace.
    pub(crate) own_tid: i32,
    /// Its tid on this node.
    pub(crate) host_tid: i32,
    /// Its process's pid on this node.
    pub(crate) host_tgid: i32,
    /// The notification fd of its seccomp filter.
    pub(crate) listener: Rc<Listener>,
    /// How far its calls and signals are synchronised with home. `calls::request` numbers the calls,
    /// and `calls::forward` those for the rest of a long transfer; a stop marks a call as pending
    /// (`process::quiesce`).
    pub(crate) sync: ThreadSync,
    /// Its pending call, if any: the result has not arrived. Only `calls::request` begins one.
    pub(crate) pending: Option<PendingCall>,
    /// The internal call that was sent home for its process's files. Begun in `calls::request`, and
    /// ended in `files::io`.
    pub(crate) internal_call: Option<Box<InternalCall>>,
    /// Signals from home that are not delivered yet.
    pub(crate) raised: RaisedSignals,
    /// The signals of timers that it has received and is still to handle, or is handling.
    pub(crate) expiries: u64,
    /// The call to which such a handler has returned, if that is reported after the call.
    pub(crate) expiries_until_call: Option<AwaitedCall>,
    /// The deputy's signal mask. Only `calls::split` changes it.
    pub(crate) deputy_sigmask: u64,
    /// The program's signal mask, to be restored when the handler that is about to run returns.
    pub(crate) mask_after_handler: Option<u64>,
    /// Its ptrace stop, until the process resumes. Taken for a moment to inject calls.
    pub(crate) stopped: Option<Stopped>,
    /// Set while it waits in a vfork for its child to execute or to end.
    pub(crate) vfork_wait: Option<Box<VforkWait>>,
    /// Set while home removes its half of a child or thread that this thread could not create here.
    pub(crate) uncreated: Option<Box<Uncreated>>,
    /// The number of its last call when home had last removed such a child of its process. Only
    /// `calls::uncreated` changes it.
    pub(crate) last_call_before_removal: u64,
    /// While its wait is made again because of undecided forks: the number of children that had been
    /// created at the first result. For `calls::uncreated` only.
    pub(crate) undecided_wait: Option<u64>,
    /// Its deputy thread has ended, and its own exit was let through. It makes no further call.
    pub(crate) is_exiting: bool,
    /// The call on connections that was let through, while the thread may be inside it. Only
    /// `files::connections` begins one, and any trap or stop ends it.
    pub(crate) native_call: Option<RunningCall>,
    /// The last such call, if it waits for some time.
    pub(crate) native_wait: Option<NativeWait>,
    /// The number of times that descriptors were removed from the fast path's table
    /// ([`Fastpath::unpublished`](crate::fastpath::Fastpath::unpublished)) when the thread was last known
    /// to be outside its code. Only `process::publication` changes it.
    pub(crate) outside_since: u64,
    /// When the last wait on a futex ends that had a relative time limit, if the thread has made no other
    /// trapped call since. For `time::futex_wait` only.
    pub(crate) futex_wait_end: Option<Instant>,
    /// Its CPU time.
    pub(crate) cpu_meter: CpuMeter,
}

/// A trapped call that home performs.
#[derive(Debug)]
pub(crate) struct PendingCall {
    /// The trap.
    pub(crate) trap: Notification,
    /// The call as it was sent home; none if the process must go home for it.
    pub(crate) request: Option<Gathered>,
    /// File operations that are sent with it and run before it.
    pub(crate) prelude: Vec<Call>,
    /// Why the process must go home for it.
    pub(crate) homeward_reason: Option<String>,
    /// The file to map once its content is here.
    pub(crate) file: Option<FileRef>,
    /// When it was sent.
    pub(crate) sent_at: Instant,
}

/// A parent that waits inside its vfork.
#[derive(Debug)]
pub(crate) struct VforkWait {
    /// Its registers after the call.
    pub(crate) after: Registers,
    /// Its signal mask.
    pub(crate) mask: u64,
}

/// Whether a local part follows after home has succeeded.
#[must_use]
pub(crate) fn has_local_part_after_home(split_call: SplitCall) -> bool {
    matches!(
        split_call,
        SplitCall::Mmap
            | SplitCall::RtSigaction
            | SplitCall::RtSigprocmask
            | SplitCall::RtSigreturn
            | SplitCall::Fork
            | SplitCall::Thread
    )
}

impl Thread {
    /// A new thread of this process, by its tids at home, in its own namespace, and on this node.
    /// `deputy_sigmask` is the signal mask of its deputy.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn new(
        process: &Process,
        (tid, own_tid, host): (HomePid, i32, i32),
        sync: ThreadSync,
        deputy_sigmask: u64,
    ) -> Result<Self> {
        let listener = process.listener.clone();
        Ok(Self {
            tid,
            own_tid,
            host_tid: host,
            host_tgid: process.host_pid,
            listener: listener.ok_or(Error::Gone { pid: host })?,
            cpu_meter: CpuMeter::for_thread(process.host_pid, host, sync.used)?,
            sync,
            pending: None,
            internal_call: None,
            raised: RaisedSignals::default(),
            expiries: 0,
            expiries_until_call: None,
            deputy_sigmask,
            mask_after_handler: None,
            stopped: None,
            vfork_wait: None,
            uncreated: None,
            last_call_before_removal: 0,
            undecided_wait: None,
            is_exiting: false,
            native_call: None,
            native_wait: None,
            outside_since: 0,
            futex_wait_end: None,
        })
    }

    /// Whether the thread can be stopped now. It cannot be stopped
    ///
    /// * while a deliverable signal waits that has interrupted its call at home: that call's result
    ///   is on its way, and a stopped guest would take the signal first and lose the result.
    /// * while home performs a call that has a local part: the local part must be done before the
    ///   process moves.
    /// * in a call made from a trampoline that replaces home's vDSO: the call cannot be repeated
    ///   elsewhere, because the trampoline does not exist there.
    /// * while a handler is about to begin under the signal mask of the call that it interrupted:
    ///   until the handler's frame exists, only this shim has the program's own mask.
    /// * while home removes its half of a child or thread that could not be created here.
    ///
    /// In these cases the thread waits for home, never for another thread, except in a vfork. So
    /// all threads of a process can be stopped eventually.
    #[must_use]
    pub(crate) fn can_stop(&self, process: &Process) -> bool {
        let cannot_stop = self.is_exiting || self.vfork_wait.is_some() || self.uncreated.is_some();
        if cannot_stop || self.mask_after_handler.is_some() {
            return false;
        }
        let Some(pending) = &self.pending else { return true };
        let has_two_parts = match tern_syscall::route(pending.trap.nr, &pending.trap.args) {
            Route::Both(SplitCall::Exec | SplitCall::Exit) => true,
            Route::Both(split_call) => has_local_part_after_home(split_call),
            _ => false,
        };
        let in_trampolines = process
            .foreign_vdso
            .as_ref()
            .is_some_and(|foreign_vdso| foreign_vdso.in_trampolines(pending.trap.ip));
        pending
            .request
            .as_ref()
            .is_none_or(|sent| !(has_two_parts || in_trampolines || self.has_deliverable(sent.call.mask())))
    }

    /// Sets the thread's nice value on this node. The value that the program has set is in force at
    /// the deputy only.
    pub(crate) fn set_nice(&self, nice: i32) {
        // Lowering the value needs root. A failure costs only time.
        let _refused = Pid::from_raw(self.host_tid).map(|pid| setpriority_process(Some(pid), nice));
    }

    /// Replies with a restart code without letting the program see it. With no signal pending the
    /// kernel would return the code to the program, unless the thread stops.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn reply_restart(&mut self, id: u64, code: i64) -> Result<()> {
        // Any stop hides the code from the program; the main loop then resumes the thread.
        stop::interrupt(self.host_tid)?;
        self.reply(id, code)
    }

    /// Replies to a trap.
    ///
    /// # Errors
    /// Those of the kernel, except that a guest that is gone is no error.
    pub(crate) fn reply(&self, id: u64, ret: i64) -> Result<()> {
        self.listener.reply(id, ret).map(drop)
    }

    /// Lets the kernel run a trapped call (see [`Listener::let_continue`]).
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub(crate) fn let_through(&self, id: u64) -> Result<()> {
        self.listener.let_continue(id).map(drop)
    }

    /// The restart code for a call that has not begun at home. If the thread is still in a call
    /// that was interrupted before ([`ThreadSync::restart_code`]), a signal interrupts it with that
    /// call's code.
    pub(crate) fn unbegun_restart_code(&self) -> i64 {
        self.sync.restart_code.filter(|code| restart::is(*code)).unwrap_or(restart::NOINTR)
    }

    /// Corrects the restart code of a call that the shim had not received when the thread was
    /// interrupted. The kernel reports ERESTARTSYS, as for a call that was waiting; a handler
    /// without SA_RESTART would then make any call fail with EINTR, even one that never fails that
    /// way. The call has not begun, so it is always restarted.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn fix_unreceived_restart(&self, stopped: &Stopped) -> Result<()> {
        let mut registers = stopped.registers()?;
        let waits_here = || {
            tern_syscall::waits_here(registers.orig_rax as u32, &registers.arguments())
                || self.has_let_through(&registers)
        };
        if registers.restart_code() == Some(restart::SYS) && !waits_here() {
            registers.rax = self.unbegun_restart_code().cast_unsigned();
            stopped.set_registers(&registers)?;
        }
        Ok(())
    }

    /// Resumes the thread, unless its process is being quiesced: then it stays stopped.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn resume_or_hold(&mut self, stopped: Stopped, process: &Process) -> Result<()> {
        if process.stop_reasons.is_quiescing() {
            self.stopped = Some(stopped);
            return Ok(());
        }
        stopped.resume(0)
    }

    /// Its call and signal state, to be sent to its next node.
    pub(crate) fn final_sync(&mut self) -> ThreadSync {
        ThreadSync { pending_signals: self.raised.to_vec(), used: self.cpu_meter.used(), ..self.sync.clone() }
    }
}
