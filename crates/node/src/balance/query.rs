//! Questions to the balancer: why a process is where it is, and which node suits it best.

use crate::cluster::view;
use crate::node::Node;
use crate::os::clock::boot_ms;
use crate::os::sync::lock;
use tern_balancer::{Explanation, Obstacle, PlacementRequest, ProcessSnapshot, explain, place};
use tern_control::{Advice, Refusal, RefusalKind};
use tern_ids::{HomePid, NodeId};

/// Explains why a process is where it is, and how each node rates for it.
pub(crate) fn why(node: &Node, pid: HomePid) -> Result<(ProcessSnapshot, Explanation), Refusal> {
    let candidates = lock(&node.balancing.candidates);
    let Some(candidate) = candidates.iter().find(|candidate| candidate.process.pid == pid) else {
        let message =
            format!("process {pid} is not balanced: neither it nor an ancestor was started with mosrun");
        return Err(Refusal::new(RefusalKind::NotFound, message)
            .hint("start it with mosrun, or add its user to balance_users in ternd.toml"));
    };
    let process = candidate.process.clone();
    drop(candidates);
    let view = view::view(node);
    let state = lock(&node.balancing.state);
    let why = explain(&view, &process, &state, &node.balancing.policy, boot_ms());
    Ok((process, why))
}

/// The node that suits a process better than its present one; `None` if there is none.
///
/// # Errors
/// If the process is not balanced.
pub(crate) fn better_node(node: &Node, pid: HomePid) -> Result<Option<NodeId>, Refusal> {
    let (_, why) = why(node, pid)?;
    Ok(why.best().map(|candidate| candidate.node).filter(|to| *to != why.at))
}

/// The best other node for a process that must leave, even if it does not gain; `None` if no node
/// can take it.
///
/// # Errors
/// If the process is not balanced.
pub(crate) fn other_node(node: &Node, pid: HomePid) -> Result<Option<NodeId>, Refusal> {
    let (_, why) = why(node, pid)?;
    let may = |obstacle| {
        matches!(obstacle, None | Some(Obstacle::NotFaster | Obstacle::NotWorthwhile | Obstacle::JustLeft))
    };
    // The candidates are sorted, the fastest first.
    let there = why.candidates.iter().filter(|candidate| candidate.node != why.at && may(candidate.obstacle));
    Ok(there.map(|candidate| candidate.node).next())
}

/// The best node for a program that starts; the program is charged to that node in advance.
pub(crate) fn best_node_for_start(node: &Node, advice: &Advice) -> Option<NodeId> {
    let placement = PlacementRequest {
        claim: advice.memory.unwrap_or(0),
        allowed: advice.only.as_ref().map(|only| only.iter().copied().collect()),
        forbidden: advice.not.iter().copied().collect(),
        ..PlacementRequest::default()
    };
    let view = view::view(node);
    let balancing = &node.balancing;
    let mut state = lock(&balancing.state);
    place(&view, &placement, &mut state, &balancing.policy, boot_ms(), rand::random())
}
