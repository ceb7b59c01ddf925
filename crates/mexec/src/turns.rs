//! Which user was given room longest ago.

use std::collections::HashMap;

/// So many users are remembered.
const MOST: usize = 4096;

/// Of each user, which of all that was given was his last.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    last: HashMap<u32, u64>,
    count: u64,
}

impl Turns {
    /// This user is given room.
    pub(crate) fn give(&mut self, uid: u32) {
        if self.last.len() >= MOST {
            self.last.clear();
        }
        self.count += 1;
        self.last.insert(uid, self.count);
    }

    /// Which turn was his last: less for whom that was longer ago, and 0 for who had none.
    pub(crate) fn last(&self, uid: u32) -> u64 {
        self.last.get(&uid).copied().unwrap_or(0)
    }
}
