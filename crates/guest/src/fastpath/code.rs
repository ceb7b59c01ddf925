//! The code in a guest that makes calls on published files ([`crate::fastpath`]).
//!
//! The code is position-independent. It is at [`CODE`] in the reserved range, and its table at
//! [`TABLE`]:
//!
//! ```text
//!   0  kinds of the two slots, a byte each: 0 unpublished, 1 read, 2 write
//!   2  1: the sets of descriptors below are published
//!   7  1: the CPU time is published
//!   8  rdi, 16 rsi: the program's, while the code copies
//!  24  the record of the site that the thread came from, while it uses a slot or the CPU time
//!  56  1: the code has made a call on a local file or connection
//!  64  a slot: descriptor (u32), +8 offset, +16 and +24 start and end of its bytes in the file,
//!      +32 address of the bytes, +40 where the last pread ended
//! 128  the other slot
//! 176  seconds, 184 nanoseconds (below a second) to add to the CPU time counted by the guest's
//!      kernel
//! 192  records: +0 entry, +8 address of the record's `syscall` in the code, +16 address behind the
//!      program's own `syscall`, +24 address of that `syscall`, +32 where to continue after the call,
//!      +40 number of the call, +48 next record of the same site, +56 entry for this number
//! 1280 a bit for each descriptor: the guest's kernel makes calls that transfer data
//! 1408 the same for calls that wait for an epoll set
//! 1536 the same for descriptors that poll and select wait for
//! 1664 a bit for each connection
//! 1792 waits with a limit: +0 time stamp counter when it began, +8 the thread's fs base
//! ```
//! A site jumps here with its record in rcx, and all other registers as for the program's own
//! `syscall`, the number of the call in rax. Only rax, rcx and r11 may be changed, as by a `syscall`,
//! and the flags, because a site is patched only if the code behind its `syscall` sets them anew. The
//! stack with its red zone, and all other registers, are preserved: bytes are copied by `rep movsb`.
//!
//! At a site that makes calls of several numbers, the entry of its first record searches the others.
//!
//! An operation takes effect with one store, the last of each body: the new offset, or the end of a
//! pread. A thread that is stopped before the store has not begun ([`stage`](super::places::stage));
//! after it only the return is left. Only a program with one thread has published files, so the fields
//! for them are one thread's.
//!
//! Calls on local files and connections are made by a `syscall` here, which the filter lets through.
//! Each record has its own, so that the code needs no register to find the record again. A thread that
//! is stopped before this `syscall` has not begun. A thread that is stopped after it is moved behind the
//! program's own `syscall`, with the same registers. If the kernel is to restart the call, it then moves
//! the thread back by two bytes, to that `syscall`.
//!
//! The process's CPU time is read in the same way, and the rest is added to the result. Until both words
//! of the result are written, the operation has not begun.
//!
//! The entry for a wait is found by the record and the thread's fs base, which differs for each thread.
//! If two threads have the same entry, that of the first is lost, and its wait counts as one that begins
//! when it is stopped.

#![allow(unsafe_code, reason = "the code is assembly")]

use crate::files::limits::{FASTPATH_TABLE, MAX_OFFSET_BITS};
use tern_syscall::{NATIVE_CALL_DISTANCE, NATIVE_CALL_SITES};

