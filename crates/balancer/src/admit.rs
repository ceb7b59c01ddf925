//! The other side: what a node says to an offer, and its load as it will be once all has settled.

use crate::decide::Reason;
use crate::ground;
use crate::policy::Policy;
use crate::process::Process;
use crate::prospect::Bar;
use crate::trend::Trend;
use crate::view::Node;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tern_ids::{HomePid, NodeId};

/// Who takes so many bytes more in `calm_room_s` grows; what is less is no habit, but a program that begins.
const GROWS: f64 = 64.0 * (1 << 20) as f64;

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
    /// It may not.
    No(Refusal),
}

/// Why not, and how the node stands, so that the home need not wait for gossip to know better.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Refusal {
    /// Why: [`Bar::NoGuests`], [`Bar::NoMemory`], [`Bar::Crowded`] or [`Bar::WayBusy`].
    pub bar: Bar,
    /// Its load, agreed arrivals included.
    pub load: f64,
    /// Its free memory, agreed arrivals subtracted.
    pub mem_free: u64,
}

/// What a node's sampled load and memory do not show yet: arrivals that it has agreed to, and what came or left
/// so lately that smoothing hides it. With it the node tells others where its load is going, so that nobody
/// sends more to an idle node than it can take.
#[derive(Debug, Clone, Default)]
pub struct Settling {
    changes: BTreeMap<(NodeId, HomePid), Change>,
    /// Threads of own processes that are here and run or wait, as far as each was looked at, and do not grow.
    own: f64,
    trend: Trend,
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

    /// It runs here now. Told by its home, and seen by the next look at the guests: what comes first counts, or the load
    /// has it twice for a while, once in the sample and once as one that the sample lacks.
    pub fn came(&mut self, home: NodeId, pid: HomePid, now_ms: u64) {
        let change = self.changes.get_mut(&(home, pid)).filter(|change| change.state == Progress::Coming);
        if let Some(change) = change {
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

    /// These are the node's own processes that run here: what they want its load is not below. Thirteen that begin at
    /// once are thirteen by the first look at them, and in the smoothed load two seconds later. Those that grow do not
    /// count: spread so soon, several went to one node before that could have seen how fast its memory fills.
    pub fn own<'a>(&mut self, here: impl Iterator<Item = &'a Process>, policy: &Policy) {
        let calm = here.filter(|process| process.growth as f64 * policy.calm_room_s < GROWS);
        self.own = calm.map(Process::threads).sum::<f64>().min(65_536.0);
    }

    /// One of them has left, or ended, and they have not been looked at since.
    pub fn own_left(&mut self, threads: f64) {
        self.own = (self.own - threads.max(0.0)).max(0.0);
    }

    /// Once a second, with what was sampled: follows the memory, and forgets what has settled.
    pub fn sampled(&mut self, own: &Node, policy: &Policy, now_ms: u64) {
        self.trend.sample(own.mem_free, now_ms);
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

    fn coming_bytes(&self) -> u64 {
        let coming = self.changes.values().filter(|change| change.state == Progress::Coming);
        coming.map(|change| change.memory).fold(0, u64::saturating_add)
    }

    /// The node's load as it will be; this is what it tells others. `own.load` is what was sampled, `own.age_ms` ago:
    /// what the sample lacks of a change goes by when it was taken, and not by now. By now, two arrivals of just before
    /// a sample were half forgotten when the next one was due, and a third followed them.
    #[must_use]
    pub fn expected_load(&self, own: &Node, policy: &Policy, now_ms: u64) -> f64 {
        let sampled_ms = now_ms.saturating_sub(own.age_ms);
        let missing = |change: &Change| {
            let passed = sampled_ms.saturating_sub(change.since_ms) as f64;
            let hidden = (-passed / policy.load_settle_ms.max(1) as f64).exp();
            match change.state {
                Progress::Coming => change.threads,
                Progress::Came => change.threads * hidden,
                Progress::Left => -change.threads * hidden,
            }
        };
        let runnable = own.runnable() + self.changes.values().map(missing).sum::<f64>();
        own.load_of(runnable.max(self.own))
    }

    /// The node's free memory as it will be when all have come; what its own decisions go by.
    #[must_use]
    pub fn expected_free(&self, own: &Node) -> u64 {
        own.mem_free.saturating_sub(self.coming_bytes())
    }

    /// The same, without what the processes that are here will have taken by the time when one that hears of it has come;
    /// this is what it tells others. More must not be subtracted: homes also see by it when the node is about to be full.
    #[must_use]
    pub fn offered_free(&self, own: &Node, policy: &Policy) -> u64 {
        self.free_after(own, policy.usher_ahead_s)
    }

    fn free_after(&self, own: &Node, seconds: f64) -> u64 {
        self.expected_free(own).saturating_sub((self.trend.filling() * seconds) as u64)
    }
}

/// Whether a node agrees to an offer; `own` is as it was sampled. If so, call [`Settling::coming`] before the
/// next offer is looked at.
#[must_use]
pub fn accepts(own: &Node, settling: &Settling, offer: &Offer, policy: &Policy, now_ms: u64) -> Answer {
    // Who must leave at once is content with less room to grow.
    let seconds = if offer.reason.is_urgent() { policy.usher_room_s } else { policy.calm_room_s };
    let (load, mem_free) = (settling.expected_load(own, policy, now_ms), settling.free_after(own, seconds));
    let no = |bar| Answer::No(Refusal { bar, load, mem_free });
    if !own.takes_guests {
        return no(Bar::NoGuests);
    }
    let room = mem_free.saturating_sub(ground::reserve(own, policy) as u64);
    if own.mem_total > 0 && (offer.memory > room || own.mem_pressure > policy.full_pressure) {
        return no(Bar::NoMemory);
    }
    // Large ones come one after the other: together, all would be here when the last one is.
    let second = own.link.bytes_per_s;
    if offer.memory > second / 2 && settling.coming_bytes() > second {
        return no(Bar::WayBusy);
    }
    // An urgent one comes, whatever the load: the alternative is worse. A limit that is no number keeps all out.
    if !offer.reason.is_urgent() && (offer.limit_load.is_nan() || load > offer.limit_load) {
        return no(Bar::Crowded);
    }
    Answer::Yes
}
