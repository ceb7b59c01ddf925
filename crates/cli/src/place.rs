//! The names that people give to nodes.

use crate::{Failure, client};
use tern_control::{RefusalKind, Reply, Request};
use tern_ids::NodeId;

/// The node that this word names: a number, or else a host or alias of the cluster's map.
///
/// # Errors
/// If the map has no such name, or ternd, which has the map, does not answer.
pub fn node(word: &str) -> Result<NodeId, Failure> {
    if word.starts_with(|c: char| c.is_ascii_digit())
        && let Ok(node) = crate::command::mosrun::options::node(word)
    {
        return Ok(node);
    }
    match client::ask(&Request::GetMap)? {
        Reply::Map(text) => in_map(&text, word),
        other => Err(client::unexpected(&other)),
    }
}

/// The same in this map.
fn in_map(text: &str, word: &str) -> Result<NodeId, Failure> {
    let unknown = || {
        Failure::new(RefusalKind::NotFound, format!("no node {word} in the cluster's map"))
            .hint("tern status, which lists the nodes")
    };
    let map = tern_node::map::Map::parse(text).map_err(|error| {
        Failure::new(RefusalKind::Internal, format!("ternd's map does not read: {error}"))
    })?;
    map.find(word).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_numbers_and_names() {
        assert_eq!(node("7").unwrap(), NodeId(7));
        let map = "1 alpha 2\n5 10.0.0.9 1\n";
        assert_eq!(in_map(map, "alpha").unwrap(), NodeId(1));
        assert_eq!(in_map(map, "10.0.0.9").unwrap(), NodeId(5));
        assert_eq!(in_map(map, "beta").unwrap_err().code, 1);
    }
}
