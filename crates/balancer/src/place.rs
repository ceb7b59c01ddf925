//! The best node for a program that starts (`mosrun -b`, `bestnode`).

use crate::effective_view::EffectiveView;
use crate::policy::Policy;
use crate::rng::Rng;
use crate::state::DecisionState;
use crate::view::Cluster;
use std::collections::BTreeSet;
use tern_ids::NodeId;

/// A program to start.
#[derive(Debug, Clone, PartialEq)]
pub struct PlacementRequest {
    /// Number of threads that it will keep busy; 1 if unknown.
    pub threads: f64,
    /// Bytes that it will need (`-m`).
    pub claim: u64,
    /// Nodes to choose from; `None`: all but the forbidden ones.
    pub allowed: Option<BTreeSet<NodeId>>,
    /// Nodes where it must not run.
    pub forbidden: BTreeSet<NodeId>,
}

impl Default for PlacementRequest {
    fn default() -> Self {
        Self { threads: 1.0, claim: 0, allowed: None, forbidden: BTreeSet::new() }
    }
}

/// Chooses a node at random among those within 5 units of load of the best, as MOSIX does, and
/// charges the program to `state`, so that a hundred programs started in one second do not all go
/// to one node. `None` if no permitted node can take the program.
pub fn place(
    cluster: &Cluster,
    placement: &PlacementRequest,
    state: &mut DecisionState,
    policy: &Policy,
    now_ms: u64,
    seed: u64,
) -> Option<NodeId> {
    let cluster = &*state.with_refusals(cluster, now_ms);
    let view = EffectiveView::new(cluster, state, policy, now_ms);
    let threads = if placement.threads.is_finite() { placement.threads.clamp(0.0, 65_536.0) } else { 1.0 };
    let permitted = |node: NodeId| {
        !placement.forbidden.contains(&node)
            && placement.allowed.as_ref().is_none_or(|allowed| allowed.contains(&node))
    };
    // The first number is a load: 100 if a thread of the program gets a standard CPU.
    let mut open: Vec<(f64, NodeId)> = cluster
        .nodes()
        .iter()
        .zip(&view.nodes)
        .filter(|(node, effective)| {
            let room = effective.available() >= placement.claim as f64 || node.mem_total == 0;
            effective.obstacle.is_none()
                && permitted(node.id)
                && room
                && node.mem_pressure <= policy.max_pressure
        })
        .map(|(node, effective)| (100.0 / node.share(effective.runnable + threads), node.id))
        .collect();
    let best = open.iter().map(|(load, _)| *load).fold(f64::INFINITY, f64::min);
    open.retain(|(load, _)| *load <= best + policy.equivalent_load);
    let (_, node) = *open.get(Rng::new(seed).below(open.len()))?;
    state.placed(node, threads, placement.claim, now_ms);
    Some(node)
}
