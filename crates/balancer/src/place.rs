//! The best node for a program that starts (`mosrun -b`, `bestnode`).

use crate::ground::Ground;
use crate::policy::Policy;
use crate::seed::Chance;
use crate::state::State;
use crate::view::Cluster;
use std::collections::BTreeSet;
use tern_ids::NodeId;

/// What is to start.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// Threads that it will keep busy; 1 if nobody knows.
    pub threads: f64,
    /// Bytes that it will need (`-m`).
    pub claim: u64,
    /// Nodes to choose from; `None`: all but the forbidden ones.
    pub allowed: Option<BTreeSet<NodeId>>,
    /// Nodes where it must not run.
    pub forbidden: BTreeSet<NodeId>,
}

impl Default for Placement {
    fn default() -> Self {
        Self { threads: 1.0, claim: 0, allowed: None, forbidden: BTreeSet::new() }
    }
}

/// A node for it: at random among those within 5 units of load of the best (ALG-23), and charged to `state`, so
/// that a hundred programs in one second do not all start on one node. `None` if no node may and can take it.
pub fn place(
    cluster: &Cluster,
    placement: &Placement,
    state: &mut State,
    policy: &Policy,
    now_ms: u64,
    seed: u64,
) -> Option<NodeId> {
    let cluster = &*state.informed(cluster, now_ms);
    let ground = Ground::new(cluster, state, policy, now_ms);
    let threads = if placement.threads.is_finite() { placement.threads.clamp(0.0, 65_536.0) } else { 1.0 };
    let permitted = |node: NodeId| {
        !placement.forbidden.contains(&node)
            && placement.allowed.as_ref().is_none_or(|allowed| allowed.contains(&node))
    };
    // 100 for a thread that gets a standard CPU; the same unit as load.
    let mut open: Vec<(f64, NodeId)> = cluster
        .nodes()
        .iter()
        .zip(&ground.stands)
        .filter(|(node, stand)| {
            let room = stand.room() >= placement.claim as f64 || node.mem_total == 0;
            stand.bar.is_none() && permitted(node.id) && room && node.mem_pressure <= policy.full_pressure
        })
        .map(|(node, stand)| (100.0 / node.share(stand.runnable + threads), node.id))
        .collect();
    let best = open.iter().map(|(load, _)| *load).fold(f64::INFINITY, f64::min);
    open.retain(|(load, _)| *load <= best + policy.like_best_load);
    let (_, node) = *open.get(Chance::new(seed).below(open.len()))?;
    state.placed(node, threads, placement.claim, now_ms);
    Some(node)
}