/// The offset of the code in the reserved range: behind the `syscall` for injected calls, before
/// the code of batched injections.
pub(crate) const CODE: u64 = 256;
/// The offset of the table in the reserved range.
pub(crate) const TABLE: u64 = FASTPATH_TABLE;
/// Offsets in the table.
pub(crate) const SAVED_RDI: usize = 8;
pub(crate) const SAVED_RSI: usize = 16;
pub(crate) const CURRENT_RECORD: usize = 24;
pub(crate) const SLOTS: usize = 64;
pub(crate) const SLOT: usize = 64;
pub(crate) const RECORDS: usize = 192;
pub(crate) const RECORD: usize = 64;
/// The offset in a record of the next one's address.
pub(crate) const NEXT: usize = 48;
/// Number of records.
pub(crate) const MAX_RECORDS: usize = NATIVE_CALL_SITES as usize;
/// The offset of a record.
pub(crate) const fn record(number: usize) -> usize {
    RECORDS + number * RECORD
}
/// Bytes of the code for a record's `syscall`.
pub(crate) const CALL: u64 = NATIVE_CALL_DISTANCE as u64;
/// Kinds of slots.
pub(crate) const READ: u8 = 1;
pub(crate) const WRITE: u8 = 2;
/// The offset of the flag for published sets of descriptors, and of these sets.
pub(crate) const NATIVE: usize = 2;
pub(crate) const DESCRIPTOR_SETS: usize = 1280;
/// Number of descriptors in a set.
pub(crate) const MAX_DESCRIPTORS: usize = 1024;
/// The distance of a record to its first entry for a wait. All entries of all records are behind the
/// sets of descriptors.
pub(crate) const WAITS: usize = DESCRIPTOR_SETS + 4 * MAX_DESCRIPTORS / 8 - RECORDS;
/// The offset of a thread's entry from its record's first: a hash of its fs base.
pub(crate) const fn wait_entry(fs_base: u64) -> u64 {
    let hash = ((fs_base >> 12) as u32).wrapping_mul(WAIT_FACTOR) >> 22;
    hash as u64 & WAIT_MASK
}
/// A factor with well distributed bits: 2³² divided by the golden ratio (Knuth's multiplicative hash).
const WAIT_FACTOR: u32 = 0x9e37_79b1;
const WAIT_MASK: u64 = 0x3f0;
/// The offset of the flag for a call that was made.
pub(crate) const CALL_MADE: usize = 56;
/// The offsets of the flag for a published CPU time, and of the time to add.
pub(crate) const CLOCK: usize = 7;
pub(crate) const CLOCK_OFFSET: usize = 176;

