//! Resolves node names given on the command line.

use crate::{Failure, client};
use tern_control::{RefusalKind, Reply, Request};
use tern_ids::NodeId;

/// The node with this number, or with this host name or alias in the cluster's map.
///
/// # Errors
/// If the map has no such name, or ternd, which holds the map, does not answer.
pub(crate) fn resolve(word: &str) -> Result<NodeId, Failure> {
    if word.starts_with(|c: char| c.is_ascii_digit())
        && let Ok(node) = crate::command::run::mosrun::options::parse_node(word)
    {
        return Ok(node);
    }
    match client::request(&Request::GetMap)? {
        Reply::Map(text) => find_in_map(&text, word),
        other => Err(client::unexpected_reply(&other)),
    }
}

/// Looks `word` up in the text of a map.
fn find_in_map(text: &str, word: &str) -> Result<NodeId, Failure> {
    let unknown = || {
        Failure::new(RefusalKind::NotFound, format!("no node {word} in the cluster's map"))
            .hint("tern status, to list the nodes")
    };
    let map = tern_node::map::Map::parse(text).map_err(|error| {
        Failure::new(RefusalKind::Internal, format!("ternd sent an invalid map: {error}"))
    })?;
    map.find(word).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_resolve_by_number_and_name() {
        assert_eq!(resolve("7").unwrap(), NodeId(7));
        let map = "1 alpha 2\n5 10.0.0.9 1\n";
        assert_eq!(find_in_map(map, "alpha").unwrap(), NodeId(1));
        assert_eq!(find_in_map(map, "10.0.0.9").unwrap(), NodeId(5));
        assert_eq!(find_in_map(map, "beta").unwrap_err().code, 1);
    }
}
