//! Admitting machines that join; the founding node does it, as it has the authority.

use crate::message::{Admission, Application, Challenge, PROTOCOL, TalkError, check_protocol, hear, say};
use crate::peers;
use crate::state::Node;
use crate::users::Users;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::{Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_wire::{Link, NodeKey};

/// How long the whole conversation may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Speaks with a machine that has connected in order to join.
///
/// # Errors
/// If it says something that is not understood. A refusal is none.
pub(crate) fn converse(node: &Arc<Node>, link: &mut Link) -> Result<(), TalkError> {
    let deadline = Instant::now() + PATIENCE;
    let challenge = Challenge { protocol: PROTOCOL, nonce: rand::random() };
    say(link, &challenge, deadline)?;
    let application: Application = hear(link, deadline)?;
    check_protocol(application.protocol)?;
    let admission = match admit(node, &challenge, &application) {
        Ok(admission) => admission,
        Err(refusal) => {
            tracing::warn!(address = application.address, %refusal, "a machine was not admitted");
            Admission::Refused(refusal)
        }
    };
    say(link, &admission, deadline)?;
    if let Admission::Admitted { node: new, .. } = admission {
        tracing::info!(%new, address = application.address, "a new node");
        peers::spread(node, node.others().into_iter().filter(|other| *other != new).collect());
    }
    Ok(())
}

fn admit(node: &Arc<Node>, challenge: &Challenge, asked: &Application) -> Result<Admission, Refusal> {
    let authority = node.authority.as_ref().ok_or_else(|| internal("this node admits nobody"))?;
    let token = |problem| match problem {
        Ok(refused) => Refusal::new(RefusalKind::NotAllowed, format!("{refused}"))
            .hint(format!("tern token, on node {}", node.me())),
        Err(e) => internal(format!("the tokens cannot be read: {e}")),
    };
    // Before anything is said about this cluster.
    node.tokens.check(&asked.secret).map_err(token)?;
    if !NodeKey::has_signed(&asked.public_key, &challenge.to_sign(&asked.secret), &asked.signature) {
        return Err(Refusal::new(RefusalKind::BadRequest, "the new key has not signed the challenge"));
    }
    let mut admitted = None;
    let map = node.change_map(|map| {
        let (id, map) = place(map, asked)?;
        let certificate = authority.issue(id, &asked.public_key).map_err(internal)?;
        // Only now: whatever was wrong until here has not cost the token.
        node.tokens.take(&asked.secret).map_err(token)?;
        admitted = Some((id, certificate));
        Ok(map)
    })?;
    let (id, certificate) = admitted.ok_or_else(|| internal("nobody was admitted"))?;
    Ok(Admission::Admitted {
        node: id,
        certificate: certificate.to_vec(),
        authority: authority.certificate().to_vec(),
        map: map.text().into(),
        warnings: Users::of_this_node().differences(&asked.users),
    })
}

/// The number that the machine gets, and the map with it.
fn place(map: &crate::map::Map, asked: &Application) -> Result<(NodeId, crate::map::Map), Refusal> {
    let bad = |message: String| Refusal::new(RefusalKind::BadRequest, message);
    // A machine that joins again, perhaps after having been set up anew, keeps its place.
    if let Some(known) = map.find(&asked.address)
        && asked.node.is_none_or(|wish| wish == known)
    {
        return Ok((known, map.clone()));
    }
    if let Some(known) = map.find(&asked.address) {
        let said = format!("{} is node {known} already", asked.address);
        return Err(bad(said).hint(format!("--node {known}, to be that node")));
    }
    let free = map.lowest_free().ok_or_else(|| bad("the cluster has no free number".into()))?;
    let id = asked.node.unwrap_or(free);
    if id.0 == 0 {
        return Err(bad("nodes are 1 to 65535".into()));
    }
    if map.contains(id) {
        let said = format!("there is a node {id} already, at another address");
        return Err(bad(said).hint(format!("--node {free}, which is free")));
    }
    // A name that another node has, or that is none, is no reason to refuse.
    let named = asked.name.as_deref().and_then(|name| map.adding(id, &asked.address, Some(name)).ok());
    let map = match named {
        Some(map) => map,
        None => map.adding(id, &asked.address, None).map_err(|e| {
            // The line number means nothing to the other side.
            let said = e.to_string();
            bad(format!("{}: {}", asked.address, said.split_once(": ").map_or(&*said, |(_, rest)| rest)))
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
    use crate::map::Map;

    fn application(address: &str, node: Option<u16>, name: &str) -> Application {
        Application {
            protocol: PROTOCOL,
            secret: [0; 16],
            public_key: Vec::new(),
            signature: Vec::new(),
            node: node.map(NodeId),
            address: address.into(),
            name: Some(name.into()),
            users: Users::default(),
        }
    }

    #[test]
    fn newcomers_get_what_they_wish_or_the_lowest_free() {
        let map = Map::parse("1 10.0.0.1 1\n2 10.0.0.2 1\n2 beta ALIAS\n").unwrap();
        let (id, new) = place(&map, &application("10.0.0.3:7101", None, "gamma")).unwrap();
        assert_eq!((id, new.find("gamma"), new.version()), (NodeId(3), Some(NodeId(3)), 1));
        let (id, _) = place(&map, &application("10.0.0.3:7101", Some(9), "gamma")).unwrap();
        assert_eq!(id, NodeId(9));
        let (id, new) = place(&map, &application("10.0.0.3:7101", None, "beta")).unwrap();
        assert_eq!((id, new.find("beta")), (NodeId(3), Some(NodeId(2))), "a taken name is left out");
    }

    #[test]
    fn who_comes_again_keeps_his_place_and_nobody_takes_anothers() {
        let map = Map::parse("1 10.0.0.1 1\n2 10.0.0.2 1\n").unwrap();
        for wish in [None, Some(2)] {
            let (id, new) = place(&map, &application("10.0.0.2:7101", wish, "x")).unwrap();
            assert_eq!((id, new), (NodeId(2), map.clone()));
        }
        let refusal = place(&map, &application("10.0.0.3:7101", Some(2), "x")).unwrap_err();
        assert!(refusal.message.contains("node 2 already") && refusal.hint.unwrap().contains("--node 3"));
        let refusal = place(&map, &application("10.0.0.2:7101", Some(5), "x")).unwrap_err();
        assert_eq!(refusal.message, "10.0.0.2:7101 is node 2 already");
        for address in ["", "a b", "a\n9 b 1", "a:0", "1.2.3"] {
            assert!(place(&map, &application(address, None, "x")).is_err(), "{address:?}");
        }
        assert!(place(&map, &application("a", Some(0), "x")).is_err());
    }
}
