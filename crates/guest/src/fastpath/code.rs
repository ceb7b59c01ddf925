//! The code in a guest that makes calls on published files ([`crate::fastpath`]), and the stages in
//! which a thread may be stopped there.
//!
//! The code is position-independent. It is at [`CODE`] in the reserved range, and its table at
//! [`TABLE`]:
//!
//! ```text
//!   0  kinds of the two slots, a byte each: 0 unpublished, 1 read, 2 write
//!   2  a bit for each descriptor below 40: the file is local, the guest's kernel makes the call
//!   7  1: the CPU time is published
//!   8  rdi, 16 rsi: the program's, while the code copies
//!  24  the record of the site that the thread came from
//!  32  rcx, 48 rax: the program's, while the code tests the thread flag
//!  40  the branch target for several threads, meanwhile
//!  64  a slot: descriptor (u32), +8 offset, +16 and +24 start and end of its bytes in the file,
//!      +32 address of the bytes, +40 where the last pread ended
//! 128  the other slot
//! 176  seconds, 184 nanoseconds (below a second) to add to the CPU time counted by the guest's
//!      kernel
//! 192  records: +0 entry, +8 address of the thread flag, +16 branch target for several threads,
//!      +24 address of the `syscall`, +32 address behind it, +40 number of the call
//! ```
//! A site jumps here with its record in rax. Only rax, rcx and r11 may be changed, as by a
//! `syscall`, and the flags, because a site is patched only if the code behind its `syscall` sets
//! them anew. The stack with its red zone, and all other registers, are preserved: bytes are copied
//! by `rep movsb`.
//!
//! An operation takes effect with one store, the last of each body: the new offset, or the end of a
//! pread. A thread that is stopped before the store has not begun ([`stage`]); after it only the
//! return is left. A call on a local file is made by the only `syscall` here, which the filter lets
//! through. A thread that is stopped before this `syscall` has not begun. A thread that is stopped
//! after it is moved behind the program's own `syscall`, with the same registers. If the kernel is
//! to restart the call, it then moves the thread back by two bytes, to that `syscall`.
//!
//! The process's CPU time is read by the same `syscall`, and the rest is added to the result. Until
//! both words of the result are written, the operation has not begun.

#![allow(unsafe_code, reason = "the code is assembly")]

use crate::files::limits::{FASTPATH_TABLE, MAX_OFFSET_BITS};

/// The offset of the code in the reserved range: behind the `syscall` for injected calls, before
/// the code of batched injections.
pub(crate) const CODE: u64 = 256;
/// The offset of the table in the reserved range.
pub(crate) const TABLE: u64 = FASTPATH_TABLE;
/// Offsets in the table.
pub(crate) const SAVED_RDI: usize = 8;
pub(crate) const SAVED_RSI: usize = 16;
pub(crate) const CURRENT_RECORD: usize = 24;
pub(crate) const SAVED_RCX: usize = 32;
pub(crate) const SAVED_RAX: usize = 48;
pub(crate) const SLOTS: usize = 64;
pub(crate) const SLOT: usize = 64;
pub(crate) const RECORDS: usize = 192;
pub(crate) const RECORD: usize = 48;
/// Kinds of slots.
pub(crate) const READ: u8 = 1;
pub(crate) const WRITE: u8 = 2;
/// Only local files with descriptors below this are in the table: a bit each, behind the two kinds.
pub(crate) const MAX_LOCAL_FD: i32 = 40;
/// The offsets of the flag for a published CPU time, and of the time to add.
pub(crate) const CLOCK: usize = 7;
pub(crate) const CLOCK_OFFSET: usize = 176;

