//! A guest never stands still inside the vDSO's clocks, nor under a handler that has interrupted them.
//!
//! Guests live in a time namespace, and home does not. The vDSO's code looks which it is, and then reads the offsets
//! and the clock from pages that are laid out otherwise without a namespace: continued at home between the two, it
//! would read a page that is not there (SIGBUS), or a wrong time. From home to here it is safe: the clock's sequence
//! number does not fit then, and the code begins anew.
//!
//! Where this node's vDSO is another than home's the guest has neither: see [`crate::foreign`].

use crate::member::Process;
use std::ops::Range;
use tern_tracee::Result;
use tern_tracee::inject::SYSCALL;
use tern_tracee::stop::Stopped;
use tern_tracee::vdso::{is_inside, lead_out};

impl Process {
    fn vdso(&self) -> Option<Range<u64>> {
        let code = self.image.as_ref()?.layout.kernels().find(|r| r.prot & libc::PROT_EXEC as u32 != 0);
        code.map(|r| r.start..r.end)
    }

    /// Whether the stopped thread is inside the vDSO, or in what stands for it.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn stands_in_vdso(&self, stopped: &Stopped) -> Result<bool> {
        let registers = stopped.registers()?;
        Ok(match &self.foreign {
            Some(foreign) => foreign.in_stubs(registers.rip),
            // In front of a call that it makes there it has given up on the clock's pages.
            None => {
                let mut next = [0; 2];
                let calls = self.memory.read(registers.rip, &mut next).is_ok() && next == SYSCALL;
                !calls && self.vdso().is_some_and(|vdso| is_inside(&vdso, &registers))
            }
        })
    }

    /// Leads the stopped thread out of the vDSO, if it is there. Signals wait meanwhile; one that it was about to be
    /// delivered is dropped, and is the caller's to raise again.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn out_of_vdso(&self, stopped: Stopped) -> Result<Stopped> {
        if let Some(foreign) = &self.foreign {
            let mut registers = stopped.registers()?;
            if foreign.leave(&mut registers, &self.memory)? {
                stopped.set_registers(&registers)?;
            }
            return Ok(stopped);
        }
        match self.vdso() {
            Some(vdso) if is_inside(&vdso, &stopped.registers()?) => {
                self.hot.with_vdso(&vdso, &self.memory, || lead_out(stopped, &self.memory, &vdso))
            }
            _ => Ok(stopped),
        }
    }
}
