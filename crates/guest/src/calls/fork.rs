//! Forking both halves.
//!
//! Home's half has forked already, and reports the child's pid. On this node a clone that is
//! injected into the guest makes the same fork. The child is created beside the guest, not below it
//! (CLONE_PARENT), so that no second SIGCHLD is sent and the helper reaps it. The child has one
//! thread, on both sides.
//!
//! After a vfork the calling thread stays inside its clone until the child has executed or ended;
//! the main loop handles its return. The other threads continue.

use crate::calls::uncreated::creates_own_child;
use crate::process::Guest;
use crate::process::memory::GuestMemory;
use crate::process::shared::{Process, State};
use crate::process::thread::{PendingCall, Thread, VforkWait};
use crate::sandbox::Sandbox;
use crate::sandbox::clone::{CloneOutcome, Cloner, await_clone_return, child_registers};
use tern_ids::HomePid;
use tern_migrate::message::ThreadSync;
use tern_syscall::{Outcome, scatter};
use tern_tracee::{Error, Result};

/// Flags of clone that concern memory and are passed to the clone here.
const PASSED_FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_VFORK
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// The arguments of clone, for the call that the program made: flags, stack, two tid addresses,
/// TLS. With a pidfd, the parent's tid word is in the sixth argument
/// ([`translate_clone3`](crate::sandbox::clone::translate_clone3)).
fn arguments(nr: u32, args: &[u64; 6]) -> [u64; 6] {
    let vfork = (libc::CLONE_VM | libc::CLONE_VFORK) as u64;
    let [flags, stack, parent_tid, child_tid, tls] = match i64::from(nr) {
        libc::SYS_clone if args[5] != 0 => {
            [args[0] | libc::CLONE_PARENT_SETTID as u64, args[1], args[5], args[3], args[4]]
        }
        libc::SYS_clone => [args[0], args[1], args[2], args[3], args[4]],
        libc::SYS_vfork => [vfork, 0, 0, 0, 0],
        _ => [0; 5],
    };
    [flags & PASSED_FLAGS as u64 | libc::CLONE_PARENT as u64, stack, parent_tid, child_tid, tls, 0]
}

impl Guest {
    /// Makes the guest's half of a fork by this thread. The child is `child` at home; its pid in
    /// its own namespace is the result of the call at home. Returns the child, running; the parent
    /// resumes, or waits for the end of its vfork. Returns none if the kernel refuses: then the
    /// parent is held until home has removed the child
    /// ([`fail_creation`](Self::fail_creation)).
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn fork(
        &mut self,
        tid: HomePid,
        pending: &PendingCall,
        (child, outcome): (HomePid, &Outcome),
        sandbox: &Sandbox,
    ) -> Result<Option<Self>> {
        let Self { process, threads } = self;
        let Some(thread) = threads.get_mut(&tid) else { return Err(Error::Gone { pid: process.host_pid }) };
        thread.fork(process, pending, (child, outcome), sandbox)
    }
}

impl Thread {
    fn fork(
        &mut self,
        process: &mut Process,
        pending: &PendingCall,
        (child, outcome): (HomePid, &Outcome),
        sandbox: &Sandbox,
    ) -> Result<Option<Guest>> {
        let own_pid = outcome.ret as i32;
        let args = arguments(pending.trap.nr, &pending.trap.args);
        let io = |source| Error::Refused { operation: "choose a pid", pid: self.host_tid, source };
        sandbox.set_next_pid(own_pid).map_err(io)?;
        let Some(stopped) = self.stop_in_call(pending.trap.id, process)? else {
            return Err(Error::Inconsistent { what: "it died in its fork".into(), pid: self.host_tid });
        };
        let before = stopped.registers()?;
        let mask = stopped.sigmask()?;
        let mut after = before;
        (after.rax, after.orig_rax) = (own_pid as u64, u64::MAX);
        let cloner = Cloner { reserve: process.reserve, listener: &self.listener };
        let child_stop = match cloner.inject(stopped, &before, &args)? {
            CloneOutcome::Created(child_stop) => child_stop,
            CloneOutcome::Refused(failed) => {
                self.hold_until_undone((child, &pending.trap), failed, (before, mask))?;
                return Ok(None);
            }
        };
        process.children_created += u64::from(creates_own_child(&pending.trap));
        self.write_results(pending, outcome, process);
        let host = child_stop.pid();
        child_stop.set_registers(&child_registers(before, child_stop.registers()?, args[1]))?;
        child_stop.set_sigmask(mask)?;
        if args[0] & libc::CLONE_VFORK as u64 != 0 {
            self.vfork_wait = Some(Box::new(VforkWait { after, mask }));
        } else {
            let (stopped, _) = await_clone_return(self.host_tid)?;
            stopped.set_registers(&after)?;
            stopped.set_sigmask(mask)?;
            self.resume_or_hold(stopped, process)?;
        }
        child_stop.resume(0)?;
        let (epoch, reserve) = (process.epoch, process.reserve);
        let mut guest = Guest::new(Process::new(child, own_pid, host, epoch, reserve, State::Running)?);
        guest.process.listener = process.listener.clone();
        guest.process.mapped_files = process.mapped_files.clone();
        guest.process.foreign_vdso = process.foreign_vdso.clone();
        guest.process.image = process.image.clone();
        // CLONE_FILES takes effect at home. A process that shares its descriptor table has no
        // delegated files.
        let shares_fds = i64::from(pending.trap.nr) == libc::SYS_clone
            && pending.trap.args[0] & libc::CLONE_FILES as u64 != 0;
        process.files.shares_fd_table |= shares_fds;
        guest.process.files.shares_fd_table = shares_fds;
        guest.process.fastpath.is_allowed = process.fastpath.is_allowed;
        // A child that runs concurrently in the same memory would also run the patched code.
        process.fastpath.is_allowed &=
            args[0] & (libc::CLONE_VM | libc::CLONE_VFORK) as u64 != libc::CLONE_VM as u64;
        guest.process.shares_parent_memory = args[0] & libc::CLONE_VM as u64 != 0;
        let first =
            Self::new(&guest.process, (child, own_pid, host), ThreadSync::default(), self.deputy_sigmask)?;
        guest.threads.insert(child, first);
        Ok(Some(guest))
    }
}

impl Thread {
    /// Writes the results that home's kernel has returned to the parent, such as the number of a
    /// pidfd. The child does not get them: without CLONE_VM its memory is a copy by now.
    fn write_results(&self, pending: &PendingCall, outcome: &Outcome, process: &Process) {
        let buffers = pending.request.as_ref().map_or(&[][..], |sent| &sent.output_buffers);
        if scatter(buffers, outcome, &mut GuestMemory(&process.memory)).is_err() {
            tracing::warn!(tid = %self.tid, "the results of its fork could not be written");
        }
    }
}
