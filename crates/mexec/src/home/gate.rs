//! So many orders of a user at a time are looked for a node for; the others wait here, and not each with a connection to every node. Those that name
//! one node are counted for that: while it has no room others are not to wait for theirs.

use crate::lock;
use std::collections::HashMap;
use std::sync::{Condvar, Mutex};
use std::time::Duration;
use tern_ids::NodeId;

/// Whose orders, and for which node alone.
pub(super) type Whose = (u32, Option<NodeId>);

/// The gate of all users.
#[derive(Debug)]
pub(super) struct Gate {
    most: u32,
    within: Mutex<HashMap<Whose, u32>>,
    changed: Condvar,
}

impl Gate {
    /// One that so many of each user may be within.
    pub(super) fn new(most: u32) -> Self {
        Self { most, within: Mutex::default(), changed: Condvar::new() }
    }

    /// Lets one more of this user's in, as soon as it may; none if that is not within this time.
    pub(super) fn enter(&self, whose: Whose, most: Duration) -> Option<Entered<'_>> {
        let full = |within: &mut HashMap<Whose, u32>| within.get(&whose).copied().unwrap_or(0) >= self.most;
        let waited = self.changed.wait_timeout_while(lock(&self.within), most, full);
        let (mut within, waited) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        if waited.timed_out() {
            return None;
        }
        *within.entry(whose).or_default() += 1;
        Some(Entered(self, whose))
    }
}

/// One that is within, until this is dropped.
#[derive(Debug)]
pub(super) struct Entered<'a>(&'a Gate, Whose);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut within = lock(&self.0.within);
        if let Some(count) = within.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                within.remove(&self.1);
            }
        }
        drop(within);
        // Each waits for his own user's.
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_of_each_user_and_no_more() {
        let (gate, now) = (Gate::new(8), Duration::ZERO);
        let mut within: Vec<_> = (0..8).map(|_| gate.enter((1, None), now).unwrap()).collect();
        assert!(gate.enter((1, None), now).is_none() && gate.enter((2, None), now).is_some());
        assert!(gate.enter((1, Some(NodeId(2))), now).is_some());
        within.pop();
        assert!(gate.enter((1, None), now).is_some());
        drop(within);
        assert!(lock(&gate.within).is_empty());
    }
}
