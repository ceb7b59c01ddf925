//! The limits on memory that a process carries with it: they bind where its memory is.

use crate::reserve::Reserve;
use serde::{Deserialize, Serialize};
use tern_tracee::{Result, limit, procfs};

/// A limit, as prlimit(2) has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// RLIMIT_…
    pub resource: u32,
    /// What binds now.
    pub soft: u64,
    /// How far that may be raised.
    pub hard: u64,
}

/// Those that travel.
const TRAVEL: [u32; 4] = [libc::RLIMIT_DATA, libc::RLIMIT_STACK, libc::RLIMIT_MEMLOCK, libc::RLIMIT_AS];
const CAP_IPC_LOCK: u64 = 1 << 14;

/// Whether this one travels.
#[must_use]
pub fn travels(resource: u32) -> bool {
    TRAVEL.contains(&resource)
}

/// The limits of a process at its home. One who has the right to lock any memory is not bound by that limit: away he has
/// no rights.
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
    TRAVEL.into_iter().filter(bind).map(of).collect()
}

/// Has these limits, and no others of those that travel, bind a guest.
pub fn impose_all(pid: i32, limits: &[Limit]) {
    for resource in TRAVEL {
        let known = limits.iter().find(|limit| limit.resource == resource);
        impose(pid, known.copied().unwrap_or(Limit { resource, soft: u64::MAX, hard: u64::MAX }));
    }
}

/// Has a limit bind a guest: our range does not count, and where we have no right to raise a limit it stays lower.
pub fn impose(pid: i32, limit: Limit) {
    let ours = if matches!(limit.resource, libc::RLIMIT_AS | libc::RLIMIT_DATA) { Reserve::LEN } else { 0 };
    let (soft, hard) = (limit.soft.saturating_add(ours), limit.hard.saturating_add(ours));
    if let Err(error) = limit::set(pid, limit.resource, (soft, hard)) {
        tracing::debug!(pid, limit.resource, %error, "a limit is not set");
    }
}
