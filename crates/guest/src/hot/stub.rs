//! The code in a guest that makes calls on lent files (`hot.rs`), and what is to become of a thread that is stopped in it.
//!
//! It is position-independent, lies at [`CODE`] in our range, and knows its table at [`TABLE`]:
//!
//! ```text
//!   0  kinds of the two slots, a byte each: 0 not lent, 1 read, 2 written
//!   2  a bit for each descriptor below 40: the file is the guest's own, its kernel makes the call
//!   7  1: the time is told
//!   8  rdi, 16 rsi: the program's, while it copies
//!  24  the record of the site that it came from
//!  32  rcx, 48 rax: the program's, while it asks for threads; 40 where to then
//!  64  a slot: descriptor (u32), +8 offset, +16 where its bytes begin in the file, +24 and end, +32 their address,
//!      +40 where the last pread ended
//! 128  the other one
//! 176  seconds, 184 nanoseconds (below a second) that the process has used on top of what the guest's kernel has counted
//! 192  records: +0 entry, +8 the flag that says "one thread", +16 where to if not, +24 the `syscall`, +32 behind it, +40 its number
//! ```
//! A site comes here with its record in rax. Only rax, rcx and r11 are free, as with a `syscall`; the flags are, because only
//! sites are taken behind whose `syscall` they are set anew. The stack, with its red zone, and all other registers are not
//! touched: bytes are copied by `rep movsb`.
//!
//! What it does becomes true with one store, the last of each body: the new offset. Whoever is stopped before it has not begun
//! ([`leave`]); behind it there is only the way back. A call on a file of the guest's own is made by the one `syscall` here, which the filter
//! lets through; stopped in front of it the thread has not begun, and behind it the registers are those behind the program's own `syscall`,
//! also when the kernel is to make it again: it then goes back by the two bytes of that one.
//!
//! The process's CPU time is asked of the guest's kernel by the same `syscall`, and what is missing is added to what it has said. Until both words
//! are there the thread has not begun.

#![allow(unsafe_code, reason = "the code of the stub is assembly")]

/// Where the code lies in our range: behind the `syscall` for injected calls, before the code of errands.
pub(crate) const CODE: u64 = 256;
/// Where the table lies in our range.
pub(crate) const TABLE: u64 = 8192;
/// Places in the table.
pub(crate) const KEPT_RDI: usize = 8;
pub(crate) const KEPT_RSI: usize = 16;
pub(crate) const FROM: usize = 24;
pub(crate) const KEPT_RCX: usize = 32;
pub(crate) const KEPT_RAX: usize = 48;
pub(crate) const SLOTS: usize = 64;
pub(crate) const SLOT: usize = 64;
pub(crate) const RECORDS: usize = 192;
pub(crate) const RECORD: usize = 48;
/// Kinds of slots.
pub(crate) const READ: u8 = 1;
pub(crate) const WRITTEN: u8 = 2;
/// Descriptors below this may be the guest's own: a bit each, behind the two kinds.
pub(crate) const MOST_NEAR: i32 = 40;
/// Whether the time is told, and what is to be added.
pub(crate) const CLOCK: usize = 7;
pub(crate) const MORE: usize = 176;

