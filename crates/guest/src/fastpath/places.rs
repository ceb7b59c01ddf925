//! The places in the code of the fast path ([`super::code`]): where each call begins, and the stages in
//! which a thread may be stopped there.

#![allow(unsafe_code, reason = "the code is assembly")]

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
    /// As [`Self::Checks`], reading the program's memory or the time.
    Reads,
    /// As [`Self::Checks`], but the program's rdx is in r11.
    Times,
    /// Only the return is left.
    Done,
    /// The kernel has made the call. It is complete, but for the CPU time the addition is missing.
    Returned,
    /// Only the jump to the program's own `syscall` is left.
    FallsBack,
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

/// The offset in the code at which a call's body begins; `thread_flag` selects the body that tests
/// the thread flag first.
pub(crate) fn entry(nr: u32, thread_flag: bool) -> Option<u64> {
    Some(match i64::from(nr) {
        libc::SYS_read if thread_flag => 0,
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
        libc::SYS_epoll_wait => offset(&raw const tern_fastpath_epoll_wait),
        libc::SYS_poll => offset(&raw const tern_fastpath_poll),
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
        (offset(&raw const tern_fastpath_epoll_wait), Stage::Entry),
        (offset(&raw const tern_fastpath_epoll_wait) + 1, Stage::Checks),
        (offset(&raw const tern_fastpath_times), Stage::Reads),
        (offset(&raw const tern_fastpath_timed), Stage::Times),
        (offset(&raw const tern_fastpath_timed_end), Stage::Checks),
        (offset(&raw const tern_fastpath_poll), Stage::Entry),
        (offset(&raw const tern_fastpath_poll) + 1, Stage::Checks),
        (offset(&raw const tern_fastpath_poll_reads), Stage::Reads),
        (offset(&raw const tern_fastpath_pselect), Stage::Entry),
        (offset(&raw const tern_fastpath_pselect) + 1, Stage::Checks),
        (offset(&raw const tern_fastpath_select), Stage::Entry),
        (offset(&raw const tern_fastpath_select) + 1, Stage::Checks),
        (offset(&raw const tern_fastpath_select_reads), Stage::Reads),
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
