//! Stepping a thread out of the vDSO.

use crate::memory::Memory;
use crate::registers::Registers;
use crate::stop::{self, Stop, Stopped};
use crate::{Result, inject::SYSCALL};
use std::ops::Range;

/// Maximum number of single steps. The vDSO's functions are shorter, unless they retry.
const MAX_STEPS: u32 = 20_000;

/// Whether a thread with these registers is inside the vDSO. A thread in a system call that was
/// made from there does not count, since it no longer uses the clock pages.
#[must_use]
pub fn is_inside(vdso: &Range<u64>, registers: &Registers) -> bool {
    vdso.contains(&registers.rip) && registers.call().is_none()
}

/// Single-steps a stopped thread out of the vDSO, or up to the next `syscall` instruction there.
/// Signals are blocked meanwhile. A signal that the thread was about to be delivered is dropped,
/// and the caller must raise it again.
///
/// # Errors
/// If it is gone.
pub fn step_out(mut stopped: Stopped, memory: &Memory, vdso: &Range<u64>) -> Result<Stopped> {
    if !is_inside(vdso, &stopped.registers()?) {
        return Ok(stopped);
    }
    let (host, mask) = (stopped.pid(), stopped.sigmask()?);
    stopped.set_sigmask(!(1 << (libc::SIGTRAP - 1)))?;
    for _ in 0..MAX_STEPS {
        let registers = stopped.registers()?;
        let mut next = [0; 2];
        let calls = memory.read(registers.rip, &mut next).is_ok() && next == SYSCALL;
        if calls || !is_inside(vdso, &registers) {
            break;
        }
        stopped.step(0)?;
        stopped = stop::wait_stop(host)?;
        while stopped.stop != Stop::Signal(libc::SIGTRAP) {
            stopped.step(0)?;
            stopped = stop::wait_stop(host)?;
        }
    }
    stopped.set_sigmask(mask)?;
    Ok(stopped)
}
