//! Limits the concurrent placement searches, and the placed commands, of each user. Further
//! searches wait here, without a connection to every node. Searches that name one node are counted
//! separately for that node: while it has no free slot, the user's other commands must not wait.

use crate::lock;
use std::collections::HashMap;
use std::sync::{Condvar, Mutex};
use std::time::Duration;
use tern_ids::NodeId;

/// The user, and the node if the search names only one.
pub(super) type LimitKey = (u32, Option<NodeId>);

/// A limit on the number of permits of each user.
#[derive(Debug)]
pub(super) struct AdmissionLimit {
    max: u32,
    permits: Mutex<HashMap<LimitKey, u32>>,
    changed: Condvar,
}

impl AdmissionLimit {
    /// A limit of `max` permits.
    pub(super) fn new(max: u32) -> Self {
        Self { max, permits: Mutex::default(), changed: Condvar::new() }
    }

    /// Acquires a permit; `None` if none becomes free within this time.
    pub(super) fn acquire(&self, key: LimitKey, timeout: Duration) -> Option<Permit<'_>> {
        let full = |permits: &mut HashMap<LimitKey, u32>| permits.get(&key).copied().unwrap_or(0) >= self.max;
        let waited = self.changed.wait_timeout_while(lock(&self.permits), timeout, full);
        let (mut permits, waited) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        if waited.timed_out() {
            return None;
        }
        *permits.entry(key).or_default() += 1;
        Some(Permit(self, key))
    }
}

/// A permit, until it is dropped.
#[derive(Debug)]
pub(super) struct Permit<'a>(&'a AdmissionLimit, LimitKey);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut permits = lock(&self.0.permits);
        if let Some(count) = permits.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                permits.remove(&self.1);
            }
        }
        drop(permits);
        // A waiter may wait for another key.
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_gets_the_maximum_number_of_permits() {
        let (limit, now) = (AdmissionLimit::new(8), Duration::ZERO);
        let mut held: Vec<_> = (0..8).map(|_| limit.acquire((1, None), now).unwrap()).collect();
        assert!(limit.acquire((1, None), now).is_none() && limit.acquire((2, None), now).is_some());
        assert!(limit.acquire((1, Some(NodeId(2))), now).is_some());
        held.pop();
        assert!(limit.acquire((1, None), now).is_some());
        drop(held);
        assert!(lock(&limit.permits).is_empty());
    }
}