std::arch::global_asm!(
    ".pushsection .rodata",
    ".balign 16",
    ".globl tern_fastpath_begin, tern_fastpath_saved, tern_fastpath_read, tern_fastpath_read_copies, tern_fastpath_read_done",
    ".globl tern_fastpath_pread, tern_fastpath_pread_copies, tern_fastpath_pread_done, tern_fastpath_lseek, tern_fastpath_lseek_done",
    ".globl tern_fastpath_write, tern_fastpath_write_copies, tern_fastpath_write_done, tern_fastpath_restore, tern_fastpath_fall_back, tern_fastpath_end",
    ".globl tern_fastpath_pwrite, tern_fastpath_native_done, tern_fastpath_clock, tern_fastpath_clock_sums, tern_fastpath_clock_done",
    ".set .Lfastpath_table, .Lfastpath_begin + {table}",
    "tern_fastpath_begin:",
    ".Lfastpath_begin:",
    // read, at a site that first tests whether the process has one thread. If it has several, the
    // thread continues at the branch target, with its registers unchanged.
    "mov [rip + .Lfastpath_table + 24], rax",
    "mov [rip + .Lfastpath_table + 32], rcx",
    "tern_fastpath_saved:",
    "mov rcx, [rax + 16]",
    "mov [rip + .Lfastpath_table + 40], rcx",
    "mov rcx, [rax + 8]",
    "cmp byte ptr [rcx], 0",
    "mov rcx, [rip + .Lfastpath_table + 32]",
    "mov rax, [rip + .Lfastpath_table + 48]",
    "jne 20f",
    "jmp qword ptr [rip + .Lfastpath_table + 40]",
    // read
    "tern_fastpath_read:",
    "mov [rip + .Lfastpath_table + 24], rax",
    "20: cmp edi, [rip + .Lfastpath_table + 64]",
    "jne 21f",
    "lea r11, [rip + .Lfastpath_table + 64]",
    "cmp byte ptr [rip + .Lfastpath_table], 1",
    "jmp 22f",
    "21: cmp edi, [rip + .Lfastpath_table + 128]",
    "jne tern_fastpath_other",
    "lea r11, [rip + .Lfastpath_table + 128]",
    "cmp byte ptr [rip + .Lfastpath_table + 1], 1",
    "22: jne tern_fastpath_other",
    "mov [rip + .Lfastpath_table + 8], rdi",
    "mov [rip + .Lfastpath_table + 16], rsi",
    "tern_fastpath_read_copies:",
    "lea rcx, [rdx - 1]",
    "cmp rcx, {max_len}",
    "jae tern_fastpath_restore",
    "mov rdi, rsi",
    "mov rsi, [r11 + 8]",
    "lea rax, [rsi + rdx]",
    "cmp rax, [r11 + 24]",
    "ja tern_fastpath_restore",
    "sub rsi, [r11 + 16]",
    "jb tern_fastpath_restore",
    "add rsi, [r11 + 32]",
    "mov rcx, rdx",
    "rep movsb",
    "mov rdi, [rip + .Lfastpath_table + 8]",
    "mov rsi, [rip + .Lfastpath_table + 16]",
    "mov rcx, rax",
    "mov rax, rdx",
    "mov [r11 + 8], rcx",
    "tern_fastpath_read_done:",
    "mov rcx, [rip + .Lfastpath_table + 24]",
    "jmp qword ptr [rcx + 32]",
    // pread
    "tern_fastpath_pread:",
    "mov [rip + .Lfastpath_table + 24], rax",
    "cmp edi, [rip + .Lfastpath_table + 64]",
    "jne 31f",
    "lea r11, [rip + .Lfastpath_table + 64]",
    "cmp byte ptr [rip + .Lfastpath_table], 1",
    "jmp 32f",
    "31: cmp edi, [rip + .Lfastpath_table + 128]",
    "jne tern_fastpath_other",
    "lea r11, [rip + .Lfastpath_table + 128]",
    "cmp byte ptr [rip + .Lfastpath_table + 1], 1",
    "32: jne tern_fastpath_other",
    "mov [rip + .Lfastpath_table + 8], rdi",
    "mov [rip + .Lfastpath_table + 16], rsi",
    "tern_fastpath_pread_copies:",
    "lea rcx, [rdx - 1]",
    "cmp rcx, {max_len}",
    "jae tern_fastpath_restore",
    "mov rdi, rsi",
    "mov rsi, r10",
    "mov rax, r10",
    "add rax, rdx",
    "jc tern_fastpath_restore",
    "cmp rax, [r11 + 24]",
    "ja tern_fastpath_restore",
    "sub rsi, [r11 + 16]",
    "jb tern_fastpath_restore",
    "add rsi, [r11 + 32]",
    "mov rcx, rdx",
    "rep movsb",
    "mov rdi, [rip + .Lfastpath_table + 8]",
    "mov rsi, [rip + .Lfastpath_table + 16]",
    "mov [r11 + 40], rax",
    "mov rax, rdx",
    "tern_fastpath_pread_done:",
    "mov rcx, [rip + .Lfastpath_table + 24]",
    "jmp qword ptr [rcx + 32]",
    // lseek with SEEK_SET or SEEK_CUR. A file published for writing must be written in one piece,
    // so its offset can only be queried.
    "tern_fastpath_lseek:",
    "mov [rip + .Lfastpath_table + 24], rax",
    "cmp edi, [rip + .Lfastpath_table + 64]",
    "jne 41f",
    "lea r11, [rip + .Lfastpath_table + 64]",
    "movzx ecx, byte ptr [rip + .Lfastpath_table]",
    "jmp 42f",
    "41: cmp edi, [rip + .Lfastpath_table + 128]",
    "jne tern_fastpath_other",
    "lea r11, [rip + .Lfastpath_table + 128]",
    "movzx ecx, byte ptr [rip + .Lfastpath_table + 1]",
    "42: test ecx, ecx",
    "jz tern_fastpath_other",
    "mov rax, rsi",
    "cmp edx, 1",
    "ja tern_fastpath_fall_back",
    "jb 43f",
    "add rax, [r11 + 8]",
    "43: cmp ecx, 1",
    "je 44f",
    "cmp rax, [r11 + 8]",
    "jne tern_fastpath_fall_back",
    "44: mov rcx, rax",
    "shr rcx, {far}",
    "jnz tern_fastpath_fall_back",
    "mov [r11 + 8], rax",
    "tern_fastpath_lseek_done:",
    "mov rcx, [rip + .Lfastpath_table + 24]",
    "jmp qword ptr [rcx + 32]",
    // write
    "tern_fastpath_write:",
    "mov [rip + .Lfastpath_table + 24], rax",
    "cmp edi, [rip + .Lfastpath_table + 64]",
    "jne 51f",
    "lea r11, [rip + .Lfastpath_table + 64]",
    "cmp byte ptr [rip + .Lfastpath_table], 2",
    "jmp 52f",
    "51: cmp edi, [rip + .Lfastpath_table + 128]",
    "jne tern_fastpath_other",
    "lea r11, [rip + .Lfastpath_table + 128]",
    "cmp byte ptr [rip + .Lfastpath_table + 1], 2",
    "52: jne tern_fastpath_other",
    "mov [rip + .Lfastpath_table + 8], rdi",
    "mov [rip + .Lfastpath_table + 16], rsi",
    "tern_fastpath_write_copies:",
    "lea rcx, [rdx - 1]",
    "cmp rcx, {max_len}",
    "jae tern_fastpath_restore",
    "mov rdi, [r11 + 8]",
    "lea rax, [rdi + rdx]",
    "cmp rax, [r11 + 24]",
    "ja tern_fastpath_restore",
    "sub rdi, [r11 + 16]",
    "jb tern_fastpath_restore",
    "add rdi, [r11 + 32]",
    "mov rcx, rdx",
    "rep movsb",
    "mov rdi, [rip + .Lfastpath_table + 8]",
    "mov rsi, [rip + .Lfastpath_table + 16]",
    "mov rcx, rax",
    "mov rax, rdx",
    "mov [r11 + 8], rcx",
    "tern_fastpath_write_done:",
    "mov rcx, [rip + .Lfastpath_table + 24]",
    "jmp qword ptr [rcx + 32]",
    // clock_gettime of the process's CPU time.
    "tern_fastpath_clock:",
    "mov [rip + .Lfastpath_table + 24], rax",
    "cmp edi, {process}",
    "jne tern_fastpath_fall_back",
    "cmp byte ptr [rip + .Lfastpath_table + 7], 1",
    "jne tern_fastpath_fall_back",
    "jmp 61f",
    // pwrite: never published.
    "tern_fastpath_pwrite:",
    "mov [rip + .Lfastpath_table + 24], rax",
    // This file is not published. If it is local, the call is made here.
    "tern_fastpath_other:",
    "cmp edi, {max_local_fd}",
    "jae tern_fastpath_fall_back",
    "lea ecx, [rdi + 16]",
    "mov r11, [rip + .Lfastpath_table]",
    "bt r11, rcx",
    "jnc tern_fastpath_fall_back",
    "61: mov rcx, [rip + .Lfastpath_table + 24]",
    "mov rax, [rcx + 40]",
    "syscall",
    "tern_fastpath_native_done:",
    "mov rcx, [rip + .Lfastpath_table + 24]",
    "cmp dword ptr [rcx + 40], {clock}",
    "je tern_fastpath_clock_sums",
    "jmp qword ptr [rcx + 32]",
    "tern_fastpath_clock_sums:",
    "test eax, eax",
    "jnz tern_fastpath_clock_done",
    "mov rcx, [rsi]",
    "mov r11, [rsi + 8]",
    "add rcx, [rip + .Lfastpath_table + 176]",
    "add r11, [rip + .Lfastpath_table + 184]",
    "cmp r11, 1000000000",
    "jb 62f",
    "sub r11, 1000000000",
    "inc rcx",
    "62: mov [rsi], rcx",
    "mov [rsi + 8], r11",
    "tern_fastpath_clock_done:",
    "mov rcx, [rip + .Lfastpath_table + 24]",
    "jmp qword ptr [rcx + 32]",
    // Not possible here: go to the program's own `syscall`.
    "tern_fastpath_restore:",
    "mov rdi, [rip + .Lfastpath_table + 8]",
    "mov rsi, [rip + .Lfastpath_table + 16]",
    "tern_fastpath_fall_back:",
    "mov rcx, [rip + .Lfastpath_table + 24]",
    "mov rax, [rcx + 40]",
    "jmp qword ptr [rcx + 24]",
    "tern_fastpath_end:",
    ".popsection",
    table = const TABLE - CODE,
    max_len = const tern_migrate::message::MAX_DELEGATED_IO,
    far = const MAX_OFFSET_BITS,
    max_local_fd = const MAX_LOCAL_FD,
    process = const libc::CLOCK_PROCESS_CPUTIME_ID,
    clock = const libc::SYS_clock_gettime,
);

