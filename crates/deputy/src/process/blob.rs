//! The blob: the code that a deputy runs while its program is away. It waits for a request in its
//! mailbox, makes that one system call, and marks it done.
//!
//! ```text
//!  offset in the mailbox
//!   0   state (u32): 0 idle, 1 request, 2 done; the futex that both sides wait on
//!   8   number of the call
//!  16   six arguments
//!  64   result
//! ```
//! The code is position-independent, touches no memory but the mailbox, and keeps nothing in
//! registers but the mailbox's address (rbx). If it is interrupted at the futex it waits again. An
//! interruption of the requested call is recognised by the address behind its `syscall`.

#![allow(unsafe_code, reason = "the code of the blob is assembly")]

/// State: no call.
pub(crate) const IDLE: u32 = 0;
/// State: a call is to be made.
pub(crate) const REQUEST: u32 = 1;
/// State: the call has returned.
pub(crate) const DONE: u32 = 2;

/// Offsets in the mailbox, in bytes.
pub(crate) const STATE_OFFSET: usize = 0;
pub(crate) const CALL_OFFSET: usize = 8;
pub(crate) const RESULT_OFFSET: usize = 64;
/// Bytes of the mailbox before its data.
pub(crate) const HEADER_SIZE: usize = 4096;

std::arch::global_asm!(
    ".pushsection .rodata",
    ".globl tern_blob_begin, tern_blob_call, tern_blob_called, tern_blob_done, tern_blob_end",
    "tern_blob_begin:",
    "2: mov eax, [rbx]",
    "cmp eax, 1",
    "je 3f",
    // futex(state, FUTEX_WAIT, value read, no timeout)
    "mov rdi, rbx",
    "xor esi, esi",
    "mov edx, eax",
    "xor r10d, r10d",
    "mov eax, 202",
    "syscall",
    "jmp 2b",
    "3: mov rax, [rbx + 8]",
    "mov rdi, [rbx + 16]",
    "mov rsi, [rbx + 24]",
    "mov rdx, [rbx + 32]",
    "mov r10, [rbx + 40]",
    "mov r8, [rbx + 48]",
    "mov r9, [rbx + 56]",
    "tern_blob_call:",
    "syscall",
    "tern_blob_called:",
    "mov [rbx + 64], rax",
    "mov dword ptr [rbx], 2",
    "tern_blob_done:",
    // futex(state, FUTEX_WAKE, all waiters)
    "mov rdi, rbx",
    "mov esi, 1",
    "mov edx, 0x7fffffff",
    "mov eax, 202",
    "syscall",
    "jmp 2b",
    "tern_blob_end:",
    ".popsection",
);

unsafe extern "C" {
    static tern_blob_begin: u8;
    static tern_blob_call: u8;
    static tern_blob_called: u8;
    static tern_blob_done: u8;
    static tern_blob_end: u8;
}

fn offset(of: *const u8) -> u64 {
    of.addr() as u64 - (&raw const tern_blob_begin).addr() as u64
}

/// The code, to be copied to the start of the reserved range.
pub(crate) fn code() -> &'static [u8] {
    let len = offset(&raw const tern_blob_end) as usize;
    // SAFETY: the symbols enclose the code above, which lies in read-only memory of this program.
    unsafe { std::slice::from_raw_parts(&raw const tern_blob_begin, len) }
}

/// Offset of the `syscall` that makes the requested call. Injected calls use it too.
pub(crate) fn call_site() -> u64 {
    offset(&raw const tern_blob_call)
}

/// Offset of the instruction behind that `syscall`.
pub(crate) fn after_call() -> u64 {
    offset(&raw const tern_blob_called)
}

/// Whether the blob, stopped at this offset, is in no call and has no result left to store, so that
/// a request in the mailbox has not been begun. This includes the code that wakes the waiter for
/// the previous result, since the next request may already be there.
pub(crate) fn is_between_calls(at: u64) -> bool {
    at <= call_site() || offset(&raw const tern_blob_done) <= at && at < offset(&raw const tern_blob_end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blob_code_has_expected_offsets() {
        let code = code();
        assert!(code.len() < 256, "it is tiny");
        let site = call_site() as usize;
        assert_eq!(code[site..site + 2], [0x0f, 0x05]);
        assert_eq!(after_call(), call_site() + 2);
        // The result is stored by an instruction of four bytes, the state by one of six.
        let between: Vec<u64> = (0..code.len() as u64).filter(|&at| !is_between_calls(at)).collect();
        assert_eq!(between, (after_call() - 1..after_call() + 10).collect::<Vec<_>>());
    }
}
