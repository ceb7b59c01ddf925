//! What a home knows of the nodes.

use serde::{Deserialize, Serialize};
use tern_ids::NodeId;

/// The speed of a standard CPU.
pub(crate) const STANDARD_SPEED: f64 = 10_000.0;
/// The load of one standard CPU kept busy.
const BUSY: f64 = 100.0;

/// What it costs to talk to a node.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkCost {
    /// There and back, in microseconds.
    pub rtt_us: u32,
    /// What it carries.
    pub bytes_per_s: u64,
}

impl Default for LinkCost {
    /// A switched gigabit, for nodes that have not been measured yet.
    fn default() -> Self {
        Self { rtt_us: 200, bytes_per_s: 117_000_000 }
    }
}

/// One node, as it was `age_ms` ago.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Which.
    pub id: NodeId,
    /// Of one of its CPUs; 10,000 is a standard CPU.
    pub speed: u32,
    /// How many; may be fractional under a quota.
    pub cpus: f64,
    /// 100 is a standard CPU kept busy; as [`Settling::expected_load`](crate::Settling::expected_load) says it,
    /// that is, with the arrivals that it has agreed to.
    pub load: f64,
    /// Bytes that a newcomer could have, arrivals that were agreed to subtracted.
    pub mem_free: u64,
    /// Bytes in all.
    pub mem_total: u64,
    /// Bytes of swap that are free.
    pub swap_free: u64,
    /// Bytes of swap in all.
    pub swap_total: u64,
    /// Percent of time in which somebody waited for memory (PSI `some avg10`); 0 where there is no PSI.
    pub mem_pressure: f64,
    /// Whether it takes guests (not blocked, not shutting down, trusts this home).
    pub takes_guests: bool,
    /// How old all this is, in milliseconds; of the node itself, how long ago it was sampled, and 0 in a view.
    pub age_ms: u64,
    /// Whether it is known to live; false also while that is in doubt.
    pub alive: bool,
    /// What it costs to talk to it from here; for the node itself, what its own link carries.
    pub link: LinkCost,
}

impl Node {
    /// How many threads run or wait there, on average.
    #[must_use]
    pub fn runnable(&self) -> f64 {
        self.load * f64::from(self.speed) * self.cpus / (BUSY * STANDARD_SPEED)
    }

    /// The load that so many threads make there.
    #[must_use]
    pub fn load_of(&self, runnable: f64) -> f64 {
        runnable * BUSY * STANDARD_SPEED / (f64::from(self.speed) * self.cpus)
    }

    /// What one of `runnable` threads gets there, in standard CPUs.
    #[must_use]
    pub fn share(&self, runnable: f64) -> f64 {
        f64::from(self.speed) / STANDARD_SPEED * self.cpus / runnable.max(self.cpus).max(1.0)
    }
}

/// All nodes that a home knows, itself included.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    me: NodeId,
    nodes: Vec<Node>,
}

impl Cluster {
    /// A view from node `me`. What other nodes say of themselves is not believed blindly: numbers out of their
    /// range are cut, and of two entries for one node the younger one holds.
    #[must_use]
    pub fn new(me: NodeId, mut nodes: Vec<Node>) -> Self {
        nodes.sort_by_key(|node| (node.id, node.age_ms));
        nodes.dedup_by_key(|node| node.id);
        for node in &mut nodes {
            node.speed = node.speed.clamp(1, 10_000_000);
            node.cpus = finite(node.cpus).clamp(0.01, 65_536.0);
            node.load = finite(node.load).clamp(0.0, 1e9);
            node.mem_pressure = finite(node.mem_pressure).clamp(0.0, 100.0);
            node.mem_total = node.mem_total.min(1 << 60);
            node.mem_free = node.mem_free.min(node.mem_total);
            node.swap_free = node.swap_free.min(node.swap_total);
            node.link.bytes_per_s = node.link.bytes_per_s.clamp(1_000, 1 << 50);
        }
        Self { me, nodes }
    }

    /// The node whose view this is.
    #[must_use]
    pub fn me(&self) -> NodeId {
        self.me
    }

    /// Its nodes, in the order of their numbers.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// One of them.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.place_of(id).and_then(|place| self.nodes.get(place))
    }

    /// A node has told how it stands, if the view has nothing newer.
    pub(crate) fn hear(&mut self, id: NodeId, age_ms: u64, load: f64, mem_free: u64, takes_guests: bool) {
        let Some(place) = self.place_of(id) else { return };
        let Some(node) = self.nodes.get_mut(place).filter(|node| node.age_ms >= age_ms) else { return };
        node.age_ms = age_ms;
        node.load = finite(load).clamp(0.0, 1e9);
        node.mem_free = mem_free.min(node.mem_total);
        node.takes_guests &= takes_guests;
    }

    /// Where in [`Cluster::nodes`] it stands.
    pub(crate) fn place_of(&self, id: NodeId) -> Option<usize> {
        self.nodes.binary_search_by_key(&id, |node| node.id).ok()
    }
}

fn finite(number: f64) -> f64 {
    if number.is_finite() { number } else { 0.0 }
}