unsafe extern "C" {
    static tern_fastpath_begin: u8;
    static tern_fastpath_saved: u8;
    static tern_fastpath_read: u8;
    static tern_fastpath_read_copies: u8;
    static tern_fastpath_read_done: u8;
    static tern_fastpath_pread: u8;
    static tern_fastpath_pread_copies: u8;
    static tern_fastpath_pread_done: u8;
    static tern_fastpath_lseek: u8;
    static tern_fastpath_lseek_done: u8;
    static tern_fastpath_write: u8;
    static tern_fastpath_write_copies: u8;
    static tern_fastpath_write_done: u8;
    static tern_fastpath_pwrite: u8;
    static tern_fastpath_native_done: u8;
    static tern_fastpath_clock: u8;
    static tern_fastpath_clock_sums: u8;
    static tern_fastpath_clock_done: u8;
    static tern_fastpath_restore: u8;
    static tern_fastpath_fall_back: u8;
    static tern_fastpath_end: u8;
}

/// Where in the code a thread is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// At the first instruction of a body; the site's record is in rax.
    Entry,
    /// Testing the thread flag; whether rcx is saved by now.
    TestsFlag(bool),
    /// Its registers are the program's, except rax, rcx and r11.
    Checks,
    /// rdi and rsi are saved in the table too.
    Copies,
    /// Only the return is left.
    Done,
    /// The kernel has made the call. For a local file it is complete; for the CPU time the addition
    /// is missing.
    Returned,
    /// Only the jump to the program's own `syscall` is left.
    FallsBack,
}

