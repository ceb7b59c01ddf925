//! Applies a change of the map to the links and shims of nodes that are no longer members.

use crate::cluster::map::Map;
use crate::node::Node;
use crate::process::process_list;
use crate::shim;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use tern_control::ShimRequest;
use tern_ids::NodeId;

/// The nodes that are members by the first map, and not, or with another key, by the second.
pub(crate) fn removed(old: &Map, new: &Map) -> Vec<NodeId> {
    let gone = old.keys().into_iter().filter(|(node, key)| new.key(*node) != Some(*key));
    gone.map(|(node, _)| node).collect()
}

/// Makes the members of this map the only ones. Links with others are closed at once. Guests from them
/// end here, and own processes that are there are lost.
pub(crate) fn apply_changes(node: &Node, old: &Map, new: &Map) {
    let (removed, joined) = (removed(old, new), removed(new, old));
    node.identity.members().set(new.keys());
    let version = new.version();
    for id in joined.iter().filter(|id| **id != node.me()) {
        tracing::info!(node = %id, version, "a machine has become a member of the cluster");
    }
    for id in &removed {
        tracing::info!(node = %id, version, "a machine is no longer a member of the cluster");
    }
    if removed.is_empty() {
        return;
    }
    let run_dir = node.config.run_dir.clone();
    let tell = move || {
        for id in removed {
            shim::request_all(&run_dir, &ShimRequest::NodeRemoved { node: id });
        }
    };
    if let Err(error) = thread::Builder::new().name("removal".into()).spawn(tell) {
        tracing::error!(%error, "processes of a removed node may continue");
    }
}

/// Ends guests from nodes, and processes on nodes, that were removed while ternd did not run. For a
/// thread of its own.
pub(crate) fn settle(node: &Arc<Node>) {
    let rows = process_list::from_shims(node);
    let nodes: BTreeSet<NodeId> = rows.iter().flat_map(|row| [row.from, row.r#where]).flatten().collect();
    for id in nodes.into_iter().filter(|id| *id != node.me() && !node.identity.members().contains(*id)) {
        shim::request_all(&node.config.run_dir, &ShimRequest::NodeRemoved { node: id });
    }
}
