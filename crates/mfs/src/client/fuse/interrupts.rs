//! FUSE_INTERRUPT for requests that block for long (locks). The kernel sends it because a signal is
//! pending, or because the caller is to be stopped or migrated.
//!
//! The kernel sends one interrupt, with the unique number of the request. It may arrive before the
//! request itself, so the last interrupts are kept. Numbers are never reused, so an old one does no
//! harm.

use crate::lock;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Maximum number of kept interrupts that matched no registered request when they came. Most are
/// for requests that do not block and have their reply soon.
const MAX_UNMATCHED: usize = 256;

/// The requests that block, and the interrupts.
#[derive(Debug, Default)]
pub(crate) struct Interrupts(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    waiting: HashMap<u64, Arc<Flag>>,
    unmatched: VecDeque<u64>,
}

#[derive(Debug, Default)]
struct Flag {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Interrupts {
    /// The request with this number is interrupted.
    pub(crate) fn interrupt(&self, unique: u64) {
        let mut state = lock(&self.0);
        if let Some(flag) = state.waiting.get(&unique) {
            *lock(&flag.is_set) = true;
            flag.changed.notify_all();
            return;
        }
        state.unmatched.push_back(unique);
        if state.unmatched.len() > MAX_UNMATCHED {
            state.unmatched.pop_front();
        }
    }

    /// Registers a request that may block, until the result is dropped.
    pub(crate) fn waiter(self: &Arc<Self>, unique: u64) -> Waiter {
        let mut state = lock(&self.0);
        let is_set = Mutex::new(state.unmatched.contains(&unique));
        let flag = Arc::new(Flag { is_set, changed: Condvar::new() });
        state.waiting.insert(unique, flag.clone());
        Waiter { all: self.clone(), unique, flag }
    }
}

/// A request that may block.
#[derive(Debug)]
pub(crate) struct Waiter {
    all: Arc<Interrupts>,
    unique: u64,
    flag: Arc<Flag>,
}

impl Waiter {
    /// Sleeps for this time or until interrupted. Returns whether it was interrupted.
    pub(crate) fn sleep(&self, timeout: Duration) -> bool {
        let is_set = lock(&self.flag.is_set);
        let slept = self.flag.changed.wait_timeout_while(is_set, timeout, |is_set| !*is_set);
        *slept.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        lock(&self.all.0).waiting.remove(&self.unique);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupt_wakes_only_its_request() {
        let all = Arc::new(Interrupts::default());
        let (one, two) = (all.waiter(1), all.waiter(2));
        std::thread::scope(|scope| {
            let slept = scope.spawn(|| one.sleep(Duration::from_secs(60)));
            all.interrupt(1);
            assert!(slept.join().unwrap());
        });
        assert!(!two.sleep(Duration::from_millis(1)));
    }

    #[test]
    fn interrupt_may_arrive_before_its_request() {
        let all = Arc::new(Interrupts::default());
        all.interrupt(7);
        assert!(all.waiter(7).sleep(Duration::from_secs(60)));
        for other in 100..1000 {
            all.interrupt(other);
        }
        assert!(!all.waiter(7).sleep(Duration::ZERO), "of long ago");
        assert_eq!(lock(&all.0).unmatched.len(), MAX_UNMATCHED);
        assert!(lock(&all.0).waiting.is_empty());
    }
}
