//! How many conversations there may be at once: in all, and of one party.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A number of places, of which one party gets only a part.
#[derive(Debug)]
pub(crate) struct Slots<K> {
    most: usize,
    most_each: usize,
    taken: Mutex<HashMap<K, usize>>,
}

/// One place; free again when dropped.
#[derive(Debug)]
pub(crate) struct Slot<K: Eq + Hash> {
    slots: Arc<Slots<K>>,
    party: K,
}

impl<K: Eq + Hash + Copy> Slots<K> {
    pub(crate) fn new(most: usize, most_each: usize) -> Arc<Self> {
        Arc::new(Self { most, most_each, taken: Mutex::default() })
    }

    /// A place for this party, if there is one.
    pub(crate) fn take(self: &Arc<Self>, party: K) -> Option<Slot<K>> {
        let mut taken = lock(&self.taken);
        if taken.values().sum::<usize>() >= self.most {
            return None;
        }
        let count = taken.entry(party).or_default();
        if *count >= self.most_each {
            return None;
        }
        *count += 1;
        Some(Slot { slots: self.clone(), party })
    }
}

impl<K: Eq + Hash> Drop for Slot<K> {
    fn drop(&mut self) {
        let mut taken = lock(&self.slots.taken);
        if let Some(count) = taken.get_mut(&self.party) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.party);
            }
        }
    }
}

/// Locks whatever happened to an earlier holder: what our locks guard is whole between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_limited_in_all_and_for_each() {
        let slots = Slots::new(3, 2);
        let (a, b) = (slots.take('a'), slots.take('a'));
        assert!(a.is_some() && b.is_some() && slots.take('a').is_none());
        let c = slots.take('b');
        assert!(c.is_some() && slots.take('c').is_none());
        drop(a);
        assert!(slots.take('c').is_some());
        drop((b, c));
        assert!(lock(&slots.taken).is_empty());
    }
}
