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
//!  24  the record of the site that the thread came from
//!  32  rcx, 48 rax: the program's, while the code tests the thread flag
//!  40  the branch target for several threads, meanwhile
//!  56  1: the code has made a call on a local file or connection
//!  64  a slot: descriptor (u32), +8 offset, +16 and +24 start and end of its bytes in the file,
//!      +32 address of the bytes, +40 where the last pread ended
//! 128  the other slot
//! 176  seconds, 184 nanoseconds (below a second) to add to the CPU time counted by the guest's
//!      kernel
//! 192  records: +0 entry, +8 address of the thread flag, +16 branch target for several threads,
//!      +24 address of the `syscall`, +32 address behind it, +40 number of the call
//! 1024 a bit for each descriptor: the guest's kernel makes calls that transfer data
//! 1152 the same for calls that wait for an epoll set
//! 1280 the same for descriptors that poll and select wait for
//! 1408 a bit for each connection
//! 1536 the time stamp counter when the last wait with a limit began
//! ```
//! A site jumps here with its record in rax. Only rax, rcx and r11 may be changed, as by a
//! `syscall`, and the flags, because a site is patched only if the code behind its `syscall` sets
//! them anew. The stack with its red zone, and all other registers, are preserved: bytes are copied
//! by `rep movsb`.
//!
//! An operation takes effect with one store, the last of each body: the new offset, or the end of a
//! pread. A thread that is stopped before the store has not begun ([`stage`](super::places::stage)); after it only the
//! return is left. Calls on local files and connections are made by the only `syscall` here, which the
//! filter lets through. A thread that is stopped before this `syscall` has not begun. A thread that is stopped
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
/// The offset of the flag for published sets of descriptors, and of these sets.
pub(crate) const NATIVE: usize = 2;
pub(crate) const DESCRIPTOR_SETS: usize = 1024;
/// Number of descriptors in a set.
pub(crate) const MAX_DESCRIPTORS: usize = 1024;
/// The offset of the time at which the last wait began.
pub(crate) const WAIT_BEGAN: usize = DESCRIPTOR_SETS + 4 * MAX_DESCRIPTORS / 8;
/// The offset of the flag for a call that was made.
pub(crate) const CALL_MADE: usize = 56;
/// The offsets of the flag for a published CPU time, and of the time to add.
pub(crate) const CLOCK: usize = 7;
pub(crate) const CLOCK_OFFSET: usize = 176;

std::arch::global_asm!(
    ".pushsection .rodata",
    ".balign 16",
    ".globl tern_fastpath_begin, tern_fastpath_saved, tern_fastpath_read, tern_fastpath_read_copies, tern_fastpath_read_done",
    ".globl tern_fastpath_pread, tern_fastpath_pread_copies, tern_fastpath_pread_done, tern_fastpath_lseek, tern_fastpath_lseek_done",
    ".globl tern_fastpath_write, tern_fastpath_write_copies, tern_fastpath_write_done, tern_fastpath_restore, tern_fastpath_fall_back, tern_fastpath_end",
    ".globl tern_fastpath_epoll_wait, tern_fastpath_times, tern_fastpath_timed, tern_fastpath_timed_end, tern_fastpath_poll, tern_fastpath_poll_reads",
    ".globl tern_fastpath_pselect, tern_fastpath_select, tern_fastpath_select_reads",
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
    // epoll_wait
    "tern_fastpath_epoll_wait:",
    "mov [rip + .Lfastpath_table + 24], rax",
    "cmp edi, {max_descriptors}",
    "jae tern_fastpath_fall_back",
    "cmp byte ptr [rip + .Lfastpath_table + 2], 1",
    "jne tern_fastpath_fall_back",
    "mov eax, edi",
    "bt dword ptr [rip + .Lfastpath_table + 1152], eax",
    "jnc tern_fastpath_fall_back",
    // The wait begins: records the time. The program may have forbidden rdtsc.
    "tern_fastpath_times:",
    "mov r11, rdx",
    "rdtsc",
    "tern_fastpath_timed:",
    "shl rdx, 32",
    "or rax, rdx",
    "mov [rip + .Lfastpath_table + 1536], rax",
    "mov rdx, r11",
    "tern_fastpath_timed_end:",
    "jmp 60f",
    // poll of up to 64 descriptors, at least one of them a connection
    "tern_fastpath_poll:",
    "mov [rip + .Lfastpath_table + 24], rax",
    "cmp byte ptr [rip + .Lfastpath_table + 2], 1",
    "jne tern_fastpath_fall_back",
    "lea ecx, [rsi - 1]",
    "cmp ecx, 63",
    "ja tern_fastpath_fall_back",
    "xor r11d, r11d",
    "tern_fastpath_poll_reads:",
    "71: mov eax, [rdi + 8 * rcx]",
    "cmp eax, {max_descriptors}",
    "jae tern_fastpath_fall_back",
    "bt dword ptr [rip + .Lfastpath_table + 1280], eax",
    "jnc tern_fastpath_fall_back",
    "bt dword ptr [rip + .Lfastpath_table + 1408], eax",
    "adc r11d, 0",
    "sub ecx, 1",
    "jns 71b",
    "test r11d, r11d",
    "jz tern_fastpath_fall_back",
    "jmp tern_fastpath_times",
    // pselect without a mask, and select, of up to 64 descriptors, at least one of them a
    // connection
    "tern_fastpath_pselect:",
    "mov [rip + .Lfastpath_table + 24], rax",
    "test r9, r9",
    "jnz tern_fastpath_fall_back",
    "jmp 81f",
    "tern_fastpath_select:",
    "mov [rip + .Lfastpath_table + 24], rax",
    "81: cmp byte ptr [rip + .Lfastpath_table + 2], 1",
    "jne tern_fastpath_fall_back",
    "lea ecx, [rdi - 1]",
    "cmp ecx, 63",
    "ja tern_fastpath_fall_back",
    // r11: the descriptors that it may not name. rax: the connections.
    "mov ecx, 64",
    "sub ecx, edi",
    "mov rax, -1",
    "shr rax, cl",
    "mov r11, [rip + .Lfastpath_table + 1280]",
    "not r11",
    "and r11, rax",
    "and rax, [rip + .Lfastpath_table + 1408]",
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
    "mov [rip + .Lfastpath_table + 24], rax",
    // This file is not published. If it is local or a connection, the call is made here.
    "tern_fastpath_other:",
    "cmp edi, {max_descriptors}",
    "jae tern_fastpath_fall_back",
    "cmp byte ptr [rip + .Lfastpath_table + 2], 1",
    "jne tern_fastpath_fall_back",
    "mov eax, edi",
    "bt dword ptr [rip + .Lfastpath_table + 1024], eax",
    "jnc tern_fastpath_fall_back",
    "60: mov byte ptr [rip + .Lfastpath_table + 56], 1",
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
    max_descriptors = const MAX_DESCRIPTORS,
    process = const libc::CLOCK_PROCESS_CPUTIME_ID,
    clock = const libc::SYS_clock_gettime,
);

#[cfg(test)]
mod tests;