impl Stage {
    /// Whether the code copies to or from the program's buffer, and may fault there.
    pub(crate) fn is_copying(self) -> bool {
        self == Self::Copies
    }
}

fn offset(of: *const u8) -> u64 {
    of.addr() as u64 - (&raw const tern_fastpath_begin).addr() as u64
}

/// The code.
pub(crate) fn bytes() -> &'static [u8] {
    let len = offset(&raw const tern_fastpath_end) as usize;
    // SAFETY: the symbols enclose the code above, which lies in read-only memory of this program.
    unsafe { std::slice::from_raw_parts(&raw const tern_fastpath_begin, len) }
}

/// The offset in the code at which a call's body begins; `thread_flag` selects the body that tests
/// the thread flag first.
pub(crate) fn entry(nr: u32, thread_flag: bool) -> Option<u64> {
    Some(match i64::from(nr) {
        libc::SYS_read if thread_flag => 0,
        libc::SYS_read => offset(&raw const tern_fastpath_read),
        libc::SYS_pread64 => offset(&raw const tern_fastpath_pread),
        libc::SYS_lseek => offset(&raw const tern_fastpath_lseek),
        libc::SYS_write => offset(&raw const tern_fastpath_write),
        libc::SYS_pwrite64 => offset(&raw const tern_fastpath_pwrite),
        libc::SYS_clock_gettime => offset(&raw const tern_fastpath_clock),
        _ => return None,
    })
}

