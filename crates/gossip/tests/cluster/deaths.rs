//! A death is known everywhere soon, is believed only when two nodes have found it, and never of the living.

use crate::simulated::{Cluster, Way};
use tern_gossip::{Event, Status};
use tern_ids::NodeId;

#[test]
fn a_death_is_known_everywhere_in_logarithmic_time() {
    for nodes in [8u16, 32, 128, 256] {
        let most = 5.0 * f64::from(nodes).log2();
        let mut sum = 0;
        for seed in 0..10 {
            let mut cluster = Cluster::acquainted(nodes, seed);
            cluster.stop(3);
            sum += cluster.until("a death is known", most as u64, |cluster| cluster.all_say(3, Status::Dead));
            assert_eq!(cluster.found_dead().into_iter().collect::<Vec<_>>(), [3]);
        }
        println!("{nodes} nodes: known everywhere after {:.1} periods", sum as f64 / 10.0);
    }
}

#[test]
fn half_a_cluster_dies_at_once() {
    let mut cluster = Cluster::acquainted(64, 1);
    (1..=32).for_each(|node| cluster.stop(node));
    let steps = cluster.until("all deaths are known", 120, |cluster| {
        (1..=32).all(|node| cluster.all_say(node, Status::Dead))
    });
    println!("32 of 64 died: known everywhere after {steps} periods");
    assert!(cluster.found_dead().into_iter().all(|node| node <= 32));
}

#[test]
fn one_nodes_word_is_not_believed() {
    let mut cluster = Cluster::acquainted(16, 2);
    // Node 1 can send to nobody but 2, and so has doubts about all others.
    cluster.way = Box::new(|from, to, _| if from == 1 && to != 2 { Way::Cut } else { Way::Open });
    let mut doubted = 0;
    for _ in 0..300 {
        cluster.step();
        let node = cluster.nodes[0].as_ref().unwrap();
        doubted += (3..=16).filter(|of| cluster.status(*of, node) == Status::Suspect).count();
    }
    assert!(doubted > 0);
    // It may itself be given up: whoever probes it gets no answer.
    assert!(cluster.found_dead().into_iter().all(|node| node == 1));
    let now = cluster.now;
    let gossip = &cluster.node(1).gossip;
    assert!(gossip.view(now).filter(|seen| !seen.reachable).count() >= 10);
}

#[test]
fn one_direction_is_cut() {
    let mut cluster = Cluster::acquainted(24, 3);
    cluster.way = Box::new(|from, to, _| if (from, to) == (5, 9) { Way::Cut } else { Way::Open });
    cluster.until("the cut is seen", 400, |cluster| {
        let node = cluster.nodes[4].as_ref().unwrap();
        !node.gossip.seen(cluster.now, NodeId(9)).unwrap().reachable
    });
    cluster.steps(200);
    assert_eq!(cluster.found_dead().len(), 0);
    cluster.way = Box::new(|_, _, _| Way::Open);
    cluster.until("the way is open again", 400, |cluster| {
        let node = cluster.nodes[4].as_ref().unwrap();
        node.gossip.seen(cluster.now, NodeId(9)).unwrap().reachable && cluster.all_agree(Status::Alive)
    });
}

#[test]
fn with_two_nodes_there_is_nobody_to_ask() {
    let mut cluster = Cluster::acquainted(2, 4);
    cluster.stop(2);
    cluster.step();
    assert!(cluster.all_say(2, Status::Suspect));
    cluster.until("the other's death", 10, |cluster| cluster.all_say(2, Status::Dead));
    cluster.start(2, 2);
    cluster.until("its return", 60, |cluster| cluster.all_agree(Status::Alive));
    assert_eq!(cluster.node(1).events, [Event::Died(NodeId(2)), Event::Returned(NodeId(2))]);
}

#[test]
fn the_dead_are_tried_rarely() {
    let mut cluster = Cluster::acquainted(20, 5);
    (11..=20).for_each(|node| cluster.stop(node));
    cluster.until("the deaths", 100, |cluster| (11..=20).all(|node| cluster.all_say(node, Status::Dead)));
    let tries = std::rc::Rc::new(std::cell::Cell::new(0u32));
    let counted = tries.clone();
    cluster.way = Box::new(move |_, to, _| {
        counted.set(counted.get() + u32::from(to > 10));
        Way::Open
    });
    cluster.steps(1000);
    // Ten living: each tries anyone in one step of ten, and half of these are dead: 0.5 a step in all.
    assert!((400..600).contains(&tries.get()), "{}", tries.get());
}
