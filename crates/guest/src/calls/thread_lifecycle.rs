//! Creation and exit of a guest's threads.
//!
//! Home's half goes first in both. When the clone is made here, the new thread already exists at
//! home and has its tid. From the request until the clone is made here, the creating thread cannot
//! be stopped, so a quiesced process has the same threads on both sides. The same holds for an
//! exit. When home reports that the deputy thread has ended, the thread's own exit is let through,
//! so that this kernel clears its tid word and releases its robust futexes, for which other threads
//! of the guest may wait. The shim then expects its end.

use crate::process::Guest;
use crate::process::shared::Process;
use crate::process::thread::{PendingCall, Thread};
use crate::sandbox::Sandbox;
use crate::sandbox::clone::{CloneOutcome, Cloner, THREAD_FLAGS, await_clone_return, child_registers};
use tern_ids::HomePid;
use tern_image::process::MAX_THREADS;
use tern_migrate::message::ThreadSync;
use tern_syscall::{Route, SplitCall, route};
use tern_tracee::listener::Notification;
use tern_tracee::{Error, Memory, Result, cpu};

/// The flags with which threads are created: those about memory, and those that define a thread.
/// Others are dropped; with CLONE_UNTRACED, for one, the thread would escape the shim.
const PASSED_FLAGS: i32 = THREAD_FLAGS | libc::CLONE_SETTLS | libc::CLONE_PARENT_SETTID | TID_WORD_FLAGS;

const TID_WORD_FLAGS: i32 = libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID;

/// The arguments of clone, for the call that the program made.
fn arguments(args: &[u64; 6]) -> [u64; 6] {
    let [flags, stack, parent_tid, child_tid, tls, _] = *args;
    [flags & PASSED_FLAGS as u64, stack, parent_tid, child_tid, tls, 0]
}

impl Guest {
    /// Creates the guest's half of a new thread, which is `child` at home and `own_tid` in its own
    /// namespace. Both threads resume, or stay stopped if the guest is being quiesced. Returns the
    /// tid on this node, or none if the kernel refuses: then the creator is held until home has
    /// removed the new thread ([`fail_creation`](Self::fail_creation)).
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn create_thread(
        &mut self,
        creator: HomePid,
        pending: &PendingCall,
        (child, own_tid): (HomePid, i32),
        sandbox: &Sandbox,
    ) -> Result<Option<i32>> {
        let Self { process, threads } = self;
        let Some(thread) = threads.get_mut(&creator) else {
            return Err(Error::Gone { pid: process.host_pid });
        };
        let new_thread = thread.create_thread(process, pending, (child, own_tid), sandbox)?;
        let Some(new_thread) = new_thread else { return Ok(None) };
        let host = new_thread.host_tid;
        threads.insert(child, new_thread);
        process.note_thread_count(threads);
        Ok(Some(host))
    }

    /// Whether this call creates a thread, and the process has as many threads as can be moved. Home's
    /// kernel then decides, when the process is there. Calls that wait for home count as threads.
    pub(crate) fn has_max_threads(&self, trap: &Notification) -> bool {
        let creates = |nr: u32, args: &[u64; 6]| match i64::from(nr) {
            libc::SYS_clone3 => true,
            _ => route(nr, args) == Route::Both(SplitCall::Thread),
        };
        let is_creating = |thread: &&Thread| {
            thread.pending.as_ref().is_some_and(|pending| creates(pending.trap.nr, &pending.trap.args))
        };
        creates(trap.nr, &trap.args)
            && self.threads.len() + self.threads.values().filter(is_creating).count() >= MAX_THREADS
    }

