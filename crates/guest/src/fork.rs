//! Both halves fork.
//!
//! Home's half has forked already and says which pid the child got. Here the same is done with a clone made in
//! the guest's place: beside it, not below it (CLONE_PARENT), so that no second SIGCHLD appears and the
//! helper reaps it. The child has one thread, on both sides.
//!
//! After a vfork the thread that made it stays inside its clone until the child has executed or ended; the main loop
//! sees it come out. The other threads run on.

use crate::clone::{Cloned, Cloner, come_out};
use crate::member::{GuestMemory, Member, Process, State};
use crate::sandbox::Sandbox;
use crate::thread::{OpenCall, Thread};
use tern_ids::HomePid;
use tern_migrate::message::Talk;
use tern_syscall::{Outcome, scatter};
use tern_tracee::registers::Registers;
use tern_tracee::{Error, Result};

/// A parent waiting inside its vfork.
#[derive(Debug)]
pub struct Forking {
    /// Its registers for afterwards.
    pub after: Registers,
    /// Its signal mask.
    pub mask: u64,
}

/// Flags of clone that concern memory and are done here as well.
const OURS: i32 = libc::CLONE_VM
    | libc::CLONE_VFORK
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// What to call clone with, for the call that the program made: flags, stack, two tid addresses, TLS.
fn arguments(nr: u32, args: &[u64; 6]) -> [u64; 6] {
    let vfork = (libc::CLONE_VM | libc::CLONE_VFORK) as u64;
    let [flags, stack, parent_tid, child_tid, tls] = match i64::from(nr) {
        libc::SYS_clone => [args[0], args[1], args[2], args[3], args[4]],
        libc::SYS_vfork => [vfork, 0, 0, 0, 0],
        _ => [0; 5],
    };
    [flags & OURS as u64 | libc::CLONE_PARENT as u64, stack, parent_tid, child_tid, tls, 0]
}

impl Member {
    /// Makes the guest's half of a fork by this thread whose child at home is `child`; its pid in its own
    /// namespace is what the call has returned there. The child is returned, running; the parent runs, or waits for a vfork's end.
    ///
    /// # Errors
    /// If the guest is gone or the kernel will not fork; the parent then got EAGAIN.
    pub fn fork(
        &mut self,
        tid: HomePid,
        open: &OpenCall,
        (child, outcome): (HomePid, &Outcome),
        sandbox: &Sandbox,
    ) -> Result<Self> {
        let Self { process, threads } = self;
        let Some(thread) = threads.get_mut(&tid) else { return Err(Error::Gone { pid: process.host }) };
        thread.fork(process, open, (child, outcome), sandbox)
    }
}

impl Thread {
    fn fork(
        &mut self,
        process: &mut Process,
        open: &OpenCall,
        (child, outcome): (HomePid, &Outcome),
        sandbox: &Sandbox,
    ) -> Result<Member> {
        let own_pid = outcome.ret as i32;
        let args = arguments(open.trap.nr, &open.trap.args);
        let io = |source| Error::Refused { operation: "choose a pid", pid: self.host, source };
        sandbox.next_pid(own_pid).map_err(io)?;
        let Some(stopped) = self.halt_in(open.trap.id, process)? else {
            return Err(Error::Astray { what: "it dies in its fork".into(), pid: self.host });
        };
        let before = stopped.registers()?;
        let mask = stopped.sigmask()?;
        let mut after = before;
        (after.rax, after.orig_rax) = (own_pid as u64, u64::MAX);
        let cloner = Cloner { reserve: process.reserve, listener: &self.listener };
        let begun = match cloner.make(stopped, &before, &args)? {
            Cloned::Made(begun) => begun,
            Cloned::Refused(failed) => {
                failed
                    .set_registers(&Registers { rax: (-i64::from(libc::EAGAIN)).cast_unsigned(), ..after })?;
                failed.set_sigmask(mask)?;
                self.run_on(failed, process)?;
                return Err(Error::Astray { what: "it could not fork here".into(), pid: self.host });
            }
        };
        self.tell_of_child(open, outcome, process);
        let host = begun.pid();
        begun.set_registers(&of_the_child(before, begun.registers()?, args[1]))?;
        begun.set_sigmask(mask)?;
        if args[0] & libc::CLONE_VFORK as u64 != 0 {
            self.forking = Some(Box::new(Forking { after, mask }));
        } else {
            let (stopped, _) = come_out(self.host)?;
            stopped.set_registers(&after)?;
            stopped.set_sigmask(mask)?;
            self.run_on(stopped, process)?;
        }
        begun.resume(0)?;
        let mut member = Member::new(child, own_pid, host, process.epoch, process.reserve, State::Running)?;
        member.process.listener = process.listener.clone();
        member.process.shown = process.shown.clone();
        member.process.foreign = process.foreign.clone();
        member.process.image = process.image.clone();
        // Flags of clone that concern descriptors are home's; whoever shares them has none of his own.
        let shares =
            i64::from(open.trap.nr) == libc::SYS_clone && open.trap.args[0] & libc::CLONE_FILES as u64 != 0;
        process.files.shared |= shares;
        member.process.files.shared = shares;
        member.process.hot.allowed = process.hot.allowed;
        // Who runs beside it in the same memory runs the same code.
        process.hot.allowed &= args[0] & (libc::CLONE_VM | libc::CLONE_VFORK) as u64 != libc::CLONE_VM as u64;
        member.process.borrowed = args[0] & libc::CLONE_VM as u64 != 0;
        let first = Self::new(&member.process, (child, own_pid, host), Talk::default(), self.home_mask)?;
        member.threads.insert(child, first);
        Ok(member)
    }
}

impl Thread {
    /// Writes what the kernel at home has told its parent of a child, which now has its own copy of the memory: the
    /// number of a descriptor for it.
    fn tell_of_child(&self, open: &OpenCall, outcome: &Outcome, process: &Process) {
        let landings = open.sent.as_ref().map_or(&[][..], |sent| &sent.landings);
        if scatter(landings, outcome, &mut GuestMemory(&process.memory)).is_err() {
            tracing::warn!(tid = %self.tid, "it cannot be told of its child");
        }
    }
}

/// With which registers the child of a clone begins: its maker's, but for the result, its stack and what it has got by
/// the clone itself.
pub(crate) fn of_the_child(maker: Registers, child: Registers, stack: u64) -> Registers {
    let rsp = if stack == 0 { maker.rsp } else { stack };
    Registers { fs_base: child.fs_base, rax: 0, orig_rax: u64::MAX, rsp, ..maker }
}
