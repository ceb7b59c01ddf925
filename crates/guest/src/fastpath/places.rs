//! The places in the code of the fast path ([`super::code`]): where each call begins, and the stages in
//! which a thread may be stopped there.

#![allow(unsafe_code, reason = "the code is assembly")]

use super::code::{CALL, MAX_RECORDS};

unsafe extern "C" {
    static tern_fastpath_begin: u8;
    static tern_fastpath_read: u8;
    static tern_fastpath_read_copies: u8;
    static tern_fastpath_read_done: u8;
    static tern_fastpath_pread: u8;
    static tern_fastpath_pread_copies: u8;
    static tern_fastpath_pread_done: u8;
    static tern_fastpath_lseek: u8;
    static tern_fastpath_lseek_claims: u8;
    static tern_fastpath_lseek_done: u8;
    static tern_fastpath_write: u8;
    static tern_fastpath_write_copies: u8;
    static tern_fastpath_write_done: u8;
    static tern_fastpath_selects: u8;
    static tern_fastpath_epoll_pwait: u8;
    static tern_fastpath_epoll_wait: u8;
    static tern_fastpath_times: u8;
    static tern_fastpath_timed: u8;
    static tern_fastpath_timed_end: u8;
    static tern_fastpath_poll: u8;
    static tern_fastpath_poll_reads: u8;
    static tern_fastpath_pselect: u8;
    static tern_fastpath_select: u8;
    static tern_fastpath_select_reads: u8;
    static tern_fastpath_pwrite: u8;
    static tern_fastpath_clock: u8;
    static tern_fastpath_clock_sums: u8;
    static tern_fastpath_clock_done: u8;
    static tern_fastpath_restore: u8;
    static tern_fastpath_reload: u8;
    static tern_fastpath_fall_back: u8;
    static tern_fastpath_end: u8;
}

/// Where in the code a thread is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// A record of the site is in rcx. All other registers are the program's, except r11.
    Selects,
    /// The site's record is in rcx. All other registers are the program's, except rax and r11.
    Checks,
    /// As [`Self::Checks`], reading the program's memory or the time.
    Reads,
    /// As [`Self::Checks`], but the program's rdx is in r11.
    Times,
    /// The record is in the table. All registers are the program's, except rax, rcx and r11.
    Claims,
    /// As [`Self::Claims`], but rdi and rsi are saved in the table.
    Copies,
    /// The record is in the table, and only the return is left.
    Done,
    /// At the `syscall` of the record with this number.
    Calls(usize),
    /// Behind it: the kernel has made the call. It is complete, but for the CPU time the addition is
    /// missing.
    Returned(usize),
}

