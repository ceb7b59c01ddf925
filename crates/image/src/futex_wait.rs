//! Waits on a futex with a relative time limit: FUTEX_WAIT of futex(2).
//!
//! The kernel turns the time limit into the time at which the wait ends, and keeps that when the wait is
//! interrupted: restart_syscall continues it. Only the same thread of the same kernel can do so. The image
//! of a thread therefore has the time at which its wait ends, by the monotonic clock, which a process sees
//! unchanged on all nodes. Where the thread is restored it makes that wait with an absolute time
//! (FUTEX_WAIT_BITSET), which is interrupted at once. Its kernel then has what restart_syscall needs, and
//! the thread has the registers of the program's own call.
//!
//! The other calls that wait on futexes have absolute times, and are made again unchanged.

use crate::thread::ThreadImage;
use std::time::{Duration, Instant};
use tern_tracee::inject::Injection;
use tern_tracee::registers::{Registers, restart};
use tern_tracee::{Memory, Result};

const RESTART_SYSCALL: u64 = libc::SYS_restart_syscall.cast_unsigned();

/// Whether a call is such a wait.
#[must_use]
pub fn is_timed_wait(nr: u32, args: &[u64; 6]) -> bool {
    let operation = args[1] as i32 & !libc::FUTEX_PRIVATE_FLAG;
    i64::from(nr) == libc::SYS_futex && operation == libc::FUTEX_WAIT && args[3] != 0
}

/// Whether the kernel continues a call by restart_syscall because it is a wait on a futex: one of these, or
/// one with an absolute time limit.
fn is_continued_wait(nr: u64, args: &[u64; 6]) -> bool {
    let operation = args[1] as i32 & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
    let waits = matches!(operation, libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET);
    nr == libc::SYS_futex.cast_unsigned() && waits && args[3] != 0
}

/// Whether a thread has stopped in such a wait, and its kernel has an end for it.
#[must_use]
pub fn is_interrupted(registers: &Registers) -> bool {
    registers.restart_code() == Some(restart::BLOCK)
        && is_timed_wait(registers.orig_rax as u32, &registers.arguments())
}

/// These registers, changed such that such a wait, if the thread was interrupted in one, begins anew.
#[must_use]
pub fn restarted(mut registers: Registers) -> Registers {
    if is_interrupted(&registers) {
        registers.rax = restart::NOHAND.cast_unsigned();
    }
    registers
}

/// A thread that is to continue a wait on a futex has stopped. If it has stopped right before it makes
/// restart_syscall, changes the registers back to those of the interrupted wait, and returns true.
/// `was_waiting` says that the last call of the thread was such a wait, if its kernel had continued it
/// before.
pub fn undo_rewind(registers: &mut Registers, was_waiting: bool) -> bool {
    let is_wait = match registers.orig_rax {
        RESTART_SYSCALL => was_waiting,
        nr => is_continued_wait(nr, &registers.arguments()),
    };
    // No result of such a wait.
    if !is_wait || registers.rax != RESTART_SYSCALL {
        return false;
    }
    registers.rax = restart::BLOCK.cast_unsigned();
    registers.rip += 2;
    true
}

/// The time limit at an address, at most a century. `None` if the kernel refuses it.
#[must_use]
pub fn time_limit(address: u64, memory: &Memory) -> Option<Duration> {
    const MAX_SECONDS: u64 = 100 * 365 * 86400;
    let seconds = memory.word(address).ok().filter(|seconds| *seconds <= i64::MAX as u64)?;
    let nanos = memory.word(address.checked_add(8)?).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    Some(Duration::new(seconds.min(MAX_SECONDS), nanos as u32))
}

/// The monotonic clock of a thread under injection, in nanoseconds. `scratch` is memory of its process.
fn clock(injection: &mut Injection, memory: &Memory, scratch: u64) -> Result<u64> {
    let args = [libc::CLOCK_MONOTONIC as u64, scratch, 0, 0, 0, 0];
    injection.must("read its clock", libc::SYS_clock_gettime, args)?;
    let (seconds, nanos) = (memory.word(scratch)?, memory.word(scratch + 8)?);
    Ok(seconds.wrapping_mul(1_000_000_000).wrapping_add(nanos))
}

