//! Transfers that an interruption cut short.
//!
//! A blocking write to a pipe or a stream socket, and a receive with MSG_WAITALL, return a short
//! count when ptrace interrupts them after a part has been moved, even if no signal is pending.
//! Natively they do so only when a signal handler runs. The same holds for sendmmsg and recvmmsg,
//! which count messages. Such a call is repeated for the remainder, and the program gets the sum.
//! Transfers longer than one message carries are split in the same way.

use serde::{Deserialize, Serialize};
use tern_tracee::registers::Registers;

/// How much of a transfer is done, and the arguments with which the program began it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partial {
    /// Bytes, or messages, moved so far.
    pub done: u64,
    /// The buffer, as the program gave it.
    pub buffer: u64,
    /// The length, as the program gave it.
    pub length: u64,
}

/// If the registers show an interrupted call that returned a short count, changes them to repeat
/// the call for the remainder. `before` is the state left by an earlier interruption of the same
/// call.
pub fn remainder(registers: &mut Registers, before: Option<Partial>) -> Option<Partial> {
    let nr = registers.call()?;
    let must_complete = match nr.cast_signed() {
        libc::SYS_write | libc::SYS_sendto => true,
        libc::SYS_recvfrom => registers.r10 & libc::MSG_WAITALL as u64 != 0,
        libc::SYS_sendmmsg => true,
        // A call with MSG_WAITFORONE or a timeout may return fewer messages by itself.
        libc::SYS_recvmmsg => registers.r10 & libc::MSG_WAITFORONE as u64 == 0 && registers.r8 == 0,
        _ => false,
    };
    if must_complete { advance(registers, nr, before) } else { None }
}

/// As [`remainder`], for a transfer that is longer than one message carries, after a piece of that
/// maximum length was transferred completely.
pub fn long_remainder(registers: &mut Registers, before: Option<Partial>) -> Option<Partial> {
    let nr = registers.call()?;
    let plain = [libc::SYS_read, libc::SYS_write, libc::SYS_sendto].contains(&nr.cast_signed());
    if plain || is_positional(nr) { advance(registers, nr, before) } else { None }
}

/// Buffer bytes for each unit that the call counts (a struct mmsghdr, or a byte).
fn unit_bytes(nr: u64) -> u64 {
    const MESSAGE: u64 = 64;
    if [libc::SYS_sendmmsg, libc::SYS_recvmmsg].contains(&nr.cast_signed()) { MESSAGE } else { 1 }
}

/// Whether the call has a file offset as its fourth argument.
fn is_positional(nr: u64) -> bool {
    [libc::SYS_pread64, libc::SYS_pwrite64].contains(&nr.cast_signed())
}

fn advance(registers: &mut Registers, nr: u64, before: Option<Partial>) -> Option<Partial> {
    let moved = registers.rax.cast_signed();
    if moved <= 0 || moved.cast_unsigned() >= registers.rdx {
        return None;
    }
    let moved = moved.cast_unsigned();
    let begun = before.unwrap_or(Partial { done: 0, buffer: registers.rsi, length: registers.rdx });
    registers.rsi = registers.rsi.wrapping_add(moved * unit_bytes(nr));
    registers.rdx -= moved;
    if is_positional(nr) {
        registers.r10 = registers.r10.wrapping_add(moved);
    }
    registers.rax = nr;
    registers.rip -= 2;
    registers.orig_rax = u64::MAX;
    Some(Partial { done: begun.done + moved, ..begun })
}

impl Partial {
    /// The result of the whole transfer, after the remainder returned `ret`.
    #[must_use]
    pub fn total_result(&self, ret: i64) -> i64 {
        // An error after a part has been transferred is reported by the next call, as in the
        // kernel.
        self.done.cast_signed() + ret.max(0)
    }

    /// Restores the program's own arguments.
    pub fn restore_arguments(&self, registers: &mut Registers) {
        (registers.rsi, registers.rdx) = (self.buffer, self.length);
        if registers.call().is_some_and(is_positional) {
            registers.r10 = registers.r10.wrapping_sub(self.done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remainder_is_requested_and_added() {
        let cut = Registers { orig_rax: 1, rax: 100, rsi: 0x1000, rdx: 300, rip: 12, ..Registers::default() };
        let mut now = cut;
        let partial = remainder(&mut now, None).unwrap();
        assert_eq!((now.rsi, now.rdx, now.rip, now.rax), (0x1064, 200, 10, 1));
        assert_eq!(partial.total_result(200), 300);
        assert_eq!(partial.total_result(-32), 100);
        now = Registers { orig_rax: 1, rax: 50, rip: 12, ..now };
        let partial = remainder(&mut now, Some(partial)).unwrap();
        assert_eq!((partial.done, partial.buffer, partial.length), (150, 0x1000, 300));
        assert_eq!(remainder(&mut Registers { rax: 300, ..cut }, None), None);
        assert_eq!(remainder(&mut Registers { orig_rax: 0, ..cut }, None), None, "a read may be short");
    }

    #[test]
    fn message_counts_have_remainders_unless_fewer_are_allowed() {
        let nr = libc::SYS_recvmmsg as u64;
        let cut = Registers { orig_rax: nr, rax: 2, rsi: 0x1000, rdx: 5, rip: 12, ..Registers::default() };
        let mut now = cut;
        let partial = remainder(&mut now, None).unwrap();
        assert_eq!((now.rsi, now.rdx, partial.total_result(3)), (0x1080, 3, 5));
        assert_eq!(remainder(&mut Registers { r8: 0x2000, ..cut }, None), None);
        assert_eq!(remainder(&mut Registers { r10: libc::MSG_WAITFORONE as u64, ..cut }, None), None);
    }

    #[test]
    fn long_transfers_continue_at_the_file_offset() {
        let nr = libc::SYS_pread64 as u64;
        let full = Registers {
            orig_rax: nr,
            rax: 100,
            rsi: 0x1000,
            rdx: 250,
            r10: 7,
            rip: 12,
            ..Registers::default()
        };
        let mut now = full;
        let partial = long_remainder(&mut now, None).unwrap();
        assert_eq!((now.rsi, now.rdx, now.r10), (0x1064, 150, 107));
        now = Registers { orig_rax: nr, rax: 100, rip: 12, ..now };
        let partial = long_remainder(&mut now, Some(partial)).unwrap();
        assert_eq!((partial.done, now.rdx, now.r10), (200, 50, 207));
        now.orig_rax = nr;
        partial.restore_arguments(&mut now);
        assert_eq!((now.rsi, now.rdx, now.r10, partial.total_result(50)), (0x1000, 250, 7, 250));
        assert_eq!(
            long_remainder(&mut Registers { orig_rax: libc::SYS_recvfrom as u64, ..full }, None),
            None
        );
    }
}