std::arch::global_asm!(
    ".pushsection .rodata",
    ".balign 16",
    ".globl tern_fastpath_begin, tern_fastpath_read, tern_fastpath_read_copies, tern_fastpath_read_done",
    ".globl tern_fastpath_pread, tern_fastpath_pread_copies, tern_fastpath_pread_done, tern_fastpath_lseek, tern_fastpath_lseek_claims, tern_fastpath_lseek_done",
    ".globl tern_fastpath_write, tern_fastpath_write_copies, tern_fastpath_write_done, tern_fastpath_restore, tern_fastpath_reload, tern_fastpath_fall_back, tern_fastpath_end",
    ".globl tern_fastpath_selects, tern_fastpath_epoll_pwait, tern_fastpath_epoll_wait, tern_fastpath_times, tern_fastpath_timed, tern_fastpath_timed_end, tern_fastpath_poll, tern_fastpath_poll_reads",
    ".globl tern_fastpath_pselect, tern_fastpath_select, tern_fastpath_select_reads",
    ".globl tern_fastpath_pwrite, tern_fastpath_clock, tern_fastpath_clock_sums, tern_fastpath_clock_done",
    ".set .Lfastpath_table, .Lfastpath_begin + {table}",
    "tern_fastpath_begin:",
    ".Lfastpath_begin:",
    // A `syscall` for each record, and the jump to where its record says.
    ".irp record, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
    "syscall",
    "jmp qword ptr [rip + .Lfastpath_table + {records} + {record_len} * \\record + 32]",
    ".endr",
    // A call of any number. Continues at the record of this number, if there is one.
    "tern_fastpath_selects:",
    "90: cmp eax, [rcx + 40]",
    "jne 92f",
    "jmp qword ptr [rcx + 56]",
    "92: mov r11, [rcx + 48]",
    "test r11, r11",
    "jz 93f",
    "mov rcx, r11",
    "jmp 90b",
    "93: jmp qword ptr [rcx + 24]",
    // read
    "tern_fastpath_read:",
    "cmp edi, [rip + .Lfastpath_table + 64]",
    "jne 21f",
    "lea r11, [rip + .Lfastpath_table + 64]",
    "cmp byte ptr [rip + .Lfastpath_table], 1",
    "jmp 22f",
    "21: cmp edi, [rip + .Lfastpath_table + 128]",
    "jne tern_fastpath_other",
    "lea r11, [rip + .Lfastpath_table + 128]",
    "cmp byte ptr [rip + .Lfastpath_table + 1], 1",
    "22: jne tern_fastpath_other",
    "mov [rip + .Lfastpath_table + 24], rcx",
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
    "jmp qword ptr [rcx + 16]",
    // pread
    "tern_fastpath_pread:",
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
    "mov [rip + .Lfastpath_table + 24], rcx",
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
    "jmp qword ptr [rcx + 16]",
    // lseek with SEEK_SET or SEEK_CUR. A file published for writing must be written in one piece,
    // so its offset can only be queried.
    "tern_fastpath_lseek:",
    "cmp edi, [rip + .Lfastpath_table + 64]",
    "jne 41f",
    "lea r11, [rip + .Lfastpath_table + 64]",
    "movzx eax, byte ptr [rip + .Lfastpath_table]",
    "jmp 42f",
    "41: cmp edi, [rip + .Lfastpath_table + 128]",
    "jne tern_fastpath_other",
    "lea r11, [rip + .Lfastpath_table + 128]",
    "movzx eax, byte ptr [rip + .Lfastpath_table + 1]",
    "42: test eax, eax",
    "jz tern_fastpath_other",
    "mov [rip + .Lfastpath_table + 24], rcx",
    "tern_fastpath_lseek_claims:",
    "mov ecx, eax",
    "mov rax, rsi",
    "cmp edx, 1",
    "ja tern_fastpath_reload",
    "jb 43f",
    "add rax, [r11 + 8]",
    "43: cmp ecx, 1",
    "je 44f",
    "cmp rax, [r11 + 8]",
    "jne tern_fastpath_reload",
    "44: mov rcx, rax",
    "shr rcx, {far}",
    "jnz tern_fastpath_reload",
    "mov [r11 + 8], rax",
    "tern_fastpath_lseek_done:",
    "mov rcx, [rip + .Lfastpath_table + 24]",
    "jmp qword ptr [rcx + 16]",
    // write
    "tern_fastpath_write:",
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
    "mov [rip + .Lfastpath_table + 24], rcx",
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
    "jmp qword ptr [rcx + 16]",
    // clock_gettime of the process's CPU time.
    "tern_fastpath_clock:",
    "cmp edi, {process}",
    "jne tern_fastpath_fall_back",
    "cmp byte ptr [rip + .Lfastpath_table + 7], 1",
    "jne tern_fastpath_fall_back",
    "mov [rip + .Lfastpath_table + 24], rcx",
    "jmp 61f",
    // epoll_pwait without a mask, and epoll_wait
    "tern_fastpath_epoll_pwait:",
    "test r8, r8",
    "jnz tern_fastpath_fall_back",
    "tern_fastpath_epoll_wait:",
    "cmp edi, {max_descriptors}",
    "jae tern_fastpath_fall_back",
    "cmp byte ptr [rip + .Lfastpath_table + 2], 1",
    "jne tern_fastpath_fall_back",
    "mov eax, edi",
    "bt dword ptr [rip + .Lfastpath_table + 1408], eax",
    "jnc tern_fastpath_fall_back",
    "test r10d, r10d",
    "jle 60f",
    // The wait begins: records the time. The program may have forbidden rdtsc.
    "tern_fastpath_times:",
    "mov r11, rdx",
    "rdtsc",
    "tern_fastpath_timed:",
    "shl rdx, 32",
    "or rdx, rax",
    "rdfsbase rax",
    "shr rax, 12",
    "imul eax, eax, {wait_factor}",
    "shr eax, 22",
    "and eax, {wait_mask}",
    "mov [rcx + rax + {waits}], rdx",
    "rdfsbase rdx",
    "mov [rcx + rax + {waits} + 8], rdx",
    "mov rdx, r11",
    "tern_fastpath_timed_end:",
    "jmp 60f",
    // poll of up to 64 descriptors, at least one of them a connection
    "tern_fastpath_poll:",
    "cmp byte ptr [rip + .Lfastpath_table + 2], 1",
    "jne tern_fastpath_fall_back",
    "lea r11d, [rsi - 1]",
    "cmp r11d, 63",
    "ja tern_fastpath_fall_back",
    "tern_fastpath_poll_reads:",
    "71: mov eax, [rdi + 8 * r11]",
    "cmp eax, {max_descriptors}",
    "jae tern_fastpath_fall_back",
    "bt dword ptr [rip + .Lfastpath_table + 1536], eax",
    "jnc tern_fastpath_fall_back",
    "sub r11d, 1",
    "jns 71b",
    "lea r11d, [rsi - 1]",
    "72: mov eax, [rdi + 8 * r11]",
    "cmp eax, {max_descriptors}",
    "jae tern_fastpath_fall_back",
    "bt dword ptr [rip + .Lfastpath_table + 1664], eax",
    "jc 73f",
    "sub r11d, 1",
    "jns 72b",
    "jmp tern_fastpath_fall_back",
    "73: test edx, edx",
    "jle 60f",
    "jmp tern_fastpath_times",
    // pselect without a mask, and select, of up to 64 descriptors, at least one of them a
    // connection
    "tern_fastpath_pselect:",
    "test r9, r9",
    "jnz tern_fastpath_fall_back",
    "jmp 81f",
    "tern_fastpath_select:",
    "81: cmp byte ptr [rip + .Lfastpath_table + 2], 1",
    "jne tern_fastpath_fall_back",
    "lea r11d, [rdi - 1]",
    "cmp r11d, 63",
    "ja tern_fastpath_fall_back",
    // r11: the descriptors that it may not name. rax: the connections.
    "xor eax, eax",
    "bts rax, r11",
    "lea rax, [rax + rax - 1]",
    "mov r11, [rip + .Lfastpath_table + 1536]",
    "not r11",
    "and r11, rax",
    "and rax, [rip + .Lfastpath_table + 1664]",
    "tern_fastpath_select_reads:",
    "test rsi, rsi",
    "jz 82f",
    "test [rsi], r11",
    "jnz tern_fastpath_fall_back",
    "82: test rdx, rdx",
    "jz 83f",
    "test [rdx], r11",
    "jnz tern_fastpath_fall_back",
    "83: test r10, r10",
    "jz 84f",
    "test [r10], r11",
    "jnz tern_fastpath_fall_back",
    "84: test rsi, rsi",
    "jz 85f",
    "test [rsi], rax",
    "jnz 60f",
    "85: test rdx, rdx",
    "jz 86f",
    "test [rdx], rax",
    "jnz 60f",
    "86: test r10, r10",
    "jz tern_fastpath_fall_back",
    "test [r10], rax",
    "jz tern_fastpath_fall_back",
    "jmp 60f",
    // pwrite, and transfers on sockets: never published.
    "tern_fastpath_pwrite:",
    // This file is not published. If it is local or a connection, the call is made here.
    "tern_fastpath_other:",
    "cmp edi, {max_descriptors}",
    "jae tern_fastpath_fall_back",
    "cmp byte ptr [rip + .Lfastpath_table + 2], 1",
    "jne tern_fastpath_fall_back",
    "mov eax, edi",
    "bt dword ptr [rip + .Lfastpath_table + 1280], eax",
    "jnc tern_fastpath_fall_back",
    "60: mov byte ptr [rip + .Lfastpath_table + 56], 1",
    "61: mov eax, [rcx + 40]",
    "jmp qword ptr [rcx + 8]",
    // The kernel has read the process's CPU time.
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
    "jmp qword ptr [rcx + 16]",
    // Not possible here: go to the program's own `syscall`.
    "tern_fastpath_restore:",
    "mov rdi, [rip + .Lfastpath_table + 8]",
    "mov rsi, [rip + .Lfastpath_table + 16]",
    "tern_fastpath_reload:",
    "mov rcx, [rip + .Lfastpath_table + 24]",
    "tern_fastpath_fall_back:",
    "mov eax, [rcx + 40]",
    "jmp qword ptr [rcx + 24]",
    "tern_fastpath_end:",
    ".popsection",
    table = const TABLE - CODE,
    max_len = const tern_migrate::message::MAX_DELEGATED_IO,
    far = const MAX_OFFSET_BITS,
    max_descriptors = const MAX_DESCRIPTORS,
    process = const libc::CLOCK_PROCESS_CPUTIME_ID,
    records = const RECORDS,
    record_len = const RECORD,
    waits = const WAITS,
    wait_factor = const WAIT_FACTOR.cast_signed(),
    wait_mask = const WAIT_MASK,
);

#[cfg(test)]
mod tests;
