//! A death is soon known everywhere. A node is declared dead only if two nodes cannot reach it, or
//! if one cannot and has no other node to ask.

use crate::simulated::{Cluster, Delivery};
use tern_gossip::{MemberStatus, MembershipEvent};
use tern_ids::NodeId;

#[test]
fn death_is_known_everywhere_in_logarithmic_time() {
    for nodes in [8u16, 32, 128, 256] {
        let max_steps = 5.0 * f64::from(nodes).log2();
        let mut sum = 0;
        for seed in 0..10 {
            let mut cluster = Cluster::converged(nodes, seed);
            cluster.stop(3);
            sum += cluster.step_until("a death is known", max_steps as u64, |cluster| {
                cluster.all_have(3, MemberStatus::Dead)
            });
            assert_eq!(cluster.declared_dead().into_iter().collect::<Vec<_>>(), [3]);
        }
        println!("{nodes} nodes: known everywhere after {:.1} periods", sum as f64 / 10.0);
    }
}

#[test]
fn deaths_of_half_the_cluster_are_all_detected() {
    let mut cluster = Cluster::converged(64, 1);
    (1..=32).for_each(|node| cluster.stop(node));
    let steps = cluster.step_until("all deaths are known", 120, |cluster| {
        (1..=32).all(|node| cluster.all_have(node, MemberStatus::Dead))
    });
    println!("32 of 64 died: known everywhere after {steps} periods");
    assert!(cluster.declared_dead().into_iter().all(|node| node <= 32));
}

#[test]
fn one_node_alone_cannot_declare_deaths() {
    let mut cluster = Cluster::converged(16, 2);
    // Node 1 can send only to node 2, and so suspects all others.
    cluster.deliver =
        Box::new(|from, to, _| if from == 1 && to != 2 { Delivery::Failed } else { Delivery::Delivered });
    let mut suspected = 0;
    for _ in 0..300 {
        cluster.step();
        let node = cluster.nodes[0].as_ref().unwrap();
        suspected += (3..=16).filter(|of| cluster.status(*of, node) == MemberStatus::Suspect).count();
    }
    assert!(suspected > 0);
    // It may itself be declared dead: a node that probes it gets no acknowledgement.
    assert!(cluster.declared_dead().into_iter().all(|node| node == 1));
    let now = cluster.now;
    let gossip = &cluster.node(1).gossip;
    assert!(gossip.view(now).filter(|member| !member.reachable).count() >= 10);
}

#[test]
fn node_with_one_direction_cut_is_not_declared_dead() {
    let mut cluster = Cluster::converged(24, 3);
    cluster.deliver =
        Box::new(|from, to, _| if (from, to) == (5, 9) { Delivery::Failed } else { Delivery::Delivered });
    cluster.step_until("the cut is seen", 400, |cluster| {
        let node = cluster.nodes[4].as_ref().unwrap();
        !node.gossip.member(cluster.now, NodeId(9)).unwrap().reachable
    });
    cluster.steps(200);
    assert_eq!(cluster.declared_dead().len(), 0);
    cluster.deliver = Box::new(|_, _, _| Delivery::Delivered);
    cluster.step_until("the way is open again", 400, |cluster| {
        let node = cluster.nodes[4].as_ref().unwrap();
        node.gossip.member(cluster.now, NodeId(9)).unwrap().reachable
            && cluster.all_agree(MemberStatus::Alive)
    });
}

#[test]
fn with_two_nodes_the_failures_alone_declare_death() {
    let mut cluster = Cluster::converged(2, 4);
    cluster.stop(2);
    cluster.step();
    assert!(cluster.all_have(2, MemberStatus::Suspect));
    cluster.step_until("the other's death", 10, |cluster| cluster.all_have(2, MemberStatus::Dead));
    cluster.start(2, 2);
    cluster.step_until("its return", 60, |cluster| cluster.all_agree(MemberStatus::Alive));
    assert_eq!(
        cluster.node(1).events,
        [MembershipEvent::Died(NodeId(2)), MembershipEvent::Returned(NodeId(2))]
    );
}

#[test]
fn dead_nodes_are_tried_rarely() {
    let mut cluster = Cluster::converged(20, 5);
    (11..=20).for_each(|node| cluster.stop(node));
    cluster.step_until("the deaths", 100, |cluster| {
        (11..=20).all(|node| cluster.all_have(node, MemberStatus::Dead))
    });
    let attempts = std::rc::Rc::new(std::cell::Cell::new(0u32));
    let counted = attempts.clone();
    cluster.deliver = Box::new(move |_, to, _| {
        counted.set(counted.get() + u32::from(to > 10));
        Delivery::Delivered
    });
    cluster.steps(1000);
    // Ten living nodes: each tries any node in one step of ten, and half of these are dead: 0.5 a
    // step in all.
    assert!((400..600).contains(&attempts.get()), "{}", attempts.get());
}
