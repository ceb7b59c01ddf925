//! The nodes of the cluster as a home sees them.

use serde::{Deserialize, Serialize};
use tern_ids::NodeId;

/// The speed of a standard CPU.
pub(crate) const STANDARD_SPEED: f64 = 10_000.0;
/// The load of one busy standard CPU.
const BUSY_LOAD: f64 = 100.0;

/// The cost of communication with a node.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkCost {
    /// Round-trip time, in microseconds.
    pub rtt_us: u32,
    /// Throughput, in bytes a second.
    pub bytes_per_s: u64,
}

impl Default for LinkCost {
    /// A switched gigabit link, for nodes not measured yet.
    fn default() -> Self {
        Self { rtt_us: 200, bytes_per_s: 117_000_000 }
    }
}

/// One node, as of `age_ms` ago.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeSnapshot {
    /// Its number.
    pub id: NodeId,
    /// Speed of one of its CPUs; 10,000 is a standard CPU.
    pub speed: u32,
    /// Number of CPUs; may be fractional under a quota.
    pub cpus: f64,
    /// 100 is a busy standard CPU. In a home's view this is the node's
    /// [`PendingChanges::expected_load`](crate::PendingChanges::expected_load), which includes
    /// accepted arrivals; in a node's own sample it is the sampled load.
    pub load: f64,
    /// Bytes that an arriving process could have, less what accepted arrivals need.
    pub mem_free: u64,
    /// Bytes of memory in total.
    pub mem_total: u64,
    /// Bytes of free swap.
    pub swap_free: u64,
    /// Bytes of swap in total.
    pub swap_total: u64,
    /// Percent of time in which some task waited for memory (PSI `some avg10`); 0 without PSI.
    pub mem_pressure: f64,
    /// Whether it takes guests (not blocked, not shutting down, trusts this home).
    pub takes_guests: bool,
    /// Age of this entry, in milliseconds. In a home's view, the home's own entry has age 0. In a
    /// node's own sample, this is the time since the sample was taken.
    pub age_ms: u64,
    /// Whether it is known to be alive; false also while it is suspected.
    pub alive: bool,
    /// The cost of communication from here; for the node itself, its own link's throughput.
    pub link: LinkCost,
}

impl NodeSnapshot {
    /// Average number of threads that run or wait for a CPU there.
    #[must_use]
    pub fn runnable(&self) -> f64 {
        self.load * f64::from(self.speed) * self.cpus / (BUSY_LOAD * STANDARD_SPEED)
    }

    /// The load that this many threads cause there.
    #[must_use]
    pub fn load_of(&self, runnable: f64) -> f64 {
        runnable * BUSY_LOAD * STANDARD_SPEED / (f64::from(self.speed) * self.cpus)
    }

    /// The share of one of `runnable` threads there, in standard CPUs.
    #[must_use]
    pub fn share(&self, runnable: f64) -> f64 {
        f64::from(self.speed) / STANDARD_SPEED * self.cpus / runnable.max(self.cpus).max(1.0)
    }
}

/// All nodes in a home's view, itself included.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    me: NodeId,
    nodes: Vec<NodeSnapshot>,
}

impl Cluster {
    /// The view of node `me`. Values that other nodes report are clamped to their range, and of two
    /// entries of one node the younger one is used.
    #[must_use]
    pub fn new(me: NodeId, mut nodes: Vec<NodeSnapshot>) -> Self {
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
    pub fn nodes(&self) -> &[NodeSnapshot] {
        &self.nodes
    }

    /// The node with this number.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&NodeSnapshot> {
        self.index_of(id).and_then(|index| self.nodes.get(index))
    }

    /// Applies a node's reported state, unless the view has a newer one.
    pub(crate) fn apply_report(
        &mut self,
        id: NodeId,
        age_ms: u64,
        load: f64,
        mem_free: u64,
        takes_guests: bool,
    ) {
        let Some(index) = self.index_of(id) else { return };
        let Some(node) = self.nodes.get_mut(index).filter(|node| node.age_ms >= age_ms) else { return };
        node.age_ms = age_ms;
        node.load = finite(load).clamp(0.0, 1e9);
        node.mem_free = mem_free.min(node.mem_total);
        node.takes_guests &= takes_guests;
    }

    /// The node's index in [`Cluster::nodes`].
    pub(crate) fn index_of(&self, id: NodeId) -> Option<usize> {
        self.nodes.binary_search_by_key(&id, |node| node.id).ok()
    }
}

fn finite(number: f64) -> f64 {
    if number.is_finite() { number } else { 0.0 }
}
