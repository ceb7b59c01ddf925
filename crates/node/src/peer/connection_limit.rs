//! Limits on the number of simultaneous connections: in total, and for each party.

use crate::os::sync::lock;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

/// A semaphore with an additional limit for each party.
#[derive(Debug)]
pub(crate) struct ConnectionLimit<K> {
    max_total: usize,
    max_per_party: usize,
    in_use: Mutex<HashMap<K, usize>>,
}

/// One unit of the semaphore, released on drop.
#[derive(Debug)]
pub(crate) struct ConnectionPermit<K: Eq + Hash> {
    limit: Arc<ConnectionLimit<K>>,
    party: K,
}

impl<K: Eq + Hash + Copy> ConnectionLimit<K> {
    pub(crate) fn new(max_total: usize, max_per_party: usize) -> Arc<Self> {
        Arc::new(Self { max_total, max_per_party, in_use: Mutex::default() })
    }

    /// Takes a unit for this party; `None` if a limit is reached.
    pub(crate) fn acquire(self: &Arc<Self>, party: K) -> Option<ConnectionPermit<K>> {
        let mut in_use = lock(&self.in_use);
        if in_use.values().sum::<usize>() >= self.max_total {
            return None;
        }
        let count = in_use.entry(party).or_default();
        if *count >= self.max_per_party {
            return None;
        }
        *count += 1;
        Some(ConnectionPermit { limit: self.clone(), party })
    }
}

impl<K: Eq + Hash> Drop for ConnectionPermit<K> {
    fn drop(&mut self) {
        let mut in_use = lock(&self.limit.in_use);
        if let Some(count) = in_use.get_mut(&self.party) {
            *count -= 1;
            if *count == 0 {
                in_use.remove(&self.party);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_limited_in_total_and_per_party() {
        let limit = ConnectionLimit::new(3, 2);
        let (a, b) = (limit.acquire('a'), limit.acquire('a'));
        assert!(a.is_some() && b.is_some() && limit.acquire('a').is_none());
        let c = limit.acquire('b');
        assert!(c.is_some() && limit.acquire('c').is_none());
        drop(a);
        assert!(limit.acquire('c').is_some());
        drop((b, c));
        assert!(lock(&limit.in_use).is_empty());
    }
}
