//! Pending signals of a process whose signal actions are restored at home.

use crate::apply::InjectedSpace;
use crate::process::{Action, set_signal_action};
use crate::reserve::Reserve;
use tern_tracee::siginfo::Siginfo;
use tern_tracee::{Memory, Result};

/// Maximum number of pending signals that are kept. A user may have some thousands
/// (RLIMIT_SIGPENDING), of which a program lets one signal collect a few.
const MAX_KEPT: usize = 10_000;

/// Sets an action that ignores the signal, and keeps the pending signals of that number. The kernel
/// discards them when a program sets such an action, and home did so then. It does not discard them
/// when it resets the action itself, as a handler with SA_RESETHAND is invoked, which has happened at
/// the guest only.
///
/// Those of threads other than the injected one are not kept.
///
/// # Errors
/// If the process is gone.
pub(crate) fn set_ignoring_action(
    space: &mut dyn InjectedSpace,
    memory: &Memory,
    reserve: Reserve,
    signal: u64,
    action: &Action,
) -> Result<()> {
    let (set, no_time) = (reserve.scratch(), reserve.scratch() + 8);
    let info_at = reserve.scratch() + 64;
    let mut pending = Vec::new();
    memory.write_forced(set, &(1u64 << (signal - 1)).to_le_bytes())?;
    memory.write_forced(no_time, &[0; 16])?;
    let take = [set, info_at, no_time, 8, 0, 0];
    while pending.len() < MAX_KEPT
        && space.injection().call(libc::SYS_rt_sigtimedwait, take)? == signal.cast_signed()
    {
        let mut info: Siginfo = [0; 128];
        memory.read(info_at, &mut info)?;
        pending.push(info);
    }
    set_signal_action(space, memory, reserve, signal, action)?;
    if !pending.is_empty() {
        let pid = space.call("read its pid", libc::SYS_getpid, [0; 6])?;
        for info in pending {
            memory.write_forced(info_at, &info)?;
            let queue = [pid, signal, info_at, 0, 0, 0];
            let _full_queue_loses_it = space.injection().call(libc::SYS_rt_sigqueueinfo, queue)?;
        }
    }
    Ok(())
}
