//! Writes a call's outputs to the guest's memory.

use crate::call::Outcome;
use crate::memory::{Fault, UserMemory};
use serde::{Deserialize, Serialize};

/// The buffer of one output in the guest's memory: these spans, in order. It is sent with a
/// guest that moves while its call is pending.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputBuffer {
    /// Address and length of each span.
    pub spans: Vec<(u64, u64)>,
    /// Ignore faults, as the kernel does when it writes the remaining time.
    pub ignores_faults: bool,
}

/// Writes the outputs of a call to their buffers, never outside of the memory that the call
/// named.
///
/// # Errors
/// [`Fault`] if some of it cannot be written. The call then returns EFAULT although it was
/// performed, as when the kernel finds the fault only when it writes the results. Everything before
/// the fault has been written.
pub fn scatter(buffers: &[OutputBuffer], outcome: &Outcome, mem: &mut dyn UserMemory) -> Result<(), Fault> {
    for (buffer, out) in buffers.iter().zip(&outcome.outs) {
        let mut rest = out.as_slice();
        for &(addr, len) in &buffer.spans {
            let now = rest.len().min(usize::try_from(len).unwrap_or(usize::MAX));
            let (data, later) = rest.split_at(now);
            rest = later;
            if !data.is_empty() && mem.write(addr, data).is_err() && !buffer.ignores_faults {
                return Err(Fault);
            }
            if rest.is_empty() {
                break;
            }
        }
    }
    Ok(())
}
