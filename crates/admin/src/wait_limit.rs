//! Limits the number of writes that wait for ternd, in all and per user. Each has a thread, so that
//! other accesses are not blocked.

use crate::lock;
use crate::procfs::is_interrupted;
use crate::ternd::PendingReply;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tern_control::Reply;

/// Maximum number of waiting writes in all and per user. Each holds one of the 256 connections that
/// ternd allows to one user, here root.
const MAX_WAITS: usize = 64;
const MAX_WAITS_PER_USER: usize = 16;

/// How often a waiting write checks for a signal of its caller.
const SIGNAL_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Number of waiting writes, by user.
#[derive(Debug, Default)]
pub(crate) struct WaitLimit(Mutex<HashMap<u32, usize>>);

/// Permission to wait, until this is dropped.
#[derive(Debug)]
pub(crate) struct WaitPermit {
    limit: Arc<WaitLimit>,
    uid: u32,
}

impl WaitLimit {
    /// Takes a permit for this user.
    ///
    /// # Errors
    /// `EBUSY` if the user, or all users together, have too many.
    pub(crate) fn acquire(self: &Arc<Self>, uid: u32) -> Result<WaitPermit, Errno> {
        let mut waits = lock(&self.0);
        let user_waits = waits.get(&uid).copied().unwrap_or(0);
        if user_waits >= MAX_WAITS_PER_USER || waits.values().sum::<usize>() >= MAX_WAITS {
            return Err(Errno::BUSY);
        }
        *waits.entry(uid).or_default() += 1;
        Ok(WaitPermit { limit: self.clone(), uid })
    }
}

impl Drop for WaitPermit {
    fn drop(&mut self) {
        let mut waits = lock(&self.limit.0);
        if let Some(user_waits) = waits.get_mut(&self.uid) {
            *user_waits -= 1;
            if *user_waits == 0 {
                waits.remove(&self.uid);
            }
        }
    }
}

/// Waits for ternd's reply, or until a signal is pending for the writing thread `tid`. In that case
/// ternd continues to perform the request.
///
/// # Errors
/// `EINTR`, or those of ternd's reply.
pub(crate) fn wait(pending: PendingReply, tid: u32) -> Result<Reply, Errno> {
    while !pending.is_ready_within(SIGNAL_POLL_INTERVAL) {
        if is_interrupted(tid) {
            return Err(Errno::INTR);
        }
    }
    pending.receive()
}

/// Waits for ternd's reply, however long that takes.
pub(crate) fn wait_uninterruptibly(pending: PendingReply) -> Result<Reply, Errno> {
    while !pending.is_ready_within(Duration::from_secs(3600)) {}
    pending.receive()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_cannot_take_all_permits() {
        let limit = Arc::new(WaitLimit::default());
        let own: Vec<_> = (0..MAX_WAITS_PER_USER).map(|_| limit.acquire(7).unwrap()).collect();
        assert_eq!(limit.acquire(7).unwrap_err(), Errno::BUSY);
        let others: Vec<_> = (0..MAX_WAITS - MAX_WAITS_PER_USER)
            .map(|user| limit.acquire(100 + user as u32).unwrap())
            .collect();
        assert_eq!(limit.acquire(8).unwrap_err(), Errno::BUSY);
        drop(own);
        assert!(limit.acquire(7).is_ok());
        drop(others);
        assert!(lock(&limit.0).is_empty());
    }
}
