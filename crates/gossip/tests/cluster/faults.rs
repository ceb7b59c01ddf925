//! Partitions, losses, pauses, and clocks that jump.

use crate::simulated::{Cluster, Delivery, PERIOD};
use tern_gossip::{MemberStatus, model};
use tern_ids::NodeId;

fn heal(cluster: &mut Cluster, max_steps: u64) -> u64 {
    cluster.deliver = Box::new(|_, _, _| Delivery::Delivered);
    cluster.step_until("all are alive to all", max_steps, |cluster| cluster.all_agree(MemberStatus::Alive))
}

#[test]
fn cluster_splits_and_heals() {
    for (nodes, first) in [(3u16, 1u16), (6, 3), (64, 32), (64, 8), (128, 64)] {
        let mut cluster = Cluster::converged(nodes, 1);
        cluster.deliver =
            Box::new(
                move |from, to, _| {
                    if (from <= first) == (to <= first) { Delivery::Delivered } else { Delivery::Failed }
                },
            );
        let split = cluster.step_until("each side has given the other up", 600, |cluster| {
            cluster.running().all(|(number, node)| {
                (1..=nodes).filter(|of| *of != number).all(|of| {
                    let same_side = (of <= first) == (number <= first);
                    cluster.status(of, node)
                        == if same_side { MemberStatus::Alive } else { MemberStatus::Dead }
                })
            })
        });
        cluster.steps(300);
        let healed = heal(&mut cluster, 600);
        println!("{nodes} nodes, {first} cut off: given up after {split} periods, back after {healed}");
    }
}

#[test]
fn isolated_node_does_not_spread_wrong_deaths() {
    let mut cluster = Cluster::converged(32, 2);
    cluster.deliver =
        Box::new(|from, to, _| if from == 1 || to == 1 { Delivery::Failed } else { Delivery::Delivered });
    // Long enough for it to declare all others dead, alone.
    cluster.step_until("it is alone", 4_000, |cluster| {
        let node = cluster.nodes[0].as_ref().unwrap();
        (2..=32).all(|of| cluster.status(of, node) == MemberStatus::Dead)
    });
    cluster.clear_events();
    heal(&mut cluster, 400);
    assert_eq!(cluster.declared_dead().len(), 0, "its word is not believed against what is younger");
}

#[test]
fn loss_of_a_fifth_of_all_messages_is_tolerated() {
    let mut cluster = Cluster::converged(64, 3);
    cluster.deliver =
        Box::new(|_, _, rng| if rng.below(5) == 0 { Delivery::Lost } else { Delivery::Delivered });
    cluster.steps(100);
    let mut ages = 0.0;
    for _ in 0..100 {
        cluster.steps(10);
        ages += cluster.average_age() / 100.0;
    }
    // A fifth fewer messages make entries a quarter older. One period is added because ages are
    // measured at the end of a step.
    let expected = model::average_age(64, 16) / 0.8 + 1.0;
    assert!((ages / expected - 1.0).abs() < 0.15, "{ages:.2}, not {expected:.2}");
    assert_eq!(cluster.declared_dead().len(), 0);
    cluster.stop(9);
    cluster.step_until("a death, all the same", 60, |cluster| cluster.all_have(9, MemberStatus::Dead));
}

#[test]
fn paused_daemon_declares_no_deaths() {
    let mut cluster = Cluster::converged(16, 4);
    cluster.node(4).paused = true;
    cluster.steps(120);
    assert!(!cluster.all_have(4, MemberStatus::Alive), "a minute of silence is noticed");
    cluster.node(4).paused = false;
    cluster.step_until("it is back", 100, |cluster| cluster.all_agree(MemberStatus::Alive));
    let paused = cluster.node(4);
    assert!(paused.events.is_empty(), "it has found nobody dead: {:?}", paused.events);
    assert!(cluster.declared_dead().into_iter().all(|node| node == 4));
}

#[test]
fn queued_old_messages_do_not_revive_the_dead() {
    let mut cluster = Cluster::converged(16, 5);
    cluster.node(4).paused = true;
    cluster.steps(20);
    cluster.stop(9);
    cluster.steps(100);
    cluster.clear_events();
    cluster.node(4).paused = false;
    cluster.step_until("the paused one knows too", 100, |cluster| cluster.all_have(9, MemberStatus::Dead));
    for (number, node) in cluster.running().filter(|(number, _)| *number != 4) {
        let returned = node.events.contains(&tern_gossip::MembershipEvent::Returned(NodeId(9)));
        assert!(!returned, "node {number} took 9 for alive");
    }
}

#[test]
fn clock_jumps_cause_no_deaths() {
    const DAY: i64 = 86_400_000;
    for jump in [-DAY, DAY, -1_000, 30_000, -(1 << 32)] {
        let mut cluster = Cluster::converged(32, 6);
        cluster.node(2).clock_offset = jump;
        cluster.node(3).clock_offset = jump;
        cluster.steps(60);
        assert_eq!(cluster.declared_dead().len(), 0, "{jump}");
        assert!(cluster.all_agree(MemberStatus::Alive), "{jump}");
        let age = cluster.average_age();
        assert!(age < 1.5 * model::average_age(32, 16) + 1.0, "{jump}: {age}");
        // Every node's entries are still renewed.
        for (_, node) in cluster.running() {
            let own = cluster.now.saturating_add_signed(node.clock_offset);
            assert!(node.gossip.view(own).all(|member| member.age.is_some_and(|age| age < 40 * PERIOD)));
        }
    }
}

#[test]
fn clock_that_jumps_at_every_step_does_not_harm_others() {
    let mut cluster = Cluster::converged(16, 7);
    for _ in 0..300 {
        let jump = cluster.rng.below(1 << 33) as i64 - (1 << 32);
        cluster.node(5).clock_offset = jump;
        cluster.step();
    }
    cluster.node(5).clock_offset = 0;
    assert!(cluster.declared_dead().is_empty());
    cluster.step_until("all is well", 60, |cluster| cluster.all_agree(MemberStatus::Alive));
}
