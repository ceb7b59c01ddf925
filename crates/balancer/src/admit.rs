//! The other side: what a node says to an offer, and its load as it will be once all has settled.

use crate::decide::Reason;
use crate::ground;
use crate::policy::Policy;
use crate::view::Node;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tern_ids::{HomePid, NodeId};

/// What a home says of a process that it wants to send.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// Whose.
    pub home: NodeId,
    /// Which.
    pub pid: HomePid,
    /// Threads of it that run or wait, on average.
    pub threads: f64,
    /// Bytes that it will need.
    pub memory: u64,
    /// The target's load as the home believes it to be, without the process.
    pub seen_load: f64,
    /// The load above which it would rather not come.
    pub limit_load: f64,
    /// Why it is to come.
    pub reason: Reason,
}

/// What the node says.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It may come.
    Yes,
    /// The node takes no guests.
    NoGuests,
    /// The load is above what the process would like.
    Crowded {
        /// As it is, agreed arrivals included.
        load: f64,
        /// As it may be.
        limit: f64,
    },
    /// There is no room for it.
    NoMemory {
        /// Bytes free, the reserve subtracted.
        free: u64,
        /// Bytes needed.
        needed: u64,
    },
}

/// What a node's sampled load and memory do not show yet: arrivals that it has agreed to, and what came or left
/// so lately that smoothing hides it. With it the node tells others where its load is going, so that nobody
/// sends more to an idle node than it can take.
#[derive(Debug, Clone, Default)]
pub struct Settling {
    changes: BTreeMap<(NodeId, HomePid), Change>,
}

#[derive(Debug, Clone, Copy)]
struct Change {
    threads: f64,
    memory: u64,
    since_ms: u64,
    state: Progress,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Progress {
    Coming,
    Came,
    Left,
}

impl Settling {
    /// An offer was agreed to.
    pub fn coming(&mut self, offer: &Offer, now_ms: u64) {
        let threads = if offer.threads.is_finite() { offer.threads.clamp(0.0, 65_536.0) } else { 0.0 };
        self.changes.insert(
            (offer.home, offer.pid),
            Change { threads, memory: offer.memory, since_ms: now_ms, state: Progress::Coming },
        );
    }

    /// It runs here now.
    pub fn came(&mut self, home: NodeId, pid: HomePid, now_ms: u64) {
        if let Some(change) = self.changes.get_mut(&(home, pid)) {
            (change.state, change.since_ms) = (Progress::Came, now_ms);
        }
    }

    /// It does not come after all.
    pub fn cancelled(&mut self, home: NodeId, pid: HomePid) {
        self.changes.remove(&(home, pid));
    }

    /// A process of this home came back, with so many threads.
    pub fn came_home(&mut self, home: NodeId, pid: HomePid, threads: f64, now_ms: u64) {
        let change = Change { threads, memory: 0, since_ms: now_ms, state: Progress::Came };
        self.changes.insert((home, pid), change);
    }

    /// A process with so many threads left, or ended.
    pub fn left(&mut self, home: NodeId, pid: HomePid, threads: f64, now_ms: u64) {
        let change = Change { threads, memory: 0, since_ms: now_ms, state: Progress::Left };
        self.changes.insert((home, pid), change);
    }

    /// Forgets what has settled. Call it once a second.
    pub fn forget(&mut self, policy: &Policy, now_ms: u64) {
        let settled = policy.load_settle_ms.saturating_mul(5);
        self.changes.retain(|_, change| {
            let long = if change.state == Progress::Coming { policy.lost_after_ms } else { settled };
            now_ms.saturating_sub(change.since_ms) < long
        });
    }

    /// Arrivals that were agreed to and are not here yet.
    #[must_use]
    pub fn arriving(&self) -> usize {
        self.changes.values().filter(|change| change.state == Progress::Coming).count()
    }

    /// The node's load as it will be; this is what it tells others. `own.load` is what was sampled.
    #[must_use]
    pub fn expected_load(&self, own: &Node, policy: &Policy, now_ms: u64) -> f64 {
        let missing = |change: &Change| {
            let passed = now_ms.saturating_sub(change.since_ms) as f64;
            let hidden = (-passed / policy.load_settle_ms.max(1) as f64).exp();
            match change.state {
                Progress::Coming => change.threads,
                Progress::Came => change.threads * hidden,
                Progress::Left => -change.threads * hidden,
            }
        };
        let runnable = own.runnable() + self.changes.values().map(missing).sum::<f64>();
        own.load_of(runnable.max(0.0))
    }

    /// The node's free memory as it will be; this is what it tells others.
    #[must_use]
    pub fn expected_free(&self, own: &Node) -> u64 {
        let coming = self.changes.values().filter(|change| change.state == Progress::Coming);
        own.mem_free.saturating_sub(coming.map(|change| change.memory).fold(0, u64::saturating_add))
    }
}

/// Whether a node agrees to an offer; `own` is as it was sampled. If so, call [`Settling::coming`] before the
/// next offer is looked at.
#[must_use]
pub fn accepts(own: &Node, settling: &Settling, offer: &Offer, policy: &Policy, now_ms: u64) -> Answer {
    if !own.takes_guests {
        return Answer::NoGuests;
    }
    if own.mem_total > 0 {
        let free = settling.expected_free(own).saturating_sub(ground::reserve(own, policy) as u64);
        if offer.memory > free || own.mem_pressure > policy.full_pressure {
            return Answer::NoMemory { free, needed: offer.memory };
        }
    }
    let load = settling.expected_load(own, policy, now_ms);
    // An urgent one comes, whatever the load: the alternative is worse. A limit that is no number is none.
    if !offer.reason.is_urgent() && !(load <= offer.limit_load) {
        return Answer::Crowded { load, limit: offer.limit_load };
    }
    Answer::Yes
}