/// The offset behind the only `syscall` in the code.
pub(crate) fn native_return_addr() -> u64 {
    offset(&raw const tern_fastpath_native_done)
}

/// The stage of a thread whose next instruction is at this offset; none if that is not in the code.
pub(crate) fn stage(at: u64) -> Option<Stage> {
    let parts = [
        (0, Stage::Entry),
        (1, Stage::TestsFlag(false)),
        (offset(&raw const tern_fastpath_saved), Stage::TestsFlag(true)),
        (offset(&raw const tern_fastpath_read), Stage::Entry),
        (offset(&raw const tern_fastpath_read) + 1, Stage::Checks),
        (offset(&raw const tern_fastpath_read_copies), Stage::Copies),
        (offset(&raw const tern_fastpath_read_done), Stage::Done),
        (offset(&raw const tern_fastpath_pread), Stage::Entry),
        (offset(&raw const tern_fastpath_pread) + 1, Stage::Checks),
        (offset(&raw const tern_fastpath_pread_copies), Stage::Copies),
        (offset(&raw const tern_fastpath_pread_done), Stage::Done),
        (offset(&raw const tern_fastpath_lseek), Stage::Entry),
        (offset(&raw const tern_fastpath_lseek) + 1, Stage::Checks),
        (offset(&raw const tern_fastpath_lseek_done), Stage::Done),
        (offset(&raw const tern_fastpath_write), Stage::Entry),
        (offset(&raw const tern_fastpath_write) + 1, Stage::Checks),
        (offset(&raw const tern_fastpath_write_copies), Stage::Copies),
        (offset(&raw const tern_fastpath_write_done), Stage::Done),
        (offset(&raw const tern_fastpath_clock), Stage::Entry),
        (offset(&raw const tern_fastpath_clock) + 1, Stage::Checks),
        (offset(&raw const tern_fastpath_pwrite), Stage::Entry),
        (offset(&raw const tern_fastpath_pwrite) + 1, Stage::Checks),
        (offset(&raw const tern_fastpath_native_done), Stage::Returned),
        (offset(&raw const tern_fastpath_clock_sums), Stage::Checks),
        (offset(&raw const tern_fastpath_clock_done), Stage::Done),
        (offset(&raw const tern_fastpath_restore), Stage::Copies),
        (offset(&raw const tern_fastpath_fall_back), Stage::FallsBack),
    ];
    let part = parts.iter().rev().find(|(from, _)| *from <= at).map(|(_, stage)| *stage);
    part.filter(|_| at < offset(&raw const tern_fastpath_end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_fits_and_has_one_syscall() {
        assert!(CODE + (bytes().len() as u64) < tern_tracee::PAGE / 2, "{} bytes", bytes().len());
        let calls: Vec<usize> =
            (2..bytes().len()).filter(|at| bytes()[at - 2..*at] == [0x0f, 0x05]).collect();
        assert_eq!(calls, [native_return_addr() as usize], "there is one syscall");
    }

    #[test]
    fn every_offset_has_a_stage() {
        use libc::{SYS_clock_gettime, SYS_lseek, SYS_pread64, SYS_pwrite64, SYS_read, SYS_write};
        for nr in [SYS_pread64, SYS_lseek, SYS_write, SYS_pwrite64, SYS_read, SYS_clock_gettime] {
            let entry = entry(nr as u32, false).unwrap();
            assert_eq!((stage(entry), stage(entry + 7)), (Some(Stage::Entry), Some(Stage::Checks)));
        }
        assert_eq!(entry(libc::SYS_close as u32, false), None);
        assert_eq!((stage(0), stage(7)), (Some(Stage::Entry), Some(Stage::TestsFlag(false))));
        let len = bytes().len() as u64;
        assert_eq!((stage(len - 1), stage(len)), (Some(Stage::FallsBack), None));
    }
}