std::arch::global_asm!(
    ".pushsection .rodata",
    ".balign 16",
    ".globl tern_hot_begin, tern_hot_kept, tern_hot_read, tern_hot_read_copies, tern_hot_read_done",
    ".globl tern_hot_pread, tern_hot_pread_copies, tern_hot_pread_done, tern_hot_lseek, tern_hot_lseek_done",
    ".globl tern_hot_write, tern_hot_write_copies, tern_hot_write_done, tern_hot_mend, tern_hot_slow, tern_hot_end",
    ".globl tern_hot_pwrite, tern_hot_native_done, tern_hot_clock, tern_hot_clock_sums, tern_hot_clock_done",
    ".set .Lhot_table, .Lhot_begin + {table}",
    "tern_hot_begin:",
    ".Lhot_begin:",
    // read, where the program asks before it whether it has one thread. If not, all is as it was.
    "mov [rip + .Lhot_table + 24], rax",
    "mov [rip + .Lhot_table + 32], rcx",
    "tern_hot_kept:",
    "mov rcx, [rax + 16]",
    "mov [rip + .Lhot_table + 40], rcx",
    "mov rcx, [rax + 8]",
    "cmp byte ptr [rcx], 0",
    "mov rcx, [rip + .Lhot_table + 32]",
    "mov rax, [rip + .Lhot_table + 48]",
    "jne 20f",
    "jmp qword ptr [rip + .Lhot_table + 40]",
    // read
    "tern_hot_read:",
    "mov [rip + .Lhot_table + 24], rax",
    "20: cmp edi, [rip + .Lhot_table + 64]",
    "jne 21f",
    "lea r11, [rip + .Lhot_table + 64]",
    "cmp byte ptr [rip + .Lhot_table], 1",
    "jmp 22f",
    "21: cmp edi, [rip + .Lhot_table + 128]",
    "jne tern_hot_other",
    "lea r11, [rip + .Lhot_table + 128]",
    "cmp byte ptr [rip + .Lhot_table + 1], 1",
    "22: jne tern_hot_other",
    "mov [rip + .Lhot_table + 8], rdi",
    "mov [rip + .Lhot_table + 16], rsi",
    "tern_hot_read_copies:",
    "lea rcx, [rdx - 1]",
    "cmp rcx, {most}",
    "jae tern_hot_mend",
    "mov rdi, rsi",
    "mov rsi, [r11 + 8]",
    "lea rax, [rsi + rdx]",
    "cmp rax, [r11 + 24]",
    "ja tern_hot_mend",
    "sub rsi, [r11 + 16]",
    "jb tern_hot_mend",
    "add rsi, [r11 + 32]",
    "mov rcx, rdx",
    "rep movsb",
    "mov rdi, [rip + .Lhot_table + 8]",
    "mov rsi, [rip + .Lhot_table + 16]",
    "mov rcx, rax",
    "mov rax, rdx",
    "mov [r11 + 8], rcx",
    "tern_hot_read_done:",
    "mov rcx, [rip + .Lhot_table + 24]",
    "jmp qword ptr [rcx + 32]",
    // pread
    "tern_hot_pread:",
    "mov [rip + .Lhot_table + 24], rax",
    "cmp edi, [rip + .Lhot_table + 64]",
    "jne 31f",
    "lea r11, [rip + .Lhot_table + 64]",
    "cmp byte ptr [rip + .Lhot_table], 1",
    "jmp 32f",
    "31: cmp edi, [rip + .Lhot_table + 128]",
    "jne tern_hot_other",
    "lea r11, [rip + .Lhot_table + 128]",
    "cmp byte ptr [rip + .Lhot_table + 1], 1",
    "32: jne tern_hot_other",
    "mov [rip + .Lhot_table + 8], rdi",
    "mov [rip + .Lhot_table + 16], rsi",
    "tern_hot_pread_copies:",
    "lea rcx, [rdx - 1]",
    "cmp rcx, {most}",
    "jae tern_hot_mend",
    "mov rdi, rsi",
    "mov rsi, r10",
    "mov rax, r10",
    "add rax, rdx",
    "jc tern_hot_mend",
    "cmp rax, [r11 + 24]",
    "ja tern_hot_mend",
    "sub rsi, [r11 + 16]",
    "jb tern_hot_mend",
    "add rsi, [r11 + 32]",
    "mov rcx, rdx",
    "rep movsb",
    "mov rdi, [rip + .Lhot_table + 8]",
    "mov rsi, [rip + .Lhot_table + 16]",
    "mov [r11 + 40], rax",
    "mov rax, rdx",
    "tern_hot_pread_done:",
    "mov rcx, [rip + .Lhot_table + 24]",
    "jmp qword ptr [rcx + 32]",
    // lseek to a place, or from where it is. What is written must stay in one piece: there it can only be asked for.
    "tern_hot_lseek:",
    "mov [rip + .Lhot_table + 24], rax",
    "cmp edi, [rip + .Lhot_table + 64]",
    "jne 41f",
    "lea r11, [rip + .Lhot_table + 64]",
    "movzx ecx, byte ptr [rip + .Lhot_table]",
    "jmp 42f",
    "41: cmp edi, [rip + .Lhot_table + 128]",
    "jne tern_hot_other",
    "lea r11, [rip + .Lhot_table + 128]",
    "movzx ecx, byte ptr [rip + .Lhot_table + 1]",
    "42: test ecx, ecx",
    "jz tern_hot_other",
    "mov rax, rsi",
    "cmp edx, 1",
    "ja tern_hot_slow",
    "jb 43f",
    "add rax, [r11 + 8]",
    "43: cmp ecx, 1",
    "je 44f",
    "cmp rax, [r11 + 8]",
    "jne tern_hot_slow",
    "44: mov rcx, rax",
    "shr rcx, {far}",
    "jnz tern_hot_slow",
    "mov [r11 + 8], rax",
    "tern_hot_lseek_done:",
    "mov rcx, [rip + .Lhot_table + 24]",
    "jmp qword ptr [rcx + 32]",
    // write
    "tern_hot_write:",
    "mov [rip + .Lhot_table + 24], rax",
    "cmp edi, [rip + .Lhot_table + 64]",
    "jne 51f",
    "lea r11, [rip + .Lhot_table + 64]",
    "cmp byte ptr [rip + .Lhot_table], 2",
    "jmp 52f",
    "51: cmp edi, [rip + .Lhot_table + 128]",
    "jne tern_hot_other",
    "lea r11, [rip + .Lhot_table + 128]",
    "cmp byte ptr [rip + .Lhot_table + 1], 2",
    "52: jne tern_hot_other",
    "mov [rip + .Lhot_table + 8], rdi",
    "mov [rip + .Lhot_table + 16], rsi",
    "tern_hot_write_copies:",
    "lea rcx, [rdx - 1]",
    "cmp rcx, {most}",
    "jae tern_hot_mend",
    "mov rdi, [r11 + 8]",
    "lea rax, [rdi + rdx]",
    "cmp rax, [r11 + 24]",
    "ja tern_hot_mend",
    "sub rdi, [r11 + 16]",
    "jb tern_hot_mend",
    "add rdi, [r11 + 32]",
    "mov rcx, rdx",
    "rep movsb",
    "mov rdi, [rip + .Lhot_table + 8]",
    "mov rsi, [rip + .Lhot_table + 16]",
    "mov rcx, rax",
    "mov rax, rdx",
    "mov [r11 + 8], rcx",
    "tern_hot_write_done:",
    "mov rcx, [rip + .Lhot_table + 24]",
    "jmp qword ptr [rcx + 32]",
    // clock_gettime, of the process's CPU time.
    "tern_hot_clock:",
    "mov [rip + .Lhot_table + 24], rax",
    "cmp edi, {process}",
    "jne tern_hot_slow",
    "cmp byte ptr [rip + .Lhot_table + 7], 1",
    "jne tern_hot_slow",
    "jmp 61f",
    // pwrite: nothing of it is lent.
    "tern_hot_pwrite:",
    "mov [rip + .Lhot_table + 24], rax",
    // Nothing is lent of this one. It may be the guest's own: then the call is made, here.
    "tern_hot_other:",
    "cmp edi, {near}",
    "jae tern_hot_slow",
    "lea ecx, [rdi + 16]",
    "mov r11, [rip + .Lhot_table]",
    "bt r11, rcx",
    "jnc tern_hot_slow",
    "61: mov rcx, [rip + .Lhot_table + 24]",
    "mov rax, [rcx + 40]",
    "syscall",
    "tern_hot_native_done:",
    "mov rcx, [rip + .Lhot_table + 24]",
    "cmp dword ptr [rcx + 40], {clock}",
    "je tern_hot_clock_sums",
    "jmp qword ptr [rcx + 32]",
    "tern_hot_clock_sums:",
    "test eax, eax",
    "jnz tern_hot_clock_done",
    "mov rcx, [rsi]",
    "mov r11, [rsi + 8]",
    "add rcx, [rip + .Lhot_table + 176]",
    "add r11, [rip + .Lhot_table + 184]",
    "cmp r11, 1000000000",
    "jb 62f",
    "sub r11, 1000000000",
    "inc rcx",
    "62: mov [rsi], rcx",
    "mov [rsi + 8], r11",
    "tern_hot_clock_done:",
    "mov rcx, [rip + .Lhot_table + 24]",
    "jmp qword ptr [rcx + 32]",
    // Not here: to the program's own `syscall`.
    "tern_hot_mend:",
    "mov rdi, [rip + .Lhot_table + 8]",
    "mov rsi, [rip + .Lhot_table + 16]",
    "tern_hot_slow:",
    "mov rcx, [rip + .Lhot_table + 24]",
    "mov rax, [rcx + 40]",
    "jmp qword ptr [rcx + 24]",
    "tern_hot_end:",
    ".popsection",
    table = const TABLE - CODE,
    most = const tern_migrate::message::MOST_IN_HAND,
    far = const crate::direct::FAR_BITS,
    near = const MOST_NEAR,
    process = const libc::CLOCK_PROCESS_CPUTIME_ID,
    clock = const libc::SYS_clock_gettime,
);

