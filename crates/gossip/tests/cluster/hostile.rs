//! Bytes that no node of ours would send.

use crate::simulated::Cluster;
use proptest::prelude::*;
use tern_gossip::config::{LONGEST_MESSAGE, MOST_PAYLOAD};
use tern_gossip::dice::Dice;
use tern_gossip::{Config, Gossip, Refused};
use tern_ids::NodeId;

/// A message as it is sent in a cluster with doubts and deaths.
fn real_messages(seed: u64) -> Vec<Vec<u8>> {
    let mut cluster = Cluster::acquainted(12, seed);
    cluster.stop(3);
    cluster.stop(4);
    let mut messages = Vec::new();
    for _ in 0..20 {
        cluster.step();
        let now = cluster.now;
        messages.extend(cluster.node(1).gossip.tick(now).map(|(_, message)| message));
    }
    messages
}

/// Whatever has come, a node goes on within its limits.
fn still_well(gossip: &mut Gossip, now: u64) {
    for _ in 0..4 {
        if let Some((to, message)) = gossip.tick(now) {
            assert!((1..=12).contains(&to.0));
            assert!(message.len() <= Config::default().longest_message());
            gossip.unreachable(now, to);
        }
    }
    assert_eq!(gossip.view(now).count(), 11);
    assert!(gossip.view(now).all(|seen| seen.payload.len() <= MOST_PAYLOAD));
}

#[test]
fn flipped_bits_are_harmless() {
    let mut dice = Dice::new(1);
    for seed in 0..3 {
        let mut cluster = Cluster::acquainted(12, seed);
        let mut now = cluster.now;
        for original in real_messages(seed) {
            for _ in 0..300 {
                let mut bytes = original.clone();
                for _ in 0..=dice.below(4) {
                    let at = dice.below(bytes.len());
                    bytes[at] ^= 1 << dice.below(8);
                }
                let from = NodeId(1 + dice.below(14) as u16);
                now = now.wrapping_add_signed(dice.below(2_000) as i64 - 300);
                let gossip = &mut cluster.node(2).gossip;
                let _refused = gossip.receive(now, from, &bytes);
            }
            still_well(&mut cluster.node(2).gossip, now);
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_harmless(messages: Vec<(u16, u64, Vec<u8>)>) {
        let mut gossip = Gossip::new(NodeId(12), 1, Config::default(), 1);
        gossip.set_members((1..=12).map(NodeId));
        for (from, now, mut bytes) in messages {
            bytes.insert(0, tern_gossip::VERSION);
            let _refused = gossip.receive(now, NodeId(from % 14), &bytes);
            still_well(&mut gossip, now);
        }
    }
}

#[test]
fn a_giant_is_refused_by_its_length() {
    let mut gossip = Gossip::new(NodeId(1), 1, Config::default(), 1);
    gossip.set_members([NodeId(2)]);
    let mut bytes = vec![0; LONGEST_MESSAGE + 1];
    bytes[0] = tern_gossip::VERSION;
    assert_eq!(gossip.receive(0, NodeId(2), &bytes), Err(Refused::Malformed));
}

#[test]
fn who_asks_without_end_cannot_keep_a_node_from_gossiping() {
    let mut cluster = Cluster::acquainted(12, 9);
    let now = cluster.now;
    // A real message, with the flag that asks for an answer.
    let mut question = real_messages(1).remove(0);
    question[1] |= 1;
    let gossip = &mut cluster.node(2).gossip;
    let mut to_others = 0;
    for step in 0..400 {
        for _ in 0..10 {
            gossip.receive(now + step * 500, NodeId(1), &question).unwrap();
        }
        to_others += u32::from(gossip.tick(now + step * 500).is_some_and(|(to, _)| to != NodeId(1)));
    }
    assert!(to_others > 150, "{to_others}");
}
