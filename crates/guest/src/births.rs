//! Threads are born in a guest, and end.
//!
//! Home's half goes first in both. A new thread has been made there, with a number, when the guest's thread makes its
//! own, and from its request until then it cannot be halted: so a process never stands with a thread on one side only.
//! Likewise one that ends: when home says that its deputy has ended, its own call of exit is let through, so that this
//! kernel clears its tid word and releases its robust futexes where the others wait for them. Its end is then expected.

use crate::clone::{Cloned, Cloner, come_out};
use crate::fork::of_the_child;
use crate::member::{Member, Process};
use crate::sandbox::Sandbox;
use crate::thread::{OpenCall, Thread};
use tern_ids::HomePid;
use tern_migrate::message::Talk;
use tern_tracee::{Error, Memory, Result, cpu};

/// The flags with which threads are made: those that concern memory, and what makes them threads. With the others, such
/// as CLONE_UNTRACED, they would not be ours.
const OURS: i32 = SHARED | libc::CLONE_SETTLS | libc::CLONE_PARENT_SETTID | WORD_AT_ITS_END;

const WORD_AT_ITS_END: i32 = libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID;

/// What the threads of a process share.
pub(crate) const SHARED: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM;

/// What to call clone with, for the call that the program made.
fn arguments(args: &[u64; 6]) -> [u64; 6] {
    let [flags, stack, parent_tid, child_tid, tls, _] = *args;
    [flags & OURS as u64, stack, parent_tid, child_tid, tls, 0]
}

impl Member {
    /// Makes the guest's half of a new thread, of which home has the number `child`, and this in its own namespace. Both
    /// run on; or stand, if the guest is coming to a stand.
    ///
    /// # Errors
    /// If the guest is gone, or the thread cannot be made here: home's half has it already, so that the guest cannot
    /// go on.
    pub fn bear(
        &mut self,
        maker: HomePid,
        open: &OpenCall,
        (child, own_tid): (HomePid, i32),
        sandbox: &Sandbox,
    ) -> Result<i32> {
        let Self { process, threads } = self;
        let Some(thread) = threads.get_mut(&maker) else { return Err(Error::Gone { pid: process.host }) };
        let born = thread.bear(process, open, (child, own_tid), sandbox)?;
        let host = born.host;
        threads.insert(child, born);
        Ok(host)
    }

    /// Home says that a thread's deputy has ended, as the thread has asked: it may end here too. Whether it was the first
    /// one.
    ///
    /// # Errors
    /// If the guest is gone.
    pub fn let_end(&mut self, tid: HomePid) -> Result<bool> {
        let Self { process, threads } = self;
        let Some(thread) = threads.get_mut(&tid) else { return Ok(false) };
        // Said again on a new link, or to a thread that has asked for nothing of the kind.
        let Some(open) = thread.open.take_if(|open| i64::from(open.trap.nr) == libc::SYS_exit) else {
            return Ok(false);
        };
        process.waited = process.waited.saturating_add(cpu::waited(thread.host).unwrap_or_default());
        let (host, id) = (thread.host, open.trap.id);
        // Another one takes its part as the one through which memory is seen: without its own it shows none.
        let other = threads.values().find(|other| other.host != host && !other.ending);
        if let Some(other) = other.filter(|_| process.memory.pid() == host) {
            process.memory = Memory::open(other.host)?;
        }
        let Some(thread) = threads.get_mut(&tid) else { return Ok(false) };
        thread.ending = true;
        thread.pass(id)?;
        let first = tid == process.pid;
        if first {
            // The kernel says that it has ended when the others have.
            threads.remove(&tid);
        }
        Ok(first)
    }

    /// A thread has ended here. Whether that was expected.
    pub fn ended(&mut self, tid: HomePid) -> bool {
        self.threads.get(&tid).is_some_and(|thread| thread.ending) && self.threads.remove(&tid).is_some()
    }
}

impl Thread {
    fn bear(
        &mut self,
        process: &mut Process,
        open: &OpenCall,
        (child, own_tid): (HomePid, i32),
        sandbox: &Sandbox,
    ) -> Result<Self> {
        let astray = |what: &str| Error::Astray { what: what.to_owned(), pid: process.host };
        let (lost, other) = (astray("it could make no thread here"), astray("its thread has another number"));
        let args = arguments(&open.trap.args);
        let io = |source| Error::Refused { operation: "choose a number", pid: self.host, source };
        sandbox.next_pid(own_tid).map_err(io)?;
        let Some(stopped) = self.halt_in(open.trap.id, process)? else { return Err(lost) };
        let before = stopped.registers()?;
        let mask = stopped.sigmask()?;
        let cloner = Cloner { reserve: process.reserve, listener: &self.listener };
        let Cloned::Made(begun) = cloner.make(stopped, &before, &args)? else { return Err(lost) };
        let (stopped, number) = come_out(self.host)?;
        if number != own_tid {
            return Err(other);
        }
        let mut after = before;
        (after.rax, after.orig_rax) = (own_tid as u64, u64::MAX);
        stopped.set_registers(&after)?;
        stopped.set_sigmask(mask)?;
        begun.set_registers(&of_the_child(before, begun.registers()?, args[1]))?;
        begun.set_sigmask(mask)?;
        let mut born = Self::new(process, (child, own_tid, begun.pid()), Talk::default(), self.home_mask)?;
        born.run_on(begun, process)?;
        self.run_on(stopped, process)?;
        Ok(born)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_made_as_asked_but_never_untraced() {
        let flags = (SHARED | libc::CLONE_SETTLS | libc::CLONE_CHILD_CLEARTID) as u64;
        let asked = [flags | libc::CLONE_UNTRACED as u64 | libc::SIGCHLD as u64, 1, 2, 3, 4, 77];
        assert_eq!(arguments(&asked), [flags, 1, 2, 3, 4, 0]);
    }
}
