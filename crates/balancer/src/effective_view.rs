//! The view of the cluster, adjusted for decisions that it does not show yet.

use crate::candidate::Obstacle;
use crate::policy::{Objective, Policy};
use crate::process::ProcessSnapshot;
use crate::state::DecisionState;
use crate::view::{Cluster, NodeSnapshot};
use std::collections::{BTreeMap, BTreeSet};
use tern_ids::NodeId;

/// The base of the cost function is the number of nodes. In a cluster of two, loads of 1 and 10
/// would cost almost the same, so the base is at least this.
const MIN_COST_BASE: usize = 64;

/// The adjusted state of one node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EffectiveNode {
    /// Number of threads that run or wait for a CPU.
    pub(crate) runnable: f64,
    /// Bytes free once departing processes have left; negative if more has been promised than there
    /// is.
    pub(crate) free: f64,
    /// Bytes of the departing processes. These bytes are not available yet: if the target refuses a
    /// departing process, that process stays, and a process that had come in its place would fill
    /// the node.
    pub(crate) leaving: f64,
    /// Bytes that the node keeps free.
    pub(crate) reserve: f64,
    /// How fast its memory fills, in bytes a second, as observed by this home.
    pub(crate) fill_rate: f64,
    /// Why no process may move there, if none may.
    pub(crate) obstacle: Option<Obstacle>,
}

/// The adjusted state of all nodes; indices are those of the cluster's nodes.
#[derive(Debug)]
pub(crate) struct EffectiveView<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) policy: &'a Policy,
    pub(crate) now_ms: u64,
    pub(crate) nodes: Vec<EffectiveNode>,
    /// Number of moves under way between two nodes.
    moves_by_pair: BTreeMap<(NodeId, NodeId), u32>,
    /// Nodes about to run out of memory: their links are reserved for memory moves.
    pub(crate) filling_up: BTreeSet<NodeId>,
    /// Number of moves under way in all.
    pub(crate) under_way: u32,
    /// Base of opportunity costs: the number of nodes, or [`MIN_COST_BASE`] if that is larger.
    pub(crate) base: f64,
    /// Unit of load in opportunity costs, which no node's load exceeds.
    pub(crate) top_load: f64,
}

impl EffectiveNode {
    /// Bytes free now and not promised, above the reserve.
    pub(crate) fn available(&self) -> f64 {
        self.free - self.leaving - self.reserve
    }
}

impl<'a> EffectiveView<'a> {
    pub(crate) fn new(cluster: &'a Cluster, state: &DecisionState, policy: &'a Policy, now_ms: u64) -> Self {
        let effective = |node: &NodeSnapshot| EffectiveNode {
            runnable: node.runnable(),
            free: node.mem_free as f64,
            leaving: 0.0,
            reserve: memory_to_keep_free(node, policy),
            fill_rate: state.fill_rate(node.id),
            obstacle: node_obstacle(node, node.id == cluster.me(), policy),
        };
        let nodes: Vec<EffectiveNode> = cluster.nodes().iter().map(effective).collect();
        let mut view = Self {
            cluster,
            policy,
            now_ms,
            nodes,
            moves_by_pair: BTreeMap::new(),
            filling_up: BTreeSet::new(),
            under_way: 0,
            base: cluster.nodes().len().max(MIN_COST_BASE) as f64,
            top_load: 1.0,
        };
        for under_way in state.moves.values() {
            if under_way.credits(cluster, now_ms) {
                view.adjust(under_way.from, -under_way.threads, -(under_way.memory as f64));
            }
            if under_way.charges(cluster, now_ms) {
                view.adjust(under_way.to, under_way.threads, under_way.memory as f64);
            }
            if !under_way.arrived() {
                view.start_move(under_way.from, under_way.to, under_way.memory as f64);
            }
        }
        for ended in &state.ended {
            view.adjust(ended.on, -ended.threads, 0.0);
        }
        for placed in &state.placed {
            view.adjust(placed.on, placed.threads, placed.memory as f64);
        }
        if policy.objective == Objective::Opportunity {
            view.find_top_load();
        }
        view
    }

    /// The adjusted state of a node.
    pub(crate) fn node(&self, node: NodeId) -> Option<&EffectiveNode> {
        self.nodes.get(self.cluster.index_of(node)?)
    }

    /// The opportunity cost of a utilisation.
    pub(crate) fn cost(&self, utilisation: f64) -> f64 {
        self.base.powf(utilisation.min(64.0))
    }

    /// Charges one more move.
    pub(crate) fn charge(&mut self, process: &ProcessSnapshot, to: NodeId) {
        let (threads, memory) = (process.threads(), process.memory() as f64);
        self.adjust(process.at, -threads, -memory);
        self.adjust(to, threads, memory);
        self.start_move(process.at, to, memory);
    }

    fn start_move(&mut self, from: NodeId, to: NodeId, memory: f64) {
        self.under_way += 1;
        *self.moves_by_pair.entry((from, to)).or_default() += 1;
        if let Some(effective) = self.cluster.index_of(from).and_then(|index| self.nodes.get_mut(index)) {
            effective.leaving += memory;
        }
    }

    /// Bytes under way from a node.
    pub(crate) fn leaving_bytes(&self, from: NodeId) -> f64 {
        self.node(from).map_or(0.0, |effective| effective.leaving)
    }

    fn adjust(&mut self, node: NodeId, threads: f64, memory: f64) {
        if let Some(effective) = self.cluster.index_of(node).and_then(|index| self.nodes.get_mut(index)) {
            effective.runnable = (effective.runnable + threads).max(0.0);
            effective.free -= memory;
        }
    }

    /// Number of moves under way between two nodes.
    pub(crate) fn moves_between(&self, from: NodeId, to: NodeId) -> u32 {
        self.moves_by_pair.get(&(from, to)).copied().unwrap_or(0)
    }

    /// Number of moves under way from a node.
    pub(crate) fn moves_from(&self, from: NodeId) -> u32 {
        self.moves_by_pair.range((from, NodeId(0))..=(from, NodeId(u16::MAX))).map(|(_, count)| count).sum()
    }

    /// Number of moves under way to a node.
    pub(crate) fn moves_to(&self, to: NodeId) -> u32 {
        self.moves_by_pair.iter().filter(|((_, other), _)| *other == to).map(|(_, count)| count).sum()
    }

    /// "The smallest power of two that is greater than the largest load seen" (L in the paper that
    /// [`Objective::Opportunity`] names), in units of 100.
    fn find_top_load(&mut self) {
        let loads = self.cluster.nodes().iter().zip(&self.nodes);
        let max_load = loads.map(|(node, effective)| node.load_of(effective.runnable)).fold(100.0, f64::max);
        self.top_load = (max_load / 100.0).log2().floor().exp2() * 200.0;
    }
}

/// Why no process may move to a node, if none may.
fn node_obstacle(node: &NodeSnapshot, is_me: bool, policy: &Policy) -> Option<Obstacle> {
    if !node.alive {
        Some(Obstacle::Dead)
    } else if node.age_ms > policy.max_age_ms {
        Some(Obstacle::Stale)
    } else {
        (!node.takes_guests && !is_me).then_some(Obstacle::NoGuests)
    }
}

/// Bytes that a node keeps free.
#[must_use]
pub fn memory_to_keep_free(node: &NodeSnapshot, policy: &Policy) -> f64 {
    let min = (policy.min_reserve as f64).min(node.mem_total as f64 / 4.0);
    (node.mem_total as f64 * policy.reserve_fraction).max(min)
}
