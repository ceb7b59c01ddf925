//! Connections of which nobody knows yet whose they are: so many, and so many of one address, and no more.

use crate::lock;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

/// The most in all.
const MOST: u32 = 64;

/// The most of one address, so that one machine does not keep all others out.
const MOST_OF_ONE: u32 = 16;

/// All of them.
#[derive(Debug, Default, Clone)]
pub(super) struct Unknown(Arc<Mutex<HashMap<IpAddr, u32>>>);

/// One of them, until this is dropped.
#[derive(Debug)]
pub(super) struct Entered(Unknown, IpAddr);

impl Unknown {
    /// One more of this address, if there may be.
    pub(super) fn enter(&self, from: IpAddr) -> Option<Entered> {
        let mut within = lock(&self.0);
        let all: u32 = within.values().sum();
        if all >= MOST || within.get(&from).is_some_and(|count| *count >= MOST_OF_ONE) {
            return None;
        }
        *within.entry(from).or_default() += 1;
        Some(Entered(self.clone(), from))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut within = lock(&self.0.0);
        if let Some(count) = within.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                within.remove(&self.1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_leaves_room_for_others_and_nothing_is_left() {
        let (unknown, address) = (Unknown::default(), |last| IpAddr::from([10, 0, 0, last]));
        let mut within: Vec<_> = (0..MOST_OF_ONE).map(|_| unknown.enter(address(1)).unwrap()).collect();
        assert!(unknown.enter(address(1)).is_none());
        for last in 2..=4 {
            within.extend((0..MOST_OF_ONE).map(|_| unknown.enter(address(last)).unwrap()));
        }
        assert!(unknown.enter(address(9)).is_none(), "all places are taken");
        drop(within);
        assert!(lock(&unknown.0).is_empty());
    }
}
