//! The target's side: how a node answers an offer, and its expected load once recent changes have
//! settled.

use crate::candidate::Obstacle;
use crate::decide::MoveReason;
use crate::effective_view;
use crate::policy::Policy;
use crate::process::ProcessSnapshot;
use crate::trend::Trend;
use crate::view::NodeSnapshot;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tern_ids::{HomePid, NodeId};

/// A process whose memory grows by at least this many bytes in `ordinary_growth_s` counts as
/// growing. Smaller growth is typical of a program that starts up.
const MIN_GROWTH: f64 = 64.0 * (1 << 20) as f64;

/// A home's request to send a process to a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MoveOffer {
    /// The home node of the process.
    pub home: NodeId,
    /// The process.
    pub pid: HomePid,
    /// Average number of its threads that run or wait for a CPU.
    pub threads: f64,
    /// Bytes that it will need.
    pub memory: u64,
    /// The target's load as the home estimates it, without the process.
    pub estimated_load: f64,
    /// The target's load above which the home does not want to send the process.
    pub max_load: f64,
    /// Why the process is to move.
    pub reason: MoveReason,
}

/// A node's answer to an offer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OfferReply {
    /// The node accepts the process.
    Accept,
    /// The node refuses it.
    Refuse(OfferRefusal),
}

/// Why a node refuses, and its current state, so that the home need not wait for gossip.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct OfferRefusal {
    /// The reason: [`Obstacle::NoGuests`], [`Obstacle::NoMemory`], [`Obstacle::Overloaded`] or
    /// [`Obstacle::LinkBusy`].
    pub obstacle: Obstacle,
    /// The node's load, including accepted arrivals.
    pub load: f64,
    /// The node's free memory, minus the memory that accepted arrivals need, and minus the room
    /// that is reserved for growth of the memory in use.
    pub mem_free: u64,
}

/// Changes that a node's sampled load and memory do not show yet: accepted arrivals, and arrivals
/// and departures so recent that smoothing hides them. A node publishes its load with these
/// included, so that other nodes do not send more to an idle node than it can take.
#[derive(Debug, Clone, Default)]
pub struct PendingChanges {
    changes: BTreeMap<(NodeId, HomePid), Change>,
    /// Number of threads that run or wait for a CPU, over this node's own processes here, as of the
    /// last scan. Growing processes are not counted.
    local_threads: f64,
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
    Accepted,
    Arrived,
    Departed,
}

impl PendingChanges {
    /// An offer was accepted.
    pub fn record_accepted(&mut self, offer: &MoveOffer, now_ms: u64) {
        let threads = if offer.threads.is_finite() { offer.threads.clamp(0.0, 65_536.0) } else { 0.0 };
        self.changes.insert(
            (offer.home, offer.pid),
            Change { threads, memory: offer.memory, since_ms: now_ms, state: Progress::Accepted },
        );
    }

    /// The process runs here now. Both its home's message and the next scan of the guests report
    /// this. Only the first report counts: the second would restart the correction for a process
    /// that the sampled load already includes in part.
    pub fn record_arrived(&mut self, home: NodeId, pid: HomePid, now_ms: u64) {
        let change = self.changes.get_mut(&(home, pid)).filter(|change| change.state == Progress::Accepted);
        if let Some(change) = change {
            (change.state, change.since_ms) = (Progress::Arrived, now_ms);
        }
    }

    /// The process will not arrive.
    pub fn record_cancelled(&mut self, home: NodeId, pid: HomePid) {
        self.changes.remove(&(home, pid));
    }

    /// A process of this home came back, with this many threads.
    pub fn record_returned(&mut self, home: NodeId, pid: HomePid, threads: f64, now_ms: u64) {
        let change = Change { threads, memory: 0, since_ms: now_ms, state: Progress::Arrived };
        self.changes.insert((home, pid), change);
    }

    /// A process with this many threads left or ended.
    pub fn record_departed(&mut self, home: NodeId, pid: HomePid, threads: f64, now_ms: u64) {
        let change = Change { threads, memory: 0, since_ms: now_ms, state: Progress::Departed };
        self.changes.insert((home, pid), change);
    }