unsafe extern "C" {
    static tern_hot_begin: u8;
    static tern_hot_kept: u8;
    static tern_hot_read: u8;
    static tern_hot_read_copies: u8;
    static tern_hot_read_done: u8;
    static tern_hot_pread: u8;
    static tern_hot_pread_copies: u8;
    static tern_hot_pread_done: u8;
    static tern_hot_lseek: u8;
    static tern_hot_lseek_done: u8;
    static tern_hot_write: u8;
    static tern_hot_write_copies: u8;
    static tern_hot_write_done: u8;
    static tern_hot_pwrite: u8;
    static tern_hot_native_done: u8;
    static tern_hot_clock: u8;
    static tern_hot_clock_sums: u8;
    static tern_hot_clock_done: u8;
    static tern_hot_mend: u8;
    static tern_hot_slow: u8;
    static tern_hot_end: u8;
}

/// Where in the code a thread is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// At the first instruction of a body; its record is in rax.
    Enters,
    /// Asks whether there is one thread; whether rcx is kept by now.
    Asks(bool),
    /// Its registers are the program's, but for the three.
    Looks,
    /// Two more are kept in the table.
    Copies,
    /// Only the way back is left.
    Done,
    /// The kernel has made the call. Of a file of the guest's own that is all; of the time a part is missing.
    Returned,
    /// Only the way to the program's own `syscall` is left.
    Slow,
}

