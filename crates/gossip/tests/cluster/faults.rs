//! Splits, losses, pauses, and clocks that jump.

use crate::simulated::{Cluster, PERIOD, Way};
use tern_gossip::{Status, model};
use tern_ids::NodeId;

fn heal(cluster: &mut Cluster, most: u64) -> u64 {
    cluster.way = Box::new(|_, _, _| Way::Open);
    cluster.until("all are alive to all", most, |cluster| cluster.all_agree(Status::Alive))
}

#[test]
fn a_cluster_splits_and_heals() {
    for (nodes, first) in [(3u16, 1u16), (6, 3), (64, 32), (64, 8), (128, 64)] {
        let mut cluster = Cluster::acquainted(nodes, 1);
        cluster.way =
            Box::new(move |from, to, _| if (from <= first) == (to <= first) { Way::Open } else { Way::Cut });
        let split = cluster.until("each side has given the other up", 600, |cluster| {
            cluster.running().all(|(number, node)| {
                (1..=nodes).filter(|of| *of != number).all(|of| {
                    let same_side = (of <= first) == (number <= first);
                    cluster.status(of, node) == if same_side { Status::Alive } else { Status::Dead }
                })
            })
        });
        cluster.steps(300);
        let healed = heal(&mut cluster, 600);
        println!("{nodes} nodes, {first} cut off: given up after {split} periods, back after {healed}");
    }
}

#[test]
fn one_node_is_cut_off_and_comes_back_with_wrong_news() {
    let mut cluster = Cluster::acquainted(32, 2);
    cluster.way = Box::new(|from, to, _| if from == 1 || to == 1 { Way::Cut } else { Way::Open });
    // Long enough for it to give all others up, alone.
    cluster.until("it is alone", 4_000, |cluster| {
        let node = cluster.nodes[0].as_ref().unwrap();
        (2..=32).all(|of| cluster.status(of, node) == Status::Dead)
    });
    cluster.forget_events();
    heal(&mut cluster, 400);
    assert_eq!(cluster.found_dead().len(), 0, "its word is not believed against what is younger");
}

#[test]
fn a_fifth_of_all_messages_is_lost() {
    let mut cluster = Cluster::acquainted(64, 3);
    cluster.way = Box::new(|_, _, dice| if dice.below(5) == 0 { Way::Lost } else { Way::Open });
    cluster.steps(100);
    let mut ages = 0.0;
    for _ in 0..100 {
        cluster.steps(10);
        ages += cluster.average_age() / 100.0;
    }
    // A fifth fewer messages, a fifth older; and a period, because this is counted at the end of a step.
    let expected = model::average_age(64, 16) / 0.8 + 1.0;
    assert!((ages / expected - 1.0).abs() < 0.15, "{ages:.2}, not {expected:.2}");
    assert_eq!(cluster.found_dead().len(), 0);
    cluster.stop(9);
    cluster.until("a death, all the same", 60, |cluster| cluster.all_say(9, Status::Dead));
}

#[test]
fn a_daemon_is_paused_for_a_minute() {
    let mut cluster = Cluster::acquainted(16, 4);
    cluster.node(4).paused = true;
    cluster.steps(120);
    assert!(!cluster.all_say(4, Status::Alive), "a minute of silence is noticed");
    cluster.node(4).paused = false;
    cluster.until("it is back", 100, |cluster| cluster.all_agree(Status::Alive));
    let paused = cluster.node(4);
    assert!(paused.events.is_empty(), "it has found nobody dead: {:?}", paused.events);
    assert!(cluster.found_dead().into_iter().all(|node| node == 4));
}

#[test]
fn old_messages_that_waited_do_not_raise_the_dead() {
    let mut cluster = Cluster::acquainted(16, 5);
    cluster.node(4).paused = true;
    cluster.steps(20);
    cluster.stop(9);
    cluster.steps(100);
    cluster.forget_events();
    cluster.node(4).paused = false;
    cluster.until("the paused one knows too", 100, |cluster| cluster.all_say(9, Status::Dead));
    for (number, node) in cluster.running().filter(|(number, _)| *number != 4) {
        let returned = node.events.contains(&tern_gossip::Event::Returned(NodeId(9)));
        assert!(!returned, "node {number} took 9 for alive");
    }
}

#[test]
fn clocks_jump() {
    const DAY: i64 = 86_400_000;
    for jump in [-DAY, DAY, -1_000, 30_000, -(1 << 32)] {
        let mut cluster = Cluster::acquainted(32, 6);
        cluster.node(2).ahead = jump;
        cluster.node(3).ahead = jump;
        cluster.steps(60);
        assert_eq!(cluster.found_dead().len(), 0, "{jump}");
        assert!(cluster.all_agree(Status::Alive), "{jump}");
        let age = cluster.average_age();
        assert!(age < 1.5 * model::average_age(32, 16) + 1.0, "{jump}: {age}");
        // And every node's knowledge goes on being renewed.
        for (_, node) in cluster.running() {
            let own = cluster.now.saturating_add_signed(node.ahead);
            assert!(node.gossip.view(own).all(|seen| seen.age.is_some_and(|age| age < 40 * PERIOD)));
        }
    }
}

#[test]
fn a_clock_that_jumps_at_every_step_harms_nobody_else() {
    let mut cluster = Cluster::acquainted(16, 7);
    for _ in 0..300 {
        let jump = cluster.dice.below(1 << 33) as i64 - (1 << 32);
        cluster.node(5).ahead = jump;
        cluster.step();
    }
    cluster.node(5).ahead = 0;
    assert!(cluster.found_dead().is_empty());
    cluster.until("all is well", 60, |cluster| cluster.all_agree(Status::Alive));
}
