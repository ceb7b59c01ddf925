//! Round robin among users: when each user last got a slot.

use std::collections::HashMap;

/// The maximum number of remembered users.
const MAX_USERS: usize = 4096;

/// For each user, the serial number of the last slot assigned to the user.
#[derive(Debug, Default)]
pub(crate) struct LastServed {
    last: HashMap<u32, u64>,
    count: u64,
}

impl LastServed {
    /// A slot is assigned to this user.
    pub(crate) fn record(&mut self, uid: u32) {
        if self.last.len() >= MAX_USERS {
            self.last.clear();
        }
        self.count += 1;
        self.last.insert(uid, self.count);
    }

    /// The serial number of the user's last slot: smaller is longer ago, 0 is never.
    pub(crate) fn last(&self, uid: u32) -> u64 {
        self.last.get(&uid).copied().unwrap_or(0)
    }
}
