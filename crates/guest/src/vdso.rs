//! A guest is never stopped inside the vDSO's clock functions, nor in a handler that has
//! interrupted them.
//!
//! Guests are in a time namespace, and home's processes are not. The vDSO's code tests whether it
//! runs in a time namespace, and then reads the offsets and the clock from pages whose layout
//! depends on the result. If it continued at home after the test, it would read an unmapped page
//! (SIGBUS) or a wrong time. The other direction is safe: the clock's sequence number then does not
//! match, and the code restarts.
//!
//! If this node's vDSO differs from home's, a replacement is mapped: see `foreign`.

pub(crate) mod foreign;
pub mod trampoline;

use crate::process::shared::Process;
use std::ops::Range;
use tern_tracee::Result;
use tern_tracee::stop::Stopped;
use tern_tracee::vdso::{is_at_syscall, is_inside, run_out};

impl Process {
    fn vdso(&self) -> Option<Range<u64>> {
        let code =
            self.image.as_ref()?.layout.kernel_regions().find(|r| r.prot & libc::PROT_EXEC as u32 != 0);
        code.map(|r| r.start..r.end)
    }

    /// Whether the stopped thread is inside the vDSO, or its replacement.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn is_in_vdso(&self, stopped: &Stopped) -> Result<bool> {
        let registers = stopped.registers()?;
        Ok(match &self.foreign_vdso {
            Some(foreign_vdso) => foreign_vdso.in_trampolines(registers.rip),
            None => {
                !is_at_syscall(&self.memory, &registers)
                    && self.vdso().is_some_and(|vdso| is_inside(&vdso, &registers))
            }
        })
    }

    /// Moves the stopped thread out of the vDSO, if it is inside. Signals wait meanwhile. A signal
    /// that was about to be delivered is dropped, and the caller must raise it again.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn move_out_of_vdso(&self, stopped: Stopped) -> Result<Stopped> {
        if let Some(foreign_vdso) = &self.foreign_vdso {
            let mut registers = stopped.registers()?;
            if foreign_vdso.step_out(&mut registers, &self.memory)? {
                stopped.set_registers(&registers)?;
            }
            return Ok(stopped);
        }
        match self.vdso() {
            Some(vdso) if is_inside(&vdso, &stopped.registers()?) => {
                self.fastpath
                    .with_original_vdso(&vdso, &self.memory, || run_out(stopped, &self.memory, &vdso))
            }
            _ => Ok(stopped),
        }
    }
}
