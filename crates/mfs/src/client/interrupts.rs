//! Who waits long for an answer of ours, and is interrupted meanwhile: by a signal, or because he is to be stopped or moved.
//!
//! The kernel says so once, of the ask's number, and that may be heard before the ask is: its numbers are never used again, so
//! the last that nobody waited for are kept for a while.

use crate::lock;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// So many of those whom nobody waited for are remembered: what is interrupted as a rule is no wait, and answered soon.
const MOST_EARLY: usize = 256;

/// All who wait.
#[derive(Debug, Default)]
pub(crate) struct Interrupts(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    waiting: HashMap<u64, Arc<Bell>>,
    early: VecDeque<u64>,
}

#[derive(Debug, Default)]
struct Bell {
    rung: Mutex<bool>,
    ring: Condvar,
}

impl Interrupts {
    /// The ask of this number is interrupted.
    pub(crate) fn interrupt(&self, ask: u64) {
        let mut known = lock(&self.0);
        if let Some(bell) = known.waiting.get(&ask) {
            *lock(&bell.rung) = true;
            bell.ring.notify_all();
            return;
        }
        known.early.push_back(ask);
        if known.early.len() > MOST_EARLY {
            known.early.pop_front();
        }
    }

    /// The ask of this number may wait for long, until the waiter goes.
    pub(crate) fn waiter(self: &Arc<Self>, ask: u64) -> Waiter {
        let mut known = lock(&self.0);
        let rung = Mutex::new(known.early.contains(&ask));
        let bell = Arc::new(Bell { rung, ring: Condvar::new() });
        known.waiting.insert(ask, bell.clone());
        Waiter { all: self.clone(), ask, bell }
    }
}

/// One who waits.
#[derive(Debug)]
pub(crate) struct Waiter {
    all: Arc<Interrupts>,
    ask: u64,
    bell: Arc<Bell>,
}

impl Waiter {
    /// Sleeps so long, or until it is interrupted; whether it has been.
    pub(crate) fn sleep(&self, most: Duration) -> bool {
        let rung = lock(&self.bell.rung);
        let slept = self.bell.ring.wait_timeout_while(rung, most, |rung| !*rung);
        *slept.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        lock(&self.all.0).waiting.remove(&self.ask);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_interrupted_wakes_and_nobody_else() {
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
    fn an_interrupt_may_come_before_the_ask() {
        let all = Arc::new(Interrupts::default());
        all.interrupt(7);
        assert!(all.waiter(7).sleep(Duration::from_secs(60)));
        for other in 100..1000 {
            all.interrupt(other);
        }
        assert!(!all.waiter(7).sleep(Duration::ZERO), "of long ago");
        assert_eq!(lock(&all.0).early.len(), MOST_EARLY);
        assert!(lock(&all.0).waiting.is_empty());
    }
}
