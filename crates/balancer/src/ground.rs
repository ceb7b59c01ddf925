//! The view, with everything counted in that has been decided and does not show yet.

use crate::policy::{Objective, Policy};
use crate::process::Process;
use crate::prospect::Bar;
use crate::state::State;
use crate::view::{Cluster, Node};
use std::collections::{BTreeMap, BTreeSet};
use tern_ids::NodeId;

/// The theory's base is the number of nodes. In a cluster of two that makes loads of 1 and 10 all but the same.
const SMALLEST_BASE: usize = 64;

/// How one node stands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stand {
    /// Threads that run or wait.
    pub(crate) runnable: f64,
    /// Bytes free, once those that are to leave have left; negative if more has been promised than there is.
    pub(crate) free: f64,
    /// Bytes of those: none of them is room yet. Who went home because another one was to leave, which another node then
    /// refused, filled it.
    pub(crate) leaving: f64,
    /// What it keeps free.
    pub(crate) reserve: f64,
    /// How fast its memory fills, in bytes a second, as far as this home has watched it.
    pub(crate) filling: f64,
    /// Why nobody goes there, if so.
    pub(crate) bar: Option<Bar>,
}

/// How all stand; places are those of the cluster's nodes.
#[derive(Debug)]
pub(crate) struct Ground<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) policy: &'a Policy,
    pub(crate) now_ms: u64,
    pub(crate) stands: Vec<Stand>,
    /// Moves under way between two nodes.
    pairs: BTreeMap<(NodeId, NodeId), u32>,
    /// Nodes that are about to run out of memory: their links are needed for that.
    pub(crate) filling_up: BTreeSet<NodeId>,
    /// Moves under way in all.
    pub(crate) under_way: u32,
    /// The base and the unit of opportunity costs: nodes, and a load that none is above.
    pub(crate) base: f64,
    pub(crate) top_load: f64,
}

impl Stand {
    /// Bytes that are free now and not promised, above what it keeps free.
    pub(crate) fn room(&self) -> f64 {
        self.free - self.leaving - self.reserve
    }
}

impl<'a> Ground<'a> {
    pub(crate) fn new(cluster: &'a Cluster, state: &State, policy: &'a Policy, now_ms: u64) -> Self {
        let stand = |node: &Node| Stand {
            runnable: node.runnable(),
            free: node.mem_free as f64,
            leaving: 0.0,
            reserve: reserve(node, policy),
            filling: state.filling(node.id),
            bar: closed(node, node.id == cluster.me(), policy),
        };
        let stands: Vec<Stand> = cluster.nodes().iter().map(stand).collect();
        let mut ground = Self {
            cluster,
            policy,
            now_ms,
            stands,
            pairs: BTreeMap::new(),
            filling_up: BTreeSet::new(),
            under_way: 0,
            base: cluster.nodes().len().max(SMALLEST_BASE) as f64,
            top_load: 1.0,
        };
        for under_way in state.moves.values() {
            if under_way.credits(cluster, now_ms) {
                ground.shift(under_way.from, -under_way.threads, -(under_way.memory as f64));
            }
            if under_way.charges(cluster, now_ms) {
                ground.shift(under_way.to, under_way.threads, under_way.memory as f64);
            }
            if !under_way.arrived() {
                ground.set_out(under_way.from, under_way.to, under_way.memory as f64);
            }
        }
        for ended in &state.ended {
            ground.shift(ended.on, -ended.threads, 0.0);
        }
        for placed in &state.placed {
            ground.shift(placed.on, placed.threads, placed.memory as f64);
        }
        if policy.objective == Objective::Opportunity {
            ground.find_top_load();
        }
        ground
    }

    /// How a node stands.
    pub(crate) fn stand(&self, node: NodeId) -> Option<&Stand> {
        self.stands.get(self.cluster.place_of(node)?)
    }

    /// The opportunity cost of a utilisation.
    pub(crate) fn cost(&self, utilisation: f64) -> f64 {
        self.base.powf(utilisation.min(64.0))
    }

    /// One move more.
    pub(crate) fn charge(&mut self, process: &Process, to: NodeId) {
        let (threads, memory) = (process.threads(), process.memory() as f64);
        self.shift(process.at, -threads, -memory);
        self.shift(to, threads, memory);
        self.set_out(process.at, to, memory);
    }

    fn set_out(&mut self, from: NodeId, to: NodeId, memory: f64) {
        self.under_way += 1;
        *self.pairs.entry((from, to)).or_default() += 1;
        if let Some(stand) = self.cluster.place_of(from).and_then(|place| self.stands.get_mut(place)) {
            stand.leaving += memory;
        }
    }

    /// Bytes under way from a node.
    pub(crate) fn leaving_bytes(&self, from: NodeId) -> f64 {
        self.stand(from).map_or(0.0, |stand| stand.leaving)
    }

    fn shift(&mut self, node: NodeId, threads: f64, memory: f64) {
        if let Some(stand) = self.cluster.place_of(node).and_then(|place| self.stands.get_mut(place)) {
            stand.runnable = (stand.runnable + threads).max(0.0);
            stand.free -= memory;
        }
    }

    /// Moves under way between two nodes.
    pub(crate) fn pair(&self, from: NodeId, to: NodeId) -> u32 {
        self.pairs.get(&(from, to)).copied().unwrap_or(0)
    }

    /// Moves under way from a node.
    pub(crate) fn leaving(&self, from: NodeId) -> u32 {
        self.pairs.range((from, NodeId(0))..=(from, NodeId(u16::MAX))).map(|(_, count)| count).sum()
    }

    /// Moves under way to a node.
    pub(crate) fn coming(&self, to: NodeId) -> u32 {
        self.pairs.iter().filter(|((_, other), _)| *other == to).map(|(_, count)| count).sum()
    }

    /// "The smallest power of two that is greater than the largest load seen" (the paper's L).
    fn find_top_load(&mut self) {
        let loads = self.cluster.nodes().iter().zip(&self.stands);
        let most = loads.map(|(node, stand)| node.load_of(stand.runnable)).fold(100.0, f64::max);
        self.top_load = (most / 100.0).log2().floor().exp2() * 200.0;
    }
}

/// Why nobody goes there, if so.
fn closed(node: &Node, me: bool, policy: &Policy) -> Option<Bar> {
    if !node.alive {
        Some(Bar::Dead)
    } else if node.age_ms > policy.max_age_ms {
        Some(Bar::OldNews)
    } else {
        (!node.takes_guests && !me).then_some(Bar::NoGuests)
    }
}

/// Bytes that a node keeps free.
#[must_use]
pub fn reserve(node: &Node, policy: &Policy) -> f64 {
    let least = (policy.least_reserve as f64).min(node.mem_total as f64 / 4.0);
    (node.mem_total as f64 * policy.reserve).max(least)
}
