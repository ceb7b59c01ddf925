//! Machines that join, and machines that are refused.

use crate::cluster::{Cluster, Node, until};
use tern_control::{Reply, Request};
use tern_ids::NodeId;
use tern_node::map::Map;
use tern_node::token::{Token, Tokens};
use tern_wire::Authority;

#[test]
fn joined_nodes_share_one_map() {
    let mut cluster = Cluster::of(2);
    let report = cluster.add("");
    assert_eq!((report.node, &*report.cluster), (NodeId(3), "alpha"));
    assert_eq!(report.nodes, [1, 2, 3].map(NodeId));
    let map = cluster.nodes[2].map();
    for node in &cluster.nodes {
        until("the map is everywhere", || node.map() == map);
    }
    for node in &cluster.nodes {
        until("all answer within a second", || node.status().nodes.iter().all(|row| row.up));
        let status = node.status();
        assert_eq!(status.nodes.iter().map(|row| row.node).collect::<Vec<_>>(), [1, 2, 3].map(NodeId));
        assert_eq!(status.cluster, "alpha");
    }
}

#[test]
fn node_that_was_down_gets_the_newest_map() {
    let mut cluster = Cluster::of(2);
    cluster.nodes[1].kill();
    cluster.add("");
    let map = cluster.nodes[0].map();
    // It asks for the map when it starts.
    cluster.nodes[1].start();
    until("it has the map", || cluster.nodes[1].map() == map);
    // It also gets the map after another node has pinged it. The old map has a wrong address of
    // node 1, so node 2 cannot fetch the new map when it starts, as if the link were cut.
    cluster.nodes[1].kill();
    let old = "# version 1\n1 127.0.0.1:1 1\n2 127.0.0.1:2 1\n";
    let old = old.replace(":2 ", &format!(":{} ", cluster.nodes[1].port));
    let old = Map::parse(&old).unwrap().with_keys_of(&Map::parse(&map).unwrap());
    let authority = Authority::load(&cluster.nodes[0].dir, "alpha").unwrap();
    let old = old.signed(&authority).unwrap();
    std::fs::write(cluster.nodes[1].dir.join("mosix.map"), old.text()).unwrap();
    cluster.nodes[1].start();
    // Node 1 pings node 2 and then sends its map. Node 2 accepts it, since the old map contains
    // node 1's number.
    until("it has the map", || {
        cluster.nodes[0].status();
        cluster.nodes[1].map() == map
    });
}

#[test]
fn invalid_tokens_are_refused() {
    let cluster = Cluster::found("");
    let node = Node::new(&cluster, "");
    let good: Token = cluster.token().parse().unwrap();
    let refused = |token: &Token| cluster.join(&node, &token.to_string(), None).unwrap_err().to_string();
    // The secret is unknown.
    let wrong = Token { secret: [0; 16], ..good.clone() };
    assert!(refused(&wrong).contains("unknown"), "{}", refused(&wrong));
    // The authority is that of another cluster: the machine does not even send the secret.
    let foreign = Token { authority: tern_ids::Fingerprint([0; 32]), ..good.clone() };
    assert!(refused(&foreign).contains("not trusted"), "{}", refused(&foreign));
    // The token names another node of the cluster.
    let other = Token { node: NodeId(2), ..good.clone() };
    assert!(refused(&other).contains("not trusted"), "{}", refused(&other));
    // The token has expired by the node's clock, whatever it claims.
    let expired = Tokens::new(&cluster.nodes[0].dir).create(NodeId(1), good.authority, 0, 1).unwrap();
    let lying = Token { expires: expired.expires + 1000, ..expired };
    assert!(refused(&lying).contains("expired"), "{}", refused(&lying));
    // A request for a taken number does not use up the token.
    let taken = cluster.join(&node, &good.to_string(), Some(1)).unwrap_err();
    assert!(taken.message.contains("node 1 already"), "{taken}");
    assert!(!node.dir.join("node.key").exists());
    // The token is valid once.
    assert_eq!(cluster.join(&node, &good.to_string(), Some(9)).unwrap().node, NodeId(9));
    assert!(refused_again(&cluster, &good).contains("used already"));
    assert_eq!(cluster.nodes[0].status().nodes.len(), 2);
}

fn refused_again(cluster: &Cluster, token: &Token) -> String {
    let late = Node::new(cluster, "");
    cluster.join(&late, &token.to_string(), None).unwrap_err().to_string()
}

#[test]
fn first_token_is_valid_and_only_the_founder_makes_more() {
    let mut cluster = Cluster::found("");
    let mut node = Node::new(&cluster, "");
    cluster.join(&node, &cluster.first_token, None).unwrap();
    node.start();
    cluster.nodes.push(node);
    let refusal = cluster.nodes[1].refusal(&Request::Token { seconds: 60 });
    assert_eq!(refusal.hint.as_deref(), Some("tern token, on node 1"));
    // A machine cannot join at another node than the founder.
    let token = cluster.token();
    let third = Node::new(&cluster, "");
    let there = tern_node::JoinOptions {
        host: format!("127.0.0.1:{}", cluster.nodes[1].port),
        token,
        config_dir: Some(third.dir.clone()),
        ..tern_node::JoinOptions::default()
    };
    assert!(tern_node::join(&there).is_err());
}

/// The founder's map decides who is a member, so it loses neither keys nor versions.
#[test]
fn founder_keeps_members_and_versions() {
    let mut cluster = Cluster::of(2);
    let version = |map: &str| -> u64 {
        map.lines().find_map(|line| line.strip_prefix("# version ")).unwrap().parse().unwrap()
    };
    let all_up = |cluster: &Cluster| {
        until("all are up, with one map", || {
            let map = cluster.nodes[0].map();
            cluster.nodes[1].map() == map && cluster.nodes[1].status().nodes.iter().all(|row| row.up)
        });
    };
    let before = cluster.nodes[0].map();
    let hosts: String =
        before.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect();
    // While it is in no cluster, no machine gets its number.
    let token = cluster.token();
    assert_eq!(cluster.nodes[0].ask(&Request::MapOff), Reply::Done);
    let third = Node::new(&cluster, "");
    let refused = cluster.join(&third, &token, None).unwrap_err().to_string();
    assert!(refused.contains("has left the cluster"), "{refused}");
    assert_eq!(cluster.nodes[0].ask(&Request::SetMap { text: hosts.clone() }), Reply::Done);
    let after = cluster.nodes[0].map();
    assert!(version(&after) > version(&before), "{after}");
    all_up(&cluster);
    // A map that was edited by hand: the keys are not taken from it, nor lost with it.
    cluster.nodes[0].kill();
    std::fs::write(cluster.nodes[0].dir.join("mosix.map"), hosts).unwrap();
    cluster.nodes[0].start();
    assert!(version(&cluster.nodes[0].map()) > version(&after));
    all_up(&cluster);
}
