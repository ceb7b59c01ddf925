//! Nodes join, leave, and return.

use crate::simulated::Cluster;
use tern_gossip::{Gossip, GossipConfig, MemberStatus, MembershipEvent, ReceiveError};
use tern_ids::NodeId;

fn payload(cluster: &Cluster, of: u16, seen_by: u16) -> Vec<u8> {
    let node = cluster.nodes[usize::from(seen_by) - 1].as_ref().unwrap();
    node.gossip.member(cluster.now, NodeId(of)).unwrap().payload.to_vec()
}

#[test]
fn late_node_becomes_known() {
    let mut cluster = Cluster::new(20, 1);
    cluster.stop(20);
    cluster
        .step_until("all the others know each other", 100, |cluster| cluster.all_agree(MemberStatus::Alive));
    cluster.steps(50);
    cluster.clear_events();
    cluster.start(20, 1);
    let steps =
        cluster.step_until("it is known, and knows", 60, |cluster| cluster.all_agree(MemberStatus::Alive));
    println!("a late node of 20 is known everywhere after {steps} periods");
    assert_eq!(cluster.node(1).events, [MembershipEvent::Joined(NodeId(20))]);
}

#[test]
fn restarted_node_returns_with_its_new_payload() {
    for down in [0, 1, 3, 100] {
        let mut cluster = Cluster::converged(20, down);
        cluster.stop(7);
        cluster.steps(down);
        cluster.start(7, 2);
        cluster.step_until("its new words are known", 120, |cluster| {
            cluster.all_agree(MemberStatus::Alive)
                && cluster
                    .running()
                    .filter(|(number, _)| *number != 7)
                    .all(|(number, _)| payload(cluster, 7, number) == b"7 in life 2")
        });
    }
}

#[test]
fn restarted_node_with_lower_incarnation_raises_it() {
    for down in [0, 100] {
        let mut cluster = Cluster::converged(20, down);
        cluster.stop(7);
        cluster.start(7, 1_000);
        cluster.step_until("life 1000", 120, |cluster| {
            cluster.running().all(|(number, _)| number == 7 || payload(cluster, 7, number).ends_with(b"1000"))
        });
        cluster.stop(7);
        cluster.steps(down);
        cluster.start(7, 3);
        cluster.step_until("life 3, called 1001", 200, |cluster| {
            cluster.all_agree(MemberStatus::Alive)
                && cluster
                    .running()
                    .all(|(number, _)| number == 7 || payload(cluster, 7, number).ends_with(b"3"))
        });
        assert!(cluster.node(7).gossip.incarnation() > 1_000);
    }
}

#[test]
fn node_that_leaves_the_map_is_dropped() {
    let mut cluster = Cluster::converged(10, 3);
    cluster.stop(10);
    for node in 1..10 {
        cluster.node(node).gossip.set_members((1..10).map(NodeId));
    }
    cluster.steps(100);
    let now = cluster.now;
    assert!(cluster.node(1).gossip.member(now, NodeId(10)).is_none());
    assert_eq!(cluster.node(1).gossip.view(now).count(), 8);
    assert_eq!(cluster.declared_dead().len(), 0);
}

#[test]
fn message_of_an_unknown_sender_is_rejected() {
    let mut one = Gossip::new(NodeId(1), 1, GossipConfig::default(), 1);
    let mut two = Gossip::new(NodeId(2), 1, GossipConfig::default(), 2);
    two.set_members([NodeId(1)]);
    let (to, message) = std::iter::repeat_with(|| two.tick(0)).flatten().next().unwrap();
    assert_eq!(to, NodeId(1));
    assert_eq!(one.receive(0, NodeId(2), &message), Err(ReceiveError::UnknownSender(NodeId(2))));
    assert_eq!(one.tick(0), None);
    one.set_members([NodeId(1), NodeId(2)]);
    assert_eq!(one.receive(0, NodeId(2), &message), Ok(()));
    assert_eq!(one.events().collect::<Vec<_>>(), [MembershipEvent::Joined(NodeId(2))]);
}

#[test]
fn oversized_payload_is_rejected_without_effect() {
    let mut one = Gossip::new(NodeId(1), 1, GossipConfig::default(), 1);
    let mut two = Gossip::new(NodeId(2), 1, GossipConfig::default(), 2);
    one.set_members([NodeId(2)]);
    two.set_members([NodeId(1)]);
    one.set_payload(b"short").unwrap();
    assert!(one.set_payload(&[0; tern_gossip::config::MAX_PAYLOAD + 1]).is_err());
    let (_, message) = std::iter::repeat_with(|| one.tick(0)).flatten().next().unwrap();
    two.receive(0, NodeId(1), &message).unwrap();
    assert_eq!(two.member(0, NodeId(1)).unwrap().payload, b"short");
}
