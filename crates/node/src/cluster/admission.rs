//! Admission of machines that join. The founding node does this because it has the authority.

use crate::cluster::users::UserList;
use crate::node::Node;
use crate::peer::client;
use crate::peer::message::{
    Challenge, JoinReply, JoinRequest, PROTOCOL, PeerError, check_protocol, receive, send,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::{Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_wire::{Link, NodeKey, key_fingerprint};

/// Timeout of the whole exchange.
const JOIN_TIMEOUT: Duration = Duration::from_secs(20);

/// Serves a machine that has connected in order to join.
///
/// # Errors
/// If a message is malformed or does not arrive in time. A refusal is not an error.
pub(crate) fn serve_join(node: &Arc<Node>, link: &mut Link) -> Result<(), PeerError> {
    let deadline = Instant::now() + JOIN_TIMEOUT;
    let challenge = Challenge { protocol: PROTOCOL, nonce: rand::random() };
    send(link, &challenge, deadline)?;
    let request: JoinRequest = receive(link, deadline)?;
    check_protocol(request.protocol)?;
    let reply = match admit(node, &challenge, &request) {
        Ok(reply) => reply,
        Err(refusal) => {
            tracing::warn!(address = request.address, %refusal, "a machine was not admitted");
            JoinReply::Refused(refusal)
        }
    };
    send(link, &reply, deadline)?;
    if let JoinReply::Admitted { node: new, .. } = reply {
        tracing::info!(%new, address = request.address, "a new node");
        client::send_map(node, node.other_nodes().into_iter().filter(|other| *other != new).collect());
    }
    Ok(())
}

fn admit(node: &Arc<Node>, challenge: &Challenge, request: &JoinRequest) -> Result<JoinReply, Refusal> {
    let authority = node.authority.as_ref().ok_or_else(|| internal("this node does not admit machines"))?;
    let token = |problem| match problem {
        Ok(refused) => Refusal::new(RefusalKind::NotAllowed, format!("{refused}"))
            .hint(format!("tern token, on node {}", node.me())),
        Err(e) => internal(format!("the tokens cannot be read: {e}")),
    };
    // Checked first, so that only the owner of a token learns anything about this cluster.
    node.tokens.check(&request.secret).map_err(token)?;
    if !NodeKey::has_signed(&request.public_key, &challenge.signed_bytes(&request.secret), &request.signature)
    {
        return Err(Refusal::new(RefusalKind::BadRequest, "the challenge is not signed with the new key"));
    }
    if !node.map().contains(node.me()) {
        let message = format!("node {} has left the cluster", node.me());
        return Err(Refusal::new(RefusalKind::Unavailable, message).hint("setpe -w, on that node"));
    }
    let mut admitted = None;
    let map = node.change_map(|map| {
        let (id, map) = assign_number(map, request)?;
        let certificate = authority.issue(id, &request.public_key).map_err(internal)?;
        // Used up only now: earlier failures leave the token valid.
        node.tokens.use_once(&request.secret).map_err(token)?;
        admitted = Some((id, certificate));
        Ok(map)
    })?;
    let (id, certificate) = admitted.ok_or_else(|| internal("no machine was admitted"))?;
    Ok(JoinReply::Admitted {
        node: id,
        certificate: certificate.to_vec(),
        authority: authority.certificate().to_vec(),
        map: map.text().into(),
        warnings: UserList::of_this_node().differences_from(&request.users),
    })
}

/// The number that the machine gets, and the map that binds it to the machine's key. No number of another
/// machine is given to it.
fn assign_number(
    map: &crate::cluster::map::Map,
    request: &JoinRequest,
) -> Result<(NodeId, crate::cluster::map::Map), Refusal> {
    let bad = |message: String| Refusal::new(RefusalKind::BadRequest, message);
    let key = key_fingerprint(&request.public_key);
    let (id, map) = place(map, request)?;
    if let Some((other, _)) = map.keys().into_iter().find(|(other, known)| *known == key && *other != id) {
        return Err(bad(format!("the key of this machine is that of node {other}")).hint(format!(
            "tern remove {other}, on the founder; or delete node.key here, if node {other} is another machine"
        )));
    }
    if map.key(id).is_some_and(|known| known != key) {
        return Err(bad(format!("another machine with this address joined as node {id}"))
            .hint(format!("tern remove {id}, on the founder, if it was installed anew; then a new token")));
    }
    Ok((id, map.with_key(id, key)))
}

/// The number for this address, and the map that has both.
fn place(
    map: &crate::cluster::map::Map,
    request: &JoinRequest,
) -> Result<(NodeId, crate::cluster::map::Map), Refusal> {
    let bad = |message: String| Refusal::new(RefusalKind::BadRequest, message);
    // A machine that joins again keeps its number, and one may join with a number that setpe has
    // reserved for it.
    if let Some(known) = map.find(&request.address)
        && request.node.is_none_or(|wanted| wanted == known)
    {
        let version = map.version().saturating_add(1);
        return Ok((known, map.clone().with_version(version)));
    }
    if let Some(known) = map.find(&request.address) {
        let message = format!("{} is node {known} already", request.address);
        return Err(bad(message).hint(format!("--node {known}, to be that node")));
    }
    let free = map.lowest_free_number().ok_or_else(|| bad("the cluster has no free number".into()))?;
    let id = request.node.unwrap_or(free);
    if id.0 == 0 {
        return Err(bad("nodes are 1 to 65535".into()));
    }
    if map.contains(id) {
        let message = format!("there is a node {id} already, at another address");
        return Err(bad(message).hint(format!("--node {free}, which is free")));
    }
    // A name that another node has, or that is invalid, is left out.
    let named = request.name.as_deref().and_then(|name| map.with_node(id, &request.address, Some(name)).ok());
    let map = match named {
        Some(map) => map,
        None => map.with_node(id, &request.address, None).map_err(|e| {
            // Without the line number, which means nothing to the applicant.
            let message = e.to_string();
            bad(format!(
                "{}: {}",
                request.address,
                message.split_once(": ").map_or(&*message, |(_, rest)| rest)
            ))
        })?,
    };
    Ok((id, map))
}

fn internal(message: impl ToString) -> Refusal {
    Refusal::new(RefusalKind::Internal, message.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::map::Map;

    fn request(address: &str, node: Option<u16>, name: &str) -> JoinRequest {
        JoinRequest {
            protocol: PROTOCOL,
            secret: [0; 16],
            public_key: b"a".to_vec(),
            signature: Vec::new(),
            node: node.map(NodeId),
            address: address.into(),
            name: Some(name.into()),
            users: UserList::default(),
        }
    }

    #[test]
    fn new_node_gets_requested_or_lowest_free_number() {
        let map = Map::parse("1 10.0.0.1 1\n2 10.0.0.2 1\n2 beta ALIAS\n").unwrap();
        let (id, new) = assign_number(&map, &request("10.0.0.3:7101", None, "gamma")).unwrap();
        assert_eq!((id, new.find("gamma"), new.version()), (NodeId(3), Some(NodeId(3)), 1));
        let (id, _) = assign_number(&map, &request("10.0.0.3:7101", Some(9), "gamma")).unwrap();
        assert_eq!(id, NodeId(9));
        let (id, new) = assign_number(&map, &request("10.0.0.3:7101", None, "beta")).unwrap();
        assert_eq!((id, new.find("beta")), (NodeId(3), Some(NodeId(2))), "a taken name is left out");
    }

    #[test]
    fn returning_node_keeps_its_number_and_taken_numbers_are_refused() {
        let map = Map::parse("1 10.0.0.1 1\n2 10.0.0.2 1\n").unwrap();
        for wanted in [None, Some(2)] {
            let (id, new) = assign_number(&map, &request("10.0.0.2:7101", wanted, "x")).unwrap();
            assert_eq!((id, new.nodes(), new.version()), (NodeId(2), map.nodes(), 1));
            assert_eq!(new.key(id), Some(key_fingerprint(b"a")), "the number waited for a machine");
            let again = assign_number(&new, &request("10.0.0.2:7101", wanted, "x")).unwrap();
            assert_eq!((again.0, again.1.version()), (NodeId(2), 2));
        }
        let refusal = assign_number(&map, &request("10.0.0.3:7101", Some(2), "x")).unwrap_err();
        assert!(refusal.message.contains("node 2 already") && refusal.hint.unwrap().contains("--node 3"));
        let refusal = assign_number(&map, &request("10.0.0.2:7101", Some(5), "x")).unwrap_err();
        assert_eq!(refusal.message, "10.0.0.2:7101 is node 2 already");
        for address in ["", "a b", "a\n9 b 1", "a:0", "1.2.3"] {
            assert!(assign_number(&map, &request(address, None, "x")).is_err(), "{address:?}");
        }
        assert!(assign_number(&map, &request("a", Some(0), "x")).is_err());
    }
    /// The address and the name are written to the map, which the authority signs.
    #[test]
    fn machine_adds_one_line_to_the_map() {
        let map = Map::parse("1 10.0.0.1 1\n").unwrap().with_key(NodeId(1), key_fingerprint(b"founder"));
        let key = format!("# key 1 {}", "00".repeat(32));
        let evil = [format!("a\t1\n{key}\n7 b"), format!("a 1\n{key}\n7 b"), "a#".into(), "a\r1".into()];
        for word in &evil {
            let refusal = assign_number(&map, &request(word, None, "x"));
            assert!(refusal.is_err(), "{word:?}: {refusal:?}");
            let (id, new) = assign_number(&map, &request("10.0.0.2:7101", None, word)).unwrap();
            assert_eq!((id, new.nodes().len(), new.key(NodeId(1))), (NodeId(2), 2, map.key(NodeId(1))));
        }
        let alias = format!("z ALIAS\n{key}\n9 c");
        let (_, new) = assign_number(&map, &request("10.0.0.2:7101", None, &alias)).unwrap();
        assert_eq!((new.nodes().len(), new.key(NodeId(1))), (2, map.key(NodeId(1))));
    }

    #[test]
    fn token_makes_no_machine_another_node() {
        let map = Map::parse("1 10.0.0.1 1\n2 10.0.0.2 1\n").unwrap();
        let map = map.with_key(NodeId(2), key_fingerprint(b"another"));
        let refusal = assign_number(&map, &request("10.0.0.2:7101", None, "x")).unwrap_err();
        assert_eq!(refusal.message, "another machine with this address joined as node 2");
        // Nor does a machine get two numbers.
        let map = map.with_key(NodeId(1), key_fingerprint(b"a"));
        let refusal = assign_number(&map, &request("10.0.0.9:7101", None, "x")).unwrap_err();
        assert_eq!(refusal.message, "the key of this machine is that of node 1");
    }
}
