//! Bytes that no correct node would send.

use crate::simulated::Cluster;
use proptest::prelude::*;
use tern_gossip::config::{MAX_MESSAGE_LEN, MAX_PAYLOAD};
use tern_gossip::rng::Rng;
use tern_gossip::{Gossip, GossipConfig, ReceiveError};
use tern_ids::NodeId;

/// Messages as they are sent in a cluster with suspicions and deaths.
fn real_messages(seed: u64) -> Vec<Vec<u8>> {
    let mut cluster = Cluster::converged(12, seed);
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

/// Checks that a node stays within its limits, whatever it received.
fn check_limits(gossip: &mut Gossip, now: u64) {
    for _ in 0..4 {
        if let Some((to, message)) = gossip.tick(now) {
            assert!((1..=12).contains(&to.0));
            assert!(message.len() <= GossipConfig::default().max_message_len());
            gossip.mark_unreachable(now, to);
        }
    }
    assert_eq!(gossip.view(now).count(), 11);
    assert!(gossip.view(now).all(|member| member.payload.len() <= MAX_PAYLOAD));
}

#[test]
fn flipped_bits_are_harmless() {
    let mut rng = Rng::new(1);
    for seed in 0..3 {
        let mut cluster = Cluster::converged(12, seed);
        let mut now = cluster.now;
        for original in real_messages(seed) {
            for _ in 0..300 {
                let mut bytes = original.clone();
                for _ in 0..=rng.below(4) {
                    let at = rng.below(bytes.len());
                    bytes[at] ^= 1 << rng.below(8);
                }
                let from = NodeId(1 + rng.below(14) as u16);
                now = now.wrapping_add_signed(rng.below(2_000) as i64 - 300);
                let gossip = &mut cluster.node(2).gossip;
                let _refused = gossip.receive(now, from, &bytes);
            }
            check_limits(&mut cluster.node(2).gossip, now);
        }
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_harmless(messages: Vec<(u16, u64, Vec<u8>)>) {
        let mut gossip = Gossip::new(NodeId(12), 1, GossipConfig::default(), 1);
        gossip.set_members((1..=12).map(NodeId));
        for (from, now, mut bytes) in messages {
            bytes.insert(0, tern_gossip::VERSION);
            let _refused = gossip.receive(now, NodeId(from % 14), &bytes);
            check_limits(&mut gossip, now);
        }
    }
}

#[test]
fn oversized_message_is_rejected() {
    let mut gossip = Gossip::new(NodeId(1), 1, GossipConfig::default(), 1);
    gossip.set_members([NodeId(2)]);
    let mut bytes = vec![0; MAX_MESSAGE_LEN + 1];
    bytes[0] = tern_gossip::VERSION;
    assert_eq!(gossip.receive(0, NodeId(2), &bytes), Err(ReceiveError::Malformed));
}

#[test]
fn flood_of_probes_does_not_stop_gossip() {
    let mut cluster = Cluster::converged(12, 9);
    let now = cluster.now;
    // A real message, with the flag that asks for an acknowledgement.
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
