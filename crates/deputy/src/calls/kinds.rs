//! Kinds of calls, by number and flags.

use tern_syscall::{Arg, Call};

/// Whether this clone is to create a thread.
pub(crate) fn creates_thread(call: &Call) -> bool {
    let wanted = libc::CLONE_THREAD as u64;
    i64::from(call.nr) == libc::SYS_clone && matches!(call.args[0], Arg::Value(flags) if flags & wanted != 0)
}

/// Whether this call is to create a process.
pub(crate) fn creates_process(call: &Call) -> bool {
    [libc::SYS_fork, libc::SYS_vfork, libc::SYS_clone].contains(&i64::from(call.nr)) && !creates_thread(call)
}

/// Whether this call is to create a child that runs in its parent's memory.
pub(crate) fn puts_child_in_parent_memory(call: &Call) -> bool {
    let wanted = libc::CLONE_VM as u64;
    match i64::from(call.nr) {
        libc::SYS_vfork => true,
        libc::SYS_clone => matches!(call.args[0], Arg::Value(flags) if flags & wanted != 0),
        _ => false,
    }
}

/// Whether a call has a part at home and a part at the guest.
pub(super) fn is_split_call(nr: u32) -> bool {
    let two = [libc::SYS_mmap, libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn];
    let forks = [libc::SYS_clone3, libc::SYS_vfork];
    two.contains(&i64::from(nr)) || forks.contains(&i64::from(nr)) || forks_or_exits(nr)
}

pub(crate) fn forks_or_exits(nr: u32) -> bool {
    let nr = i64::from(nr);
    let ends = [libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group];
    [libc::SYS_fork, libc::SYS_clone].contains(&nr) || ends.contains(&nr)
}

/// Whether this may be an internal call of a guest shim. Such a call is made at once, and its
/// result is awaited before the process departs.
pub(crate) fn may_be_internal_call(nr: u32) -> bool {
    [libc::SYS_pread64, libc::SYS_lseek].contains(&i64::from(nr))
}
