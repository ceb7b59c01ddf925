//! The resource limits on memory, which are sent with a process and set where its memory is.

use crate::reserve::Reserve;
use serde::{Deserialize, Serialize};
use tern_tracee::{Result, limit, procfs};

/// A resource limit, as in prlimit(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// RLIMIT_…
    pub resource: u32,
    /// The limit in force.
    pub soft: u64,
    /// The maximum to which the process may raise it.
    pub hard: u64,
}

/// The limits that are sent.
const MIGRATED_LIMITS: [u32; 4] =
    [libc::RLIMIT_DATA, libc::RLIMIT_STACK, libc::RLIMIT_MEMLOCK, libc::RLIMIT_AS];
const CAP_IPC_LOCK: u64 = 1 << 14;

/// Whether a list received from another node contains only limits that are sent.
#[must_use]
pub fn are_valid(limits: &[Limit]) -> bool {
    limits.len() <= MIGRATED_LIMITS.len() && limits.iter().all(|l| MIGRATED_LIMITS.contains(&l.resource))
}

/// Whether a call may change what [`of`] returns: it sets a limit, or changes capabilities.
#[must_use]
pub fn may_change(nr: u32) -> bool {
    let limits = [libc::SYS_setrlimit, libc::SYS_prlimit64];
    let rights = [libc::SYS_setuid, libc::SYS_setreuid, libc::SYS_setresuid, libc::SYS_capset];
    limits.contains(&i64::from(nr)) || rights.contains(&i64::from(nr))
}

/// The limits of a process at home. RLIMIT_MEMLOCK is left out for a process with CAP_IPC_LOCK: the
/// limit does not bind that process at home, and must not bind it away, where it has no
/// capabilities.
///
/// # Errors
/// If it is gone.
pub fn of(pid: i32) -> Result<Vec<Limit>> {
    let free = procfs::status(pid)?.effective & CAP_IPC_LOCK != 0;
    let of = |resource: u32| {
        let (soft, hard) = limit::get(pid, resource)?;
        Ok(Limit { resource, soft, hard })
    };
    let bind = |resource: &u32| !(free && *resource == libc::RLIMIT_MEMLOCK);
    MIGRATED_LIMITS.into_iter().filter(bind).map(of).collect()
}

/// Sets a guest's limits on memory. Those that are not in the list are set to unlimited.
pub fn set_all(pid: i32, limits: &[Limit]) {
    for resource in MIGRATED_LIMITS {
        let known = limits.iter().find(|limit| limit.resource == resource);
        set(pid, known.copied().unwrap_or(Limit { resource, soft: u64::MAX, hard: u64::MAX }));
    }
}

/// Sets a limit of a guest, plus the length of Tern's own range if the limit includes that range.
/// If Tern may not raise the limit, the limit stays lower.
fn set(pid: i32, limit: Limit) {
    let ours = if matches!(limit.resource, libc::RLIMIT_AS | libc::RLIMIT_DATA) { Reserve::LEN } else { 0 };
    let (soft, hard) = (limit.soft.saturating_add(ours), limit.hard.saturating_add(ours));
    if let Err(error) = limit::set(pid, limit.resource, (soft, hard)) {
        tracing::debug!(pid, limit.resource, %error, "cannot set a limit");
    }
}