    /// Sets the node's own processes that run here: the node's load is at least their demand.
    /// Thirteen processes that start at once are visible in the first scan, but in the smoothed
    /// load only two seconds later. Growing processes are left out: if they were spread this early,
    /// several would go to one node before it could measure how fast its memory fills.
    pub fn set_local<'a>(&mut self, here: impl Iterator<Item = &'a ProcessSnapshot>, policy: &Policy) {
        let not_growing =
            here.filter(|process| process.growth as f64 * policy.ordinary_growth_s < MIN_GROWTH);
        self.local_threads = not_growing.map(ProcessSnapshot::threads).sum::<f64>().min(65_536.0);
    }

    /// One of the node's own processes has left or ended since the last scan.
    pub fn record_local_departed(&mut self, threads: f64) {
        self.local_threads = (self.local_threads - threads.max(0.0)).max(0.0);
    }

    /// Takes a sample, once a second: updates the memory trend, and drops changes that have
    /// settled.
    pub fn update(&mut self, own: &NodeSnapshot, policy: &Policy, now_ms: u64) {
        self.trend.sample(own.mem_free, now_ms);
        let settle_ms = policy.load_time_constant_ms.saturating_mul(5);
        self.changes.retain(|_, change| {
            let lifetime_ms =
                if change.state == Progress::Accepted { policy.move_timeout_ms } else { settle_ms };
            now_ms.saturating_sub(change.since_ms) < lifetime_ms
        });
    }

    /// Number of accepted arrivals that are not here yet.
    #[must_use]
    pub fn arriving(&self) -> usize {
        self.changes.values().filter(|change| change.state == Progress::Accepted).count()
    }

    fn arriving_bytes(&self) -> u64 {
        let arriving = self.changes.values().filter(|change| change.state == Progress::Accepted);
        arriving.map(|change| change.memory).fold(0, u64::saturating_add)
    }

    /// The node's expected load, which it publishes. `own.load` was sampled `own.age_ms` ago, so
    /// the part of a change that the sample misses is computed for the time of the sample, not for
    /// now. Otherwise half of the correction for arrivals just before a sample would have decayed
    /// before the next sample shows them, and another home would send one process too many.
    #[must_use]
    pub fn expected_load(&self, own: &NodeSnapshot, policy: &Policy, now_ms: u64) -> f64 {
        let sampled_ms = now_ms.saturating_sub(own.age_ms);
        let missing = |change: &Change| {
            let passed = sampled_ms.saturating_sub(change.since_ms) as f64;
            let hidden = (-passed / policy.load_time_constant_ms.max(1) as f64).exp();
            match change.state {
                Progress::Accepted => change.threads,
                Progress::Arrived => change.threads * hidden,
                Progress::Departed => -change.threads * hidden,
            }
        };
        let runnable = own.runnable() + self.changes.values().map(missing).sum::<f64>();
        own.load_of(runnable.max(self.local_threads))
    }

    /// The node's expected free memory once all accepted processes have arrived, for its own
    /// decisions.
    #[must_use]
    pub fn expected_free(&self, own: &NodeSnapshot) -> u64 {
        own.mem_free.saturating_sub(self.arriving_bytes())
    }

    /// The free memory that the node publishes: [`expected_free`](Self::expected_free), minus the
    /// growth of memory in use that is expected before a process that is sent because of this
    /// figure can arrive. No further reserve is subtracted, because this figure also tells homes
    /// that the node is about to be full.
    #[must_use]
    pub fn advertised_free(&self, own: &NodeSnapshot, policy: &Policy) -> u64 {
        self.free_after(own, policy.usher_ahead_s)
    }

    fn free_after(&self, own: &NodeSnapshot, seconds: f64) -> u64 {
        self.expected_free(own).saturating_sub((self.trend.fill_rate() * seconds) as u64)
    }
}

/// Whether a node accepts an offer. `own` is its sample, which does not include the `pending`
/// changes. After an acceptance, call [`PendingChanges::record_accepted`] before the next offer is
/// checked.
#[must_use]
pub fn reply_to_offer(
    own: &NodeSnapshot,
    pending: &PendingChanges,
    offer: &MoveOffer,
    policy: &Policy,
    now_ms: u64,
) -> OfferReply {
    // An urgent move is accepted with less room for growth.
    let seconds = if offer.reason.is_urgent() { policy.usher_growth_s } else { policy.ordinary_growth_s };
    let (load, mem_free) = (pending.expected_load(own, policy, now_ms), pending.free_after(own, seconds));
    let refuse = |obstacle| OfferReply::Refuse(OfferRefusal { obstacle, load, mem_free });
    if !own.takes_guests {
        return refuse(Obstacle::NoGuests);
    }
    let room = mem_free.saturating_sub(effective_view::memory_to_keep_free(own, policy) as u64);
    if own.mem_total > 0 && (offer.memory > room || own.mem_pressure > policy.max_pressure) {
        return refuse(Obstacle::NoMemory);
    }
    // Large processes come one after the other: if sent together, all would arrive when the last
    // one does.
    let bytes_per_second = own.link.bytes_per_s;
    if offer.memory > bytes_per_second / 2 && pending.arriving_bytes() > bytes_per_second {
        return refuse(Obstacle::LinkBusy);
    }
    // Urgent moves ignore the load: the alternative is worse. A limit of NaN refuses all other
    // moves.
    if !offer.reason.is_urgent() && (offer.max_load.is_nan() || load > offer.max_load) {
        return refuse(Obstacle::Overloaded);
    }
    OfferReply::Accept
}
