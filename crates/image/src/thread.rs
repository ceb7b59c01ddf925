//! One thread: registers, and what the kernel keeps about its memory.

use crate::apply::Space;
use crate::reserve::Reserve;
use serde::{Deserialize, Serialize};
use tern_tracee::inject::Injection;
use tern_tracee::registers::{Registers, Xstate};
use tern_tracee::{Error, Memory, Result};

/// A thread on paper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadImage {
    /// General registers, untouched: an interrupted call is shown by `orig_rax` and a restart code in `rax`,
    /// and the kernel that resumes the thread does the restart.
    pub registers: Registers,
    /// Extended registers, in the machine's layout.
    pub xstate: Xstate,
    /// Blocked signals.
    pub sigmask: u64,
    /// `stack_t` of sigaltstack(2): address, flags, size.
    pub alternate_stack: [u64; 3],
    /// Restartable sequences: address, size, signature; address 0 if unregistered.
    pub rseq: (u64, u32, u32),
    /// Head and length of the list of robust futexes.
    pub robust_list: (u64, u64),
    /// Where the kernel writes 0 and wakes a futex when the thread ends.
    pub clear_child_tid: u64,
}

const RSEQ_FLAG_UNREGISTER: u64 = 1;
const PR_GET_TID_ADDRESS: u64 = 40;
const SS_AUTODISARM: u64 = 1 << 31;

impl ThreadImage {
    /// Reads the thread under injection.
    ///
    /// A critical section of rseq in progress is aborted as the kernel does at a preemption: the kernel has
    /// not yet looked when a tracer sees the stop.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn capture(space: &mut dyn Space, memory: &Memory, reserve: Reserve) -> Result<Self> {
        let injection = space.injection();
        let pid = injection.pid();
        let scratch = reserve.room();
        let xstate = injection.stopped()?.xstate()?;
        let rseq = injection.stopped()?.rseq().unwrap_or((0, 0, 0));
        let mut registers = *injection.before();
        let sigmask = injection.mask();
        if rseq.0 != 0 {
            leave_critical_section(memory, rseq.0, &mut registers)?;
        }
        space.call("read the signal stack", libc::SYS_sigaltstack, [0, scratch, 0, 0, 0, 0])?;
        let mut stack =
            [memory.word(scratch)?, memory.word(scratch + 8)? & 0xffff_ffff, memory.word(scratch + 16)?];
        // SS_ONSTACK is what the stack pointer says, not a setting.
        stack[1] &= SS_AUTODISARM | libc::SS_DISABLE as u64;
        space.call("read the robust list", libc::SYS_get_robust_list, [0, scratch, scratch + 8, 0, 0, 0])?;
        let robust_list = (memory.word(scratch)?, memory.word(scratch + 8)?);
        let ask = [PR_GET_TID_ADDRESS, scratch, 0, 0, 0, 0];
        space.call("read the tid address", libc::SYS_prctl, ask)?;
        let clear_child_tid = memory.word(scratch)?;
        if !registers.is_64_bit() {
            return Err(Error::Astray { what: "it runs 32-bit code".into(), pid });
        }
        Ok(Self { registers, xstate, sigmask, alternate_stack: stack, rseq, robust_list, clear_child_tid })
    }

    /// Gives a process all of it but registers, signal mask and extended registers, which come with its
    /// resumption. `call` makes a call in it.
    ///
    /// # Errors
    /// If the process is gone, or a call fails.
    pub fn restore(&self, space: &mut dyn Space, memory: &Memory, reserve: Reserve) -> Result<()> {
        let scratch = reserve.room();
        let stack: Vec<u8> = self.alternate_stack.iter().flat_map(|w| w.to_le_bytes()).collect();
        memory.write_forced(scratch, &stack)?;
        space.call("set the signal stack", libc::SYS_sigaltstack, [scratch, 0, 0, 0, 0, 0])?;
        let (head, len) = self.robust_list;
        space.call("set the robust list", libc::SYS_set_robust_list, [head, len, 0, 0, 0, 0])?;
        space.call(
            "set the tid address",
            libc::SYS_set_tid_address,
            [self.clear_child_tid, 0, 0, 0, 0, 0],
        )?;
        let (at, size, signature) = self.rseq;
        if at != 0 {
            space.call(
                "register rseq",
                libc::SYS_rseq,
                [at, u64::from(size), 0, u64::from(signature), 0, 0],
            )?;
        }
        Ok(())
    }
}

/// Takes back what the kernel would later write into a thread's memory: for one whose memory is about to go.
/// An unmapped rseq area would even kill it at its next preemption.
///
/// # Errors
/// If the process is gone.
pub fn withdraw(injection: &mut Injection) -> Result<()> {
    let (at, size, signature) = injection.stopped()?.rseq().unwrap_or((0, 0, 0));
    if at != 0 {
        let args = [at, u64::from(size), RSEQ_FLAG_UNREGISTER, u64::from(signature), 0, 0];
        injection.must("unregister rseq", libc::SYS_rseq, args)?;
    }
    // sizeof(struct robust_list_head)
    injection.must("clear the robust list", libc::SYS_set_robust_list, [0, 24, 0, 0, 0, 0])?;
    injection.must("clear the tid address", libc::SYS_set_tid_address, [0; 6])?;
    Ok(())
}

fn leave_critical_section(memory: &Memory, rseq: u64, registers: &mut Registers) -> Result<()> {
    // struct rseq: u32 cpu_id_start, u32 cpu_id, u64 rseq_cs, ...
    let section = memory.word(rseq + 8)?;
    if section == 0 {
        return Ok(());
    }
    // struct rseq_cs: u32 version, u32 flags, u64 start_ip, u64 post_commit_offset, u64 abort_ip.
    let mut words = [0u64; 4];
    for (word, at) in words.iter_mut().zip((section..).step_by(8)) {
        *word = memory.word(at)?;
    }
    let [_, start, length, abort] = words;
    if registers.rip.wrapping_sub(start) < length {
        registers.rip = abort;
    }
    memory.write_forced(rseq + 8, &[0; 8])
}