fn offset(of: *const u8) -> u64 {
    of.addr() as u64 - (&raw const tern_hot_begin).addr() as u64
}

/// The code.
pub(crate) fn code() -> &'static [u8] {
    let len = offset(&raw const tern_hot_end) as usize;
    // SAFETY: the symbols enclose the code above, which lies in read-only memory of this program.
    unsafe { std::slice::from_raw_parts(&raw const tern_hot_begin, len) }
}

/// The offset in the code at which a call's body begins; `asks` for the one that asks for threads first.
pub(crate) fn entry(nr: u32, asks: bool) -> Option<u64> {
    Some(match i64::from(nr) {
        libc::SYS_read if asks => 0,
        libc::SYS_read => offset(&raw const tern_hot_read),
        libc::SYS_pread64 => offset(&raw const tern_hot_pread),
        libc::SYS_lseek => offset(&raw const tern_hot_lseek),
        libc::SYS_write => offset(&raw const tern_hot_write),
        libc::SYS_pwrite64 => offset(&raw const tern_hot_pwrite),
        libc::SYS_clock_gettime => offset(&raw const tern_hot_clock),
        _ => return None,
    })
}

/// The offset behind the one `syscall` in the code.
pub(crate) fn behind_native() -> u64 {
    offset(&raw const tern_hot_native_done)
}