impl ThreadImage {
    /// If the thread was interrupted in such a wait, records when it ends. If that is not known, the
    /// wait begins anew. `scratch` is memory of its process.
    ///
    /// # Errors
    /// If it is gone.
    pub fn record_futex_wait(
        &mut self,
        injection: &mut Injection,
        memory: &Memory,
        scratch: u64,
        until: Option<Instant>,
    ) -> Result<()> {
        self.futex_wait_until = None;
        if !is_interrupted(&self.registers) {
            return Ok(());
        }
        let Some(until) = until else {
            self.registers = restarted(self.registers);
            return Ok(());
        };
        let rest = until.saturating_duration_since(Instant::now());
        let now = clock(injection, memory, scratch)?;
        self.futex_wait_until = Some(now.saturating_add(rest.as_nanos() as u64));
        Ok(())
    }
}

/// Has a thread that was captured in a wait which ends at `until` continue that wait, once it is resumed
/// with the registers that are returned. Also returns when the wait ends. `registers` are those with which
/// the thread is to resume otherwise, and `scratch` is memory of its process. If the end is not known, the
/// wait begins anew.
///
/// # Errors
/// If it is gone.
pub fn continue_wait(
    until: Option<u64>,
    mut registers: Registers,
    injection: &mut Injection,
    memory: &Memory,
    scratch: u64,
) -> Result<(Registers, Option<Instant>)> {
    let until = until.filter(|_| is_interrupted(&registers));
    let Some(until) = until else { return Ok((restarted(registers), None)) };
    let rest = until.saturating_sub(clock(injection, memory, scratch)?);
    let ends = Instant::now().checked_add(Duration::from_nanos(rest));
    let timespec = u128::from(until / 1_000_000_000) | u128::from(until % 1_000_000_000) << 64;
    memory.write_forced(scratch, &timespec.to_le_bytes())?;
    let [word, operation, value, ..] = registers.arguments();
    let private = operation as i32 & libc::FUTEX_PRIVATE_FLAG;
    let operation = (libc::FUTEX_WAIT_BITSET | private) as u64;
    let args = [word, operation, value, scratch, 0, u64::from(u32::MAX)];
    registers.rax = injection.call_interrupted(libc::SYS_futex, args)?.cast_unsigned();
    if !restart::is(registers.rax.cast_signed()) {
        // The wait has ended meanwhile.
        registers.orig_rax = u64::MAX;
        return Ok((registers, None));
    }
    Ok((registers, ends))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(operation: i32, timeout: u64) -> Registers {
        let (rsi, orig_rax) = (operation as u64, libc::SYS_futex.cast_unsigned());
        Registers {
            rsi,
            r10: timeout,
            orig_rax,
            rax: restart::BLOCK.cast_unsigned(),
            rip: 0x1002,
            ..Registers::default()
        }
    }

    #[test]
    fn relative_waits_are_recognised() {
        let private = libc::FUTEX_PRIVATE_FLAG;
        assert!(is_interrupted(&waiting(libc::FUTEX_WAIT, 64)));
        assert!(is_interrupted(&waiting(libc::FUTEX_WAIT | private, 64)));
        assert!(!is_interrupted(&waiting(libc::FUTEX_WAIT, 0)), "no time limit");
        assert!(!is_interrupted(&waiting(libc::FUTEX_WAIT_BITSET | private, 64)), "an absolute time");
        assert!(!is_interrupted(&waiting(libc::FUTEX_WAIT | libc::FUTEX_CLOCK_REALTIME, 64)));
        let finished = Registers { rax: 0, ..waiting(libc::FUTEX_WAIT, 64) };
        assert!(!is_interrupted(&finished));
    }

    #[test]
    fn registers_before_restart_syscall_are_those_of_the_wait_again() {
        let interrupted = waiting(libc::FUTEX_WAIT, 64);
        let before = Registers { rax: RESTART_SYSCALL, rip: 0x1000, ..interrupted };
        let mut registers = before;
        assert!(undo_rewind(&mut registers, false));
        assert_eq!(registers, interrupted);
        assert!(!undo_rewind(&mut registers, true), "once only");
        let continued = Registers { orig_rax: RESTART_SYSCALL, ..before };
        assert!(!undo_rewind(&mut continued.clone(), false), "perhaps a poll of so many files");
        let mut registers = continued;
        assert!(undo_rewind(&mut registers, true));
        assert_eq!(registers, Registers { orig_rax: RESTART_SYSCALL, ..interrupted });
    }
}
