//! A thread: its numbers, registers, and the kernel's per-thread state that refers to its memory.

use serde::{Deserialize, Serialize};
use tern_ids::HomePid;
use tern_tracee::batch::{BatchArea, BatchResult, InjectBatch, MAX_BATCH_CALLS, run_batches};
use tern_tracee::inject::Injection;
use tern_tracee::registers::{Registers, Xstate};
use tern_tracee::{Error, Memory, Result};

/// The image of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadImage {
    /// Its number at home. Threads and processes share one number space; a process's first thread
    /// has its pid.
    pub tid: HomePid,
    /// Its number as the process itself sees it.
    pub own_tid: i32,
    /// General registers, unmodified: an interrupted call shows as `orig_rax` with a restart code
    /// in `rax`, and the kernel that resumes the thread restarts it.
    pub registers: Registers,
    /// Extended registers (XSAVE area), in the machine's layout.
    pub xstate: Xstate,
    /// Blocked signals.
    pub sigmask: u64,
    /// `stack_t` of sigaltstack(2): address, flags, size.
    pub alternate_stack: [u64; 3],
    /// Restartable sequences: address, size, signature; address 0 if unregistered.
    pub rseq: (u64, u32, u32),
    /// Head and length of the list of robust futexes.
    pub robust_list: (u64, u64),
    /// Address at which the kernel writes 0 and wakes a futex when the thread exits.
    pub clear_child_tid: u64,
    /// When the wait ends in which it was interrupted, if that is a FUTEX_WAIT with a time limit: in
    /// nanoseconds of its monotonic clock ([`crate::futex_wait`]).
    pub futex_wait_until: Option<u64>,
}

const RSEQ_FLAG_UNREGISTER: u64 = 1;
const PR_GET_TID_ADDRESS: u64 = 40;
const SS_AUTODISARM: u64 = 1 << 31;

/// Captures threads under injection; all threads of the process are stopped. `numbers` has the
/// `tid` and the `own_tid` of each thread; `area` is memory of the process for the calls.
///
/// If a thread is in a critical section of rseq, the section is aborted, as the kernel does at a
/// preemption. (The kernel has not done that yet when the thread is in a ptrace stop.)
///
/// # Errors
/// If their process is gone.
pub fn capture(
    injections: &mut [Injection],
    numbers: &[(HomePid, i32)],
    memory: &Memory,
    area: BatchArea,
) -> Result<Vec<ThreadImage>> {
    let mut rseq_areas = Vec::with_capacity(injections.len());
    for injection in injections.iter_mut() {
        let rseq = injection.stopped()?.rseq().unwrap_or((0, 0, 0));
        if rseq.0 != 0 {
            // This must precede the thread's first injected call: during that call the kernel finds
            // the thread outside of the section, and clears the record of the section without an
            // abort.
            let mut registers = *injection.saved_registers();
            leave_critical_section(memory, rseq.0, &mut registers)?;
            injection.set_saved_registers(registers);
        }
        rseq_areas.push(rseq);
    }
    let results = run_batches(injections, memory, area, &|_, data| InjectBatch {
        calls: vec![
            (libc::SYS_sigaltstack, [0, data, 0, 0, 0, 0]),
            (libc::SYS_get_robust_list, [0, data + 24, data + 32, 0, 0, 0]),
            (libc::SYS_prctl, [PR_GET_TID_ADDRESS, data + 40, 0, 0, 0, 0]),
        ],
        ..InjectBatch::default()
    })?;
    let each = injections.iter().zip(numbers).zip(rseq_areas).zip(results);
    each.map(|(((injection, numbers), area), result)| ThreadImage::of(injection, *numbers, area, result.data))
        .collect()
}

/// Restores threads under injection, all of which are stopped. Registers and signal masks are set
/// later, when they resume.
///
/// # Errors
/// If their process is gone, or a call fails.
pub fn restore(
    injections: &mut [Injection],
    images: &[&ThreadImage],
    memory: &Memory,
    area: BatchArea,
) -> Result<()> {
    for (injection, image) in injections.iter().zip(images) {
        injection.stopped()?.set_xstate(&image.xstate)?;
    }
    let done = run_batches(injections, memory, area, &|at, data| images[at].restore_batch(data))?;
    check_results(
        ["set the signal stack", "set the robust list", "set the tid address", "register rseq"],
        memory,
        &done,
    )
}

impl ThreadImage {
    /// The image of a thread under injection, from its rseq area and the words that the kernel
    /// reported: signal stack, robust list, tid address.
    fn of(
        injection: &Injection,
        (tid, own_tid): (HomePid, i32),
        rseq: (u64, u32, u32),
        [stack, flags, size, head, len, clear_child_tid]: [u64; 6],
    ) -> Result<Self> {
        let pid = injection.pid();
        let xstate = injection.stopped()?.xstate()?;
        let registers = *injection.saved_registers();
        let sigmask = injection.saved_mask();
        if !registers.is_64_bit() {
            return Err(Error::Inconsistent { what: "it runs 32-bit code".into(), pid });
        }
        // SS_ONSTACK follows from the stack pointer and is not a setting.
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
            futex_wait_until: None,
        })
    }

    /// The calls that restore a thread. `data` is the address of their data.
    fn restore_batch(&self, data: u64) -> InjectBatch {
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
        InjectBatch { calls, data: [stack, flags, size, 0, 0, 0] }
    }
}

/// Clears the addresses at which the kernel would later write to threads' memory, before that
/// memory is unmapped. An unmapped rseq area would kill the thread at its next preemption.
///
/// # Errors
/// If the process is gone.
pub fn clear_kernel_pointers(injections: &mut [Injection], memory: &Memory, area: BatchArea) -> Result<()> {
    let mut rseq_areas = Vec::with_capacity(injections.len());
    for injection in injections.iter() {
        rseq_areas.push(injection.stopped()?.rseq().unwrap_or((0, 0, 0)));
    }
    let done = run_batches(injections, memory, area, &|at, _| {
        // sizeof(struct robust_list_head)
        let mut calls =
            vec![(libc::SYS_set_robust_list, [0, 24, 0, 0, 0, 0]), (libc::SYS_set_tid_address, [0; 6])];
        let (rseq, size, signature) = rseq_areas[at];
        if rseq != 0 {
            let args = [rseq, u64::from(size), RSEQ_FLAG_UNREGISTER, u64::from(signature), 0, 0];
            calls.push((libc::SYS_rseq, args));
        }
        InjectBatch { calls, ..InjectBatch::default() }
    })?;
    check_results(["clear the robust list", "clear the tid address", "unregister rseq", ""], memory, &done)
}

/// Returns the error of the first call that failed.
fn check_results(
    operations: [&'static str; MAX_BATCH_CALLS],
    memory: &Memory,
    done: &[BatchResult],
) -> Result<()> {
    let mut calls = done.iter().flat_map(|done| operations.iter().zip(&done.calls));
    match calls.find(|(_, ret)| (-4095..0).contains(*ret)) {
        None => Ok(()),
        Some((operation, ret)) => {
            let source = std::io::Error::from_raw_os_error((-ret) as i32);
            Err(Error::Refused { operation, pid: memory.pid(), source })
        }
    }
}

/// If a thread is in a restartable sequence, moves it to that sequence's abort handler.
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