impl Stage {
    /// Whether the code may fault here: it uses the program's buffers, or reads the time, which the
    /// program may have forbidden.
    pub(crate) fn may_fault(self) -> bool {
        matches!(self, Self::Copies | Self::Reads)
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

/// The offset in the code at which a call's body begins.
pub(crate) fn entry(nr: u32) -> Option<u64> {
    Some(match i64::from(nr) {
        libc::SYS_read => offset(&raw const tern_fastpath_read),
        libc::SYS_pread64 => offset(&raw const tern_fastpath_pread),
        libc::SYS_lseek => offset(&raw const tern_fastpath_lseek),
        libc::SYS_write => offset(&raw const tern_fastpath_write),
        libc::SYS_pwrite64
        | libc::SYS_readv
        | libc::SYS_writev
        | libc::SYS_recvfrom
        | libc::SYS_sendto
        | libc::SYS_recvmsg
        | libc::SYS_sendmsg => offset(&raw const tern_fastpath_pwrite),
        libc::SYS_epoll_pwait if can_read_fs_base() => offset(&raw const tern_fastpath_epoll_pwait),
        libc::SYS_epoll_wait if can_read_fs_base() => offset(&raw const tern_fastpath_epoll_wait),
        libc::SYS_poll if can_read_fs_base() => offset(&raw const tern_fastpath_poll),
        libc::SYS_select => offset(&raw const tern_fastpath_select),
        libc::SYS_pselect6 => offset(&raw const tern_fastpath_pselect),
        libc::SYS_clock_gettime => offset(&raw const tern_fastpath_clock),
        _ => return None,
    })
}

/// The processor's time stamp counter, which the code reads as well.
pub(super) fn time_stamp_counter() -> u64 {
    // SAFETY: the instruction only sets registers. Tern's programs do not forbid it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Whether this node's programs may execute `rdfsbase`, as the code for waits does (Intel since 2012,
/// AMD since 2015).
fn can_read_fs_base() -> bool {
    const FSGSBASE: u64 = 1 << 1;
    // SAFETY: reads a value that the kernel has given to this program.
    unsafe { libc::getauxval(libc::AT_HWCAP2) & FSGSBASE != 0 }
}

/// The offset in the code at which the `syscall` of a record is.
pub(crate) fn call(record: usize) -> u64 {
    record as u64 * CALL
}

/// The entry for a site that makes calls of several numbers.
pub(crate) fn selects() -> u64 {
    offset(&raw const tern_fastpath_selects)
}

/// Where the code continues when the kernel has read the CPU time.
pub(crate) fn clock_sums() -> u64 {
    offset(&raw const tern_fastpath_clock_sums)
}

/// The stage of a thread whose next instruction is at this offset; none if that is not in the code.
pub(crate) fn stage(at: u64) -> Option<Stage> {
    let record = (at / CALL) as usize;
    if record < MAX_RECORDS {
        return Some(if at.is_multiple_of(CALL) { Stage::Calls(record) } else { Stage::Returned(record) });
    }
    let parts = [
        (offset(&raw const tern_fastpath_selects), Stage::Selects),
        (offset(&raw const tern_fastpath_read), Stage::Checks),
        (offset(&raw const tern_fastpath_read_copies), Stage::Copies),
        (offset(&raw const tern_fastpath_read_done), Stage::Done),
        (offset(&raw const tern_fastpath_pread), Stage::Checks),
        (offset(&raw const tern_fastpath_pread_copies), Stage::Copies),
        (offset(&raw const tern_fastpath_pread_done), Stage::Done),
        (offset(&raw const tern_fastpath_lseek), Stage::Checks),
        (offset(&raw const tern_fastpath_lseek_claims), Stage::Claims),
        (offset(&raw const tern_fastpath_lseek_done), Stage::Done),
        (offset(&raw const tern_fastpath_write), Stage::Checks),
        (offset(&raw const tern_fastpath_write_copies), Stage::Copies),
        (offset(&raw const tern_fastpath_write_done), Stage::Done),
        (offset(&raw const tern_fastpath_clock), Stage::Checks),
        (offset(&raw const tern_fastpath_times), Stage::Reads),
        (offset(&raw const tern_fastpath_timed), Stage::Times),
        (offset(&raw const tern_fastpath_timed_end), Stage::Checks),
        (offset(&raw const tern_fastpath_poll_reads), Stage::Reads),
        (offset(&raw const tern_fastpath_pselect), Stage::Checks),
        (offset(&raw const tern_fastpath_select_reads), Stage::Reads),
        (offset(&raw const tern_fastpath_pwrite), Stage::Checks),
        (offset(&raw const tern_fastpath_clock_sums), Stage::Claims),
        (offset(&raw const tern_fastpath_clock_done), Stage::Done),
        (offset(&raw const tern_fastpath_restore), Stage::Copies),
        (offset(&raw const tern_fastpath_reload), Stage::Claims),
        (offset(&raw const tern_fastpath_fall_back), Stage::Checks),
    ];
    let part = parts.iter().rev().find(|(from, _)| *from <= at).map(|(_, stage)| *stage);
    part.filter(|_| at < offset(&raw const tern_fastpath_end))
}
