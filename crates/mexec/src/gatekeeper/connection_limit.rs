//! Limits the connections that have not authenticated yet, in total and from one address.

use crate::lock;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

/// The maximum number in total.
const MAX_CONNECTIONS: u32 = 64;

/// The maximum number from one address, so that one machine does not lock all others out.
const MAX_PER_ADDRESS: u32 = 16;

/// All unauthenticated connections.
#[derive(Debug, Default, Clone)]
pub(super) struct ConnectionLimit(Arc<Mutex<HashMap<IpAddr, u32>>>);

/// An unauthenticated connection, until this is dropped.
#[derive(Debug)]
pub(super) struct Permit(ConnectionLimit, IpAddr);

impl ConnectionLimit {
    /// Adds a connection from this address, unless a limit is reached.
    pub(super) fn acquire(&self, from: IpAddr) -> Option<Permit> {
        let mut counts = lock(&self.0);
        let all: u32 = counts.values().sum();
        if all >= MAX_CONNECTIONS || counts.get(&from).is_some_and(|count| *count >= MAX_PER_ADDRESS) {
            return None;
        }
        *counts.entry(from).or_default() += 1;
        Some(Permit(self.clone(), from))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut counts = lock(&self.0.0);
        if let Some(count) = counts.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_limited_per_address_and_in_total() {
        let (limit, address) = (ConnectionLimit::default(), |last| IpAddr::from([10, 0, 0, last]));
        let mut counts: Vec<_> = (0..MAX_PER_ADDRESS).map(|_| limit.acquire(address(1)).unwrap()).collect();
        assert!(limit.acquire(address(1)).is_none());
        for last in 2..=4 {
            counts.extend((0..MAX_PER_ADDRESS).map(|_| limit.acquire(address(last)).unwrap()));
        }
        assert!(limit.acquire(address(9)).is_none(), "the total limit is reached");
        drop(counts);
        assert!(lock(&limit.0).is_empty());
    }
}