/// What a thread does that is to execute the instruction at this offset; nothing if that is not in the code.
pub(crate) fn stage(at: u64) -> Option<Stage> {
    let parts = [
        (0, Stage::Enters),
        (1, Stage::Asks(false)),
        (offset(&raw const tern_hot_kept), Stage::Asks(true)),
        (offset(&raw const tern_hot_read), Stage::Enters),
        (offset(&raw const tern_hot_read) + 1, Stage::Looks),
        (offset(&raw const tern_hot_read_copies), Stage::Copies),
        (offset(&raw const tern_hot_read_done), Stage::Done),
        (offset(&raw const tern_hot_pread), Stage::Enters),
        (offset(&raw const tern_hot_pread) + 1, Stage::Looks),
        (offset(&raw const tern_hot_pread_copies), Stage::Copies),
        (offset(&raw const tern_hot_pread_done), Stage::Done),
        (offset(&raw const tern_hot_lseek), Stage::Enters),
        (offset(&raw const tern_hot_lseek) + 1, Stage::Looks),
        (offset(&raw const tern_hot_lseek_done), Stage::Done),
        (offset(&raw const tern_hot_write), Stage::Enters),
        (offset(&raw const tern_hot_write) + 1, Stage::Looks),
        (offset(&raw const tern_hot_write_copies), Stage::Copies),
        (offset(&raw const tern_hot_write_done), Stage::Done),
        (offset(&raw const tern_hot_clock), Stage::Enters),
        (offset(&raw const tern_hot_clock) + 1, Stage::Looks),
        (offset(&raw const tern_hot_pwrite), Stage::Enters),
        (offset(&raw const tern_hot_pwrite) + 1, Stage::Looks),
        (offset(&raw const tern_hot_native_done), Stage::Returned),
        (offset(&raw const tern_hot_clock_sums), Stage::Looks),
        (offset(&raw const tern_hot_clock_done), Stage::Done),
        (offset(&raw const tern_hot_mend), Stage::Copies),
        (offset(&raw const tern_hot_slow), Stage::Slow),
    ];
    let part = parts.iter().rev().find(|(from, _)| *from <= at).map(|(_, stage)| *stage);
    part.filter(|_| at < offset(&raw const tern_hot_end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_fits_where_it_goes() {
        assert!(CODE + (code().len() as u64) < tern_tracee::PAGE / 2, "{} bytes", code().len());
        let calls: Vec<usize> = (2..code().len()).filter(|at| code()[at - 2..*at] == [0x0f, 0x05]).collect();
        assert_eq!(calls, [behind_native() as usize], "it makes one call by itself");
    }

    #[test]
    fn every_place_has_its_stage() {
        use libc::{SYS_clock_gettime, SYS_lseek, SYS_pread64, SYS_pwrite64, SYS_read, SYS_write};
        for nr in [SYS_pread64, SYS_lseek, SYS_write, SYS_pwrite64, SYS_read, SYS_clock_gettime] {
            let entry = entry(nr as u32, false).unwrap();
            assert_eq!((stage(entry), stage(entry + 7)), (Some(Stage::Enters), Some(Stage::Looks)));
        }
        assert_eq!(entry(libc::SYS_close as u32, false), None);
        assert_eq!((stage(0), stage(7)), (Some(Stage::Enters), Some(Stage::Asks(false))));
        let len = code().len() as u64;
        assert_eq!((stage(len - 1), stage(len)), (Some(Stage::Slow), None));
    }
}
