//! Cutting and restoring cables. A cut is silent, like a pulled cable: neither end is notified.

use crate::error::{LabError, Result};
use crate::link::Shape;
use crate::netns::{self, Program};
use crate::state::State;
use crate::topology::Port;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A cable, or a direction of one, that can be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cable {
    /// All of a node's cables.
    Node(u16),
    /// The traffic directly between two nodes, in both directions.
    Pair(u16, u16),
    /// The traffic directly from the first node to the second, but not back. A `p2p` link, with a
    /// cable for each pair of nodes, does not support this.
    OneWay(u16, u16),
}

impl Cable {
    /// The pair of these two nodes, in either order.
    pub fn between(a: u16, b: u16) -> Self {
        Self::Pair(a.min(b), a.max(b))
    }

    /// Checks that the nodes exist and differ.
    pub(crate) fn check(self, state: &State) -> Result<()> {
        match self {
            Self::Node(node) => state.node(node).map(|_| ()),
            Self::Pair(a, b) | Self::OneWay(a, b) if a == b => {
                Err(LabError::BadOption(format!("node {a} has no cable to itself")))
            }
            Self::OneWay(..) if state.link.shape == Shape::P2p => {
                Err(LabError::BadOption("a p2p cable can only be cut in both directions".to_owned()))
            }
            Self::Pair(a, b) | Self::OneWay(a, b) => state.node(a).and(state.node(b)).map(|_| ()),
        }
    }

    /// Whether one end of the cable is at this node.
    pub(crate) fn touches(self, node: u16) -> bool {
        match self {
            Self::Node(n) => n == node,
            Self::Pair(a, b) | Self::OneWay(a, b) => a == node || b == node,
        }
    }
}

/// Makes the network match `cuts`. `state` holds the current cuts, and is updated to match.
pub(crate) fn change(state: &mut State, cuts: BTreeSet<Cable>) -> Result<()> {
    let plan = state.plan();
    let switch = state.switch()?;
    let up = |p: &&Port| state.node(p.node).is_ok_and(|n| n.init.is_some());
    let ports: Vec<&Port> = plan.ports.iter().filter(up).collect();
    let mut blocks = Vec::new();
    for to in &ports {
        for from in plan.ports.iter().filter(|f| f.node != to.node) {
            let (was, shall) = (blocked(state, &state.cuts, from, to), blocked(state, &cuts, from, to));
            if was != shall {
                blocks.push(plan.block_line(from, to, shall));
            }
        }
    }
    netns::batch(switch, Program::Tc, &blocks)?;
    let lines: Vec<_> = ports.iter().map(|p| port_line(p, &cuts)).collect();
    netns::batch(switch, Program::Ip, &lines)?;
    state.cuts = cuts;
    Ok(())
}

/// Applies the cuts to a node whose ports were just created: first the blocks, then the links that
/// are not cut.
pub(crate) fn connect(state: &State, node: u16) -> Result<()> {
    let plan = state.plan();
    let switch = state.switch()?;
    let mut blocks = Vec::new();
    for to in plan.ports_of(node) {
        let from =
            plan.ports.iter().filter(|from| from.node != node && blocked(state, &state.cuts, from, to));
        blocks.extend(from.map(|from| plan.block_line(from, to, true)));
    }
    netns::batch(switch, Program::Tc, &blocks)?;
    let lines: Vec<_> = plan.ports_of(node).map(|p| port_line(p, &state.cuts)).collect();
    netns::batch(switch, Program::Ip, &lines)
}

/// Takes all of a node's ports down before the node is killed, so that it sends no last packet.
pub(crate) fn silence(state: &State, node: u16) -> Result<()> {
    let lines: Vec<_> = state.plan().ports_of(node).map(|p| format!("link set {} down", p.port)).collect();
    netns::batch(state.switch()?, Program::Ip, &lines)
}

fn port_line(port: &Port, cuts: &BTreeSet<Cable>) -> String {
    let mut cut = cuts.contains(&Cable::Node(port.node));
    if let Some(peer) = port.peer {
        cut |= cuts.contains(&Cable::between(port.node, peer));
    }
    format!("link set {} {}", port.port, if cut { "down" } else { "up" })
}

/// Whether frames on a shared segment are blocked in this direction.
fn blocked(state: &State, cuts: &BTreeSet<Cable>, from: &Port, to: &Port) -> bool {
    let (from, to) = (from.node, to.node);
    state.link.shape != Shape::P2p
        && (cuts.contains(&Cable::between(from, to)) || cuts.contains(&Cable::OneWay(from, to)))
}
