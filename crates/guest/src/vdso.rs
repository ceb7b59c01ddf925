//! A guest never stands still inside the vDSO's clocks, nor under a handler that has interrupted them.
//!
//! Guests live in a time namespace, and home does not. The vDSO's code looks which it is, and then reads the offsets
//! and the clock from pages that are laid out otherwise without a namespace: continued at home between the two, it
//! would read a page that is not there (SIGBUS), or a wrong time. From home to here it is safe: the clock's sequence
//! number does not fit then, and the code begins anew.

use crate::member::Member;
use tern_tracee::Result;
use tern_tracee::inject::SYSCALL;
use tern_tracee::registers::Registers;
use tern_tracee::stop::{self, Stop, Stopped};

/// The vDSO's functions are shorter than this, but for their retries.
const MOST_STEPS: u32 = 20_000;

impl Member {
    fn is_in_vdso(&self, registers: &Registers) -> bool {
        let Some(image) = &self.image else { return false };
        let code = image.layout.kernels().find(|r| r.prot & libc::PROT_EXEC as u32 != 0);
        // Where it makes a call it has given up on the clock's pages.
        code.is_some_and(|r| (r.start..r.end).contains(&registers.rip)) && registers.call().is_none()
    }

    /// Whether the stopped guest is inside the vDSO.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn stands_in_vdso(&self, stopped: &Stopped) -> Result<bool> {
        Ok(self.is_in_vdso(&stopped.registers()?))
    }

    /// Leads the stopped guest out of the vDSO, if it is there. Signals wait meanwhile; one that it was about to be
    /// delivered is dropped, and is the caller's to raise again.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn out_of_vdso(&self, mut stopped: Stopped) -> Result<Stopped> {
        if !self.stands_in_vdso(&stopped)? {
            return Ok(stopped);
        }
        let mask = stopped.sigmask()?;
        stopped.set_sigmask(!(1 << (libc::SIGTRAP - 1)))?;
        for _ in 0..MOST_STEPS {
            let registers = stopped.registers()?;
            let mut next = [0; 2];
            let calls = self.memory.read(registers.rip, &mut next).is_ok() && next == SYSCALL;
            if calls || !self.is_in_vdso(&registers) {
                break;
            }
            stopped.step(0)?;
            stopped = stop::wait_stop(self.host)?;
            while stopped.stop != Stop::Signal(libc::SIGTRAP) {
                stopped.step(0)?;
                stopped = stop::wait_stop(self.host)?;
            }
        }
        stopped.set_sigmask(mask)?;
        Ok(stopped)
    }
}
