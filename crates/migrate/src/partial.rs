//! Transfers that an interruption cut short.
//!
//! A blocking write to a pipe or a stream socket, and a receive with MSG_WAITALL, return a short count when they
//! are interrupted after a part has been moved, even if no signal was there: natively that happens only when a
//! handler runs. So the rest is transferred, and the program is told the sum.

use serde::{Deserialize, Serialize};
use tern_tracee::registers::Registers;

/// What of a transfer was done, and the buffer and length with which the program began it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partial {
    /// Bytes moved so far.
    pub done: u64,
    /// The buffer, as the program gave it.
    pub buffer: u64,
    /// The length, as the program gave it.
    pub length: u64,
}

/// If these are the registers of a call that was cut short, makes them those of a call for the rest.
/// `before` is what an earlier interruption of the same call has left.
pub fn rest(registers: &mut Registers, before: Option<Partial>) -> Option<Partial> {
    let nr = registers.call()?;
    let flows = match nr.cast_signed() {
        libc::SYS_write | libc::SYS_sendto => true,
        libc::SYS_recvfrom => registers.r10 & libc::MSG_WAITALL as u64 != 0,
        _ => false,
    };
    let moved = registers.rax.cast_signed();
    if !flows || moved <= 0 || moved.cast_unsigned() >= registers.rdx {
        return None;
    }
    let moved = moved.cast_unsigned();
    let begun = before.unwrap_or(Partial { done: 0, buffer: registers.rsi, length: registers.rdx });
    registers.rsi += moved;
    registers.rdx -= moved;
    registers.rax = nr;
    registers.rip -= 2;
    registers.orig_rax = u64::MAX;
    Some(Partial { done: begun.done + moved, ..begun })
}

impl Partial {
    /// What the whole transfer returns, now that the rest has returned `ret`.
    #[must_use]
    pub fn whole(&self, ret: i64) -> i64 {
        // An error after a part has been moved shows at the next call, as in the kernel.
        self.done.cast_signed() + ret.max(0)
    }

    /// Puts the program's own arguments back.
    pub fn mend(&self, registers: &mut Registers) {
        (registers.rsi, registers.rdx) = (self.buffer, self.length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_is_asked_for_and_added() {
        let cut = Registers { orig_rax: 1, rax: 100, rsi: 0x1000, rdx: 300, rip: 12, ..Registers::default() };
        let mut now = cut;
        let partial = rest(&mut now, None).unwrap();
        assert_eq!((now.rsi, now.rdx, now.rip, now.rax), (0x1064, 200, 10, 1));
        assert_eq!(partial.whole(200), 300);
        assert_eq!(partial.whole(-32), 100);
        now = Registers { orig_rax: 1, rax: 50, rip: 12, ..now };
        let partial = rest(&mut now, Some(partial)).unwrap();
        assert_eq!((partial.done, partial.buffer, partial.length), (150, 0x1000, 300));
        assert_eq!(rest(&mut Registers { rax: 300, ..cut }, None), None);
        assert_eq!(rest(&mut Registers { orig_rax: 0, ..cut }, None), None, "a read may be short");
    }
}
