//! What follows from a change of the map: links, shims and tokens of nodes that are no longer members.

use crate::cluster::map::Map;
use crate::node::Node;
use crate::shim;
use std::thread;
use tern_control::ShimRequest;
use tern_ids::NodeId;

/// Makes the members of this map the only ones. Links with others are closed at once. Guests from them
/// end here, and own processes that are there are lost.
pub(crate) fn apply_changes(node: &Node, old: &Map, new: &Map) {
    let (before, now) = (old.keys(), new.keys());
    let removed: Vec<NodeId> =
        before.iter().filter(|(id, key)| now.get(id) != Some(key)).map(|(id, _)| *id).collect();
    let joined = now.iter().filter(|(id, key)| before.get(id) != Some(key)).map(|(id, _)| *id);
    for id in joined.filter(|id| *id != node.me()) {
        tracing::info!(node = %id, version = new.version(), "a machine has become a member of the cluster");
    }
    node.identity.members().set(now);
    for id in &removed {
        tracing::info!(node = %id, version = new.version(), "a machine is no longer a member of the cluster");
    }
    if removed.is_empty() {
        return;
    }
    // A token that it knows must not bring it back.
    if node.authority.is_some()
        && let Err(error) = node.tokens.forget_all()
    {
        tracing::error!(%error, "tokens that a removed node may know are still valid");
    }
    let run_dir = node.config.run_dir.clone();
    let tell_shims = move || {
        for id in removed {
            shim::request_all(&run_dir, &ShimRequest::NodeRemoved { node: id });
        }
    };
    if let Err(error) = thread::Builder::new().name("removal".into()).spawn(tell_shims) {
        tracing::error!(%error, "processes of a removed node may continue");
    }
}
