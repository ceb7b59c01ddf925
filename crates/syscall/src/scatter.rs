//! Putting a call's outputs into the guest's memory.

use crate::call::Outcome;
use crate::memory::{Fault, Memory};
use serde::{Deserialize, Serialize};

/// Where one output goes in the guest's memory: over these spans, in their order. It moves with a guest
/// whose call is still under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Landing {
    /// Address and length of each span.
    pub spans: Vec<(u64, u64)>,
    /// A fault is forgiven: the kernel forgives one when it writes back the time left.
    pub forgiving: bool,
}

/// Writes the outputs of a call where they belong, never outside the memory that the call named.
///
/// # Errors
/// [`Fault`] when some of it cannot be written: the call then answers EFAULT, though it was performed, as
/// when the kernel itself finds out this late. Everything up to the fault has been written.
pub fn scatter(landings: &[Landing], outcome: &Outcome, mem: &mut dyn Memory) -> Result<(), Fault> {
    for (landing, out) in landings.iter().zip(&outcome.outs) {
        let mut rest = out.as_slice();
        for &(addr, len) in &landing.spans {
            let now = rest.len().min(usize::try_from(len).unwrap_or(usize::MAX));
            let (data, later) = rest.split_at(now);
            rest = later;
            if !data.is_empty() && mem.write(addr, data).is_err() && !landing.forgiving {
                return Err(Fault);
            }
            if rest.is_empty() {
                break;
            }
        }
    }
    Ok(())
}
