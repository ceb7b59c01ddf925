//! Cutting and restoring cables. A cut is silent, like a pulled cable: neither end is notified.

use crate::error::{LabError, Result};
use crate::lab::state::LabState;
use crate::network::iproute2::{self, Program};
use crate::network::layout::Port;
use crate::network::link_spec::Topology;
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
    pub(crate) fn check(self, state: &LabState) -> Result<()> {
        match self {
            Self::Node(node) => state.node(node).map(|_| ()),
            Self::Pair(a, b) | Self::OneWay(a, b) if a == b => {
                Err(LabError::BadOption(format!("node {a} has no cable to itself")))
            }
            Self::OneWay(..) if state.link.topology == Topology::P2p => {
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
pub(crate) fn apply(state: &mut LabState, cuts: BTreeSet<Cable>) -> Result<()> {
    let layout = state.layout();
    let switch = state.switch_process()?;
    let up = |p: &&Port| state.node(p.node).is_ok_and(|n| n.init.is_some());
    let ports: Vec<&Port> = layout.ports.iter().filter(up).collect();
    let mut blocks = Vec::new();
    for to in &ports {
        for from in layout.ports.iter().filter(|f| f.node != to.node) {
            let (is_now, will_be) =
                (is_blocked(state, &state.cuts, from, to), is_blocked(state, &cuts, from, to));
            if is_now != will_be {
                blocks.push(layout.block_line(from, to, will_be));
            }
        }
    }
    iproute2::run_batch(switch, Program::Tc, &blocks)?;
    let lines: Vec<_> = ports.iter().map(|p| port_state_line(p, &cuts)).collect();
    iproute2::run_batch(switch, Program::Ip, &lines)?;
    state.cuts = cuts;
    Ok(())
}

/// Applies the cuts to a node whose ports were just created: first the blocks, then the links that
/// are not cut.
pub(crate) fn connect_node(state: &LabState, node: u16) -> Result<()> {
    let layout = state.layout();
    let switch = state.switch_process()?;
    let mut blocks = Vec::new();
    for to in layout.ports_of(node) {
        let from =
            layout.ports.iter().filter(|from| from.node != node && is_blocked(state, &state.cuts, from, to));
        blocks.extend(from.map(|from| layout.block_line(from, to, true)));
    }
    iproute2::run_batch(switch, Program::Tc, &blocks)?;
    let lines: Vec<_> = layout.ports_of(node).map(|p| port_state_line(p, &state.cuts)).collect();
    iproute2::run_batch(switch, Program::Ip, &lines)
}

/// Takes all of a node's ports down before the node is killed, so that it sends no last packet.
pub(crate) fn disable_ports(state: &LabState, node: u16) -> Result<()> {
    let lines: Vec<_> = state.layout().ports_of(node).map(|p| format!("link set {} down", p.port)).collect();
    iproute2::run_batch(state.switch_process()?, Program::Ip, &lines)
}

fn port_state_line(port: &Port, cuts: &BTreeSet<Cable>) -> String {
    let mut cut = cuts.contains(&Cable::Node(port.node));
    if let Some(peer) = port.peer {
        cut |= cuts.contains(&Cable::between(port.node, peer));
    }
    format!("link set {} {}", port.port, if cut { "down" } else { "up" })
}

/// Whether frames on a shared segment are blocked in this direction.
fn is_blocked(state: &LabState, cuts: &BTreeSet<Cable>, from: &Port, to: &Port) -> bool {
    let (from, to) = (from.node, to.node);
    state.link.topology != Topology::P2p
        && (cuts.contains(&Cable::between(from, to)) || cuts.contains(&Cable::OneWay(from, to)))
}
