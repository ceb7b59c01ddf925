//! One thread: who it is, registers, and what the kernel keeps about its memory.

use crate::reserve::Reserve;
use serde::{Deserialize, Serialize};
use tern_ids::HomePid;
use tern_tracee::errand::{Desk, Errand, MOST_CALLS, Returned, errands};
use tern_tracee::inject::Injection;
use tern_tracee::registers::{Registers, Xstate};
use tern_tracee::{Error, Memory, Result};

/// A thread on paper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadImage {
    /// Its number at home: a thread's is taken from the same row as a process', whose first thread has its pid.
    pub tid: HomePid,
    /// Its number as it sees it itself.
    pub own_tid: i32,
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

/// Reads threads under injection, all of which stand; their numbers at home and their own are given.
///
/// A critical section of rseq in progress is aborted as the kernel does at a preemption: the kernel has not yet looked
/// when a tracer sees the stop.
///
/// # Errors
/// If their process is gone.
pub fn capture(
    injections: &mut [Injection],
    numbers: &[(HomePid, i32)],
    memory: &Memory,
    reserve: Reserve,
) -> Result<Vec<ThreadImage>> {
    let mut areas = Vec::with_capacity(injections.len());
    for injection in injections.iter_mut() {
        let area = injection.stopped()?.rseq().unwrap_or((0, 0, 0));
        if area.0 != 0 {
            // Before it makes a call for us: the kernel sees then that it is not in the section, and forgets it.
            let mut registers = *injection.before();
            leave_critical_section(memory, area.0, &mut registers)?;
            injection.set_before(registers);
        }
        areas.push(area);
    }
    let asked = errands(injections, memory, reserve.wide_desk(), &|_, data| Errand {
        calls: vec![
            (libc::SYS_sigaltstack, [0, data, 0, 0, 0, 0]),
            (libc::SYS_get_robust_list, [0, data + 24, data + 32, 0, 0, 0]),
            (libc::SYS_prctl, [PR_GET_TID_ADDRESS, data + 40, 0, 0, 0, 0]),
        ],
        ..Errand::default()
    })?;
    let each = injections.iter().zip(numbers).zip(areas).zip(asked);
    each.map(|(((injection, numbers), area), told)| ThreadImage::of(injection, *numbers, area, told.data))
        .collect()
}

/// Gives threads under injection, all of which stand, what is theirs but registers and signal masks, which come with their
/// resumption.
///
/// # Errors
/// If their process is gone, or a call fails.
pub fn restore(
    injections: &mut [Injection],
    images: &[&ThreadImage],
    memory: &Memory,
    desk: Desk,
) -> Result<()> {
    for (injection, image) in injections.iter().zip(images) {
        injection.stopped()?.set_xstate(&image.xstate)?;
    }
    let done = errands(injections, memory, desk, &|at, data| images[at].errand(data))?;
    succeeded(
        ["set the signal stack", "set the robust list", "set the tid address", "register rseq"],
        memory,
        &done,
    )
}

impl ThreadImage {
    /// The image of a thread under injection, with its rseq area, of which its kernel has told these words: signal stack,
    /// list of robust futexes, tid address.
    fn of(
        injection: &Injection,
        (tid, own_tid): (HomePid, i32),
        rseq: (u64, u32, u32),
        [stack, flags, size, head, len, clear_child_tid]: [u64; 6],
    ) -> Result<Self> {
        let pid = injection.pid();
        let xstate = injection.stopped()?.xstate()?;
        let registers = *injection.before();
        let sigmask = injection.mask();
        if !registers.is_64_bit() {
            return Err(Error::Astray { what: "it runs 32-bit code".into(), pid });
        }
        // SS_ONSTACK is what the stack pointer says, not a setting.
        let flags = flags & 0xffff_ffff & (SS_AUTODISARM | libc::SS_DISABLE as u64);
        Ok(Self {
            tid,
            own_tid,
            registers,
            xstate,
            sigmask,
            alternate_stack: [stack, flags, size],
            rseq,
            robust_list: (head, len),
            clear_child_tid,
        })
    }

    /// The calls by which a thread gets what is its own; its data lies there.
    fn errand(&self, data: u64) -> Errand {
        let (head, len) = self.robust_list;
        let mut calls = vec![
            (libc::SYS_sigaltstack, [data, 0, 0, 0, 0, 0]),
            (libc::SYS_set_robust_list, [head, len, 0, 0, 0, 0]),
            (libc::SYS_set_tid_address, [self.clear_child_tid, 0, 0, 0, 0, 0]),
        ];
        let (area, size, signature) = self.rseq;
        if area != 0 {
            calls.push((libc::SYS_rseq, [area, u64::from(size), 0, u64::from(signature), 0, 0]));
        }
        let [stack, flags, size] = self.alternate_stack;
        Errand { calls, data: [stack, flags, size, 0, 0, 0] }
    }
}

/// Takes back what the kernel would later write into the memory of threads, which is about to go. An unmapped rseq area
/// would even kill them at their next preemption.
///
/// # Errors
/// If the process is gone.
pub fn withdraw(injections: &mut [Injection], memory: &Memory, reserve: Reserve) -> Result<()> {
    let mut areas = Vec::with_capacity(injections.len());
    for injection in injections.iter() {
        areas.push(injection.stopped()?.rseq().unwrap_or((0, 0, 0)));
    }
    let done = errands(injections, memory, reserve.wide_desk(), &|at, _| {
        // sizeof(struct robust_list_head)
        let mut calls =
            vec![(libc::SYS_set_robust_list, [0, 24, 0, 0, 0, 0]), (libc::SYS_set_tid_address, [0; 6])];
        let (area, size, signature) = areas[at];
        if area != 0 {
            let args = [area, u64::from(size), RSEQ_FLAG_UNREGISTER, u64::from(signature), 0, 0];
            calls.push((libc::SYS_rseq, args));
        }
        Errand { calls, ..Errand::default() }
    })?;
    succeeded(["clear the robust list", "clear the tid address", "unregister rseq", ""], memory, &done)
}

/// Whether none of these calls has failed.
fn succeeded(operations: [&'static str; MOST_CALLS], memory: &Memory, done: &[Returned]) -> Result<()> {
    let mut calls = done.iter().flat_map(|done| operations.iter().zip(&done.calls));
    match calls.find(|(_, ret)| (-4095..0).contains(*ret)) {
        None => Ok(()),
        Some((operation, ret)) => {
            let source = std::io::Error::from_raw_os_error((-ret) as i32);
            Err(Error::Refused { operation, pid: memory.pid(), source })
        }
    }
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