    /// Lets a thread exit here, after home has reported the end of its deputy thread. Returns
    /// whether it was the first thread.
    ///
    /// # Errors
    /// If the guest is gone.
    pub(crate) fn let_exit(&mut self, tid: HomePid) -> Result<bool> {
        let Self { process, threads } = self;
        let Some(thread) = threads.get_mut(&tid) else { return Ok(false) };
        // Home repeats the report on a new link, and may send it for a thread that has made no
        // exit.
        let Some(pending) = thread.pending.take_if(|pending| i64::from(pending.trap.nr) == libc::SYS_exit)
        else {
            return Ok(false);
        };
        process.usage.add_waited(cpu::run_queue_wait(thread.host_tid).unwrap_or_default());
        let (host, id) = (thread.host_tid, pending.trap.id);
        // An exited thread has no memory, so the memory is opened through another thread.
        let other = threads.values().find(|other| other.host_tid != host && !other.is_exiting);
        if let Some(other) = other.filter(|_| process.memory.pid() == host) {
            process.memory = Memory::open(other.host_tid)?;
        }
        let Some(thread) = threads.get_mut(&tid) else { return Ok(false) };
        thread.is_exiting = true;
        thread.let_through(id)?;
        let first = tid == process.pid;
        if first {
            // The kernel reports its exit only when the others have ended.
            threads.remove(&tid);
        }
        process.note_thread_count(threads);
        Ok(first)
    }

    /// Handles the exit of a thread on this node. Returns whether it was expected.
    pub(crate) fn take_exited(&mut self, tid: HomePid) -> bool {
        self.threads.get(&tid).is_some_and(|thread| thread.is_exiting) && self.threads.remove(&tid).is_some()
    }
}

impl Thread {
    fn create_thread(
        &mut self,
        process: &mut Process,
        pending: &PendingCall,
        (child, own_tid): (HomePid, i32),
        sandbox: &Sandbox,
    ) -> Result<Option<Self>> {
        let inconsistent = |what: &str| Error::Inconsistent { what: what.to_owned(), pid: process.host_pid };
        let (not_created, wrong_tid) =
            (inconsistent("no thread could be created here"), inconsistent("its new thread has another tid"));
        let args = arguments(&pending.trap.args);
        let io = |source| Error::Refused { operation: "choose a tid", pid: self.host_tid, source };
        sandbox.set_next_pid(own_tid).map_err(io)?;
        let Some(stopped) = self.stop_in_call(pending.trap.id, process)? else { return Err(not_created) };
        let before = stopped.registers()?;
        let mask = stopped.sigmask()?;
        let cloner = Cloner { reserve: process.reserve, listener: &self.listener };
        let child_stop = match cloner.inject(stopped, &before, &args)? {
            CloneOutcome::Created(child_stop) => child_stop,
            CloneOutcome::Refused(failed) => {
                let child = (child, &pending.trap);
                return self.hold_until_undone(child, failed, (before, mask)).map(|()| None);
            }
        };
        let (stopped, number) = await_clone_return(self.host_tid)?;
        if number != own_tid {
            return Err(wrong_tid);
        }
        let mut after = before;
        (after.rax, after.orig_rax) = (own_tid as u64, u64::MAX);
        stopped.set_registers(&after)?;
        stopped.set_sigmask(mask)?;
        child_stop.set_registers(&child_registers(before, child_stop.registers()?, args[1]))?;
        child_stop.set_sigmask(mask)?;
        let mut new_thread = Self::new(
            process,
            (child, own_tid, child_stop.pid()),
            ThreadSync::default(),
            self.deputy_sigmask,
        )?;
        new_thread.resume_or_hold(child_stop, process)?;
        self.resume_or_hold(stopped, process)?;
        Ok(Some(new_thread))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_flags_exclude_untraced() {
        let flags = (THREAD_FLAGS | libc::CLONE_SETTLS | libc::CLONE_CHILD_CLEARTID) as u64;
        let asked = [flags | libc::CLONE_UNTRACED as u64 | libc::SIGCHLD as u64, 1, 2, 3, 4, 77];
        assert_eq!(arguments(&asked), [flags, 1, 2, 3, 4, 0]);
    }
}
