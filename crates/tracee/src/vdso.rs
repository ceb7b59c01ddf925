//! Leading a thread out of the vDSO.

use crate::memory::Memory;
use crate::registers::Registers;
use crate::stop::{self, Stop, Stopped};
use crate::{Result, inject::SYSCALL};
use std::ops::Range;

/// The vDSO's functions are shorter than this, but for their retries.
const MOST_STEPS: u32 = 20_000;

/// Whether a thread with these registers is inside the vDSO. Where it makes a call it has given up on the clock's pages.
#[must_use]
pub fn is_inside(vdso: &Range<u64>, registers: &Registers) -> bool {
    vdso.contains(&registers.rip) && registers.call().is_none()
}

/// Leads the stopped thread out of the vDSO, if it is there, or to the call that it makes there. Signals wait meanwhile;
/// one that it was about to be delivered is dropped, and is the caller's to raise again.
///
/// # Errors
/// If it is gone.
pub fn lead_out(mut stopped: Stopped, memory: &Memory, vdso: &Range<u64>) -> Result<Stopped> {
    if !is_inside(vdso, &stopped.registers()?) {
        return Ok(stopped);
    }
    let (host, mask) = (stopped.pid(), stopped.sigmask()?);
    stopped.set_sigmask(!(1 << (libc::SIGTRAP - 1)))?;
    for _ in 0..MOST_STEPS {
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
