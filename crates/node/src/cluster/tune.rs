//! Costs of sending to other nodes: measured on request (`tune`), and stored.
//!
//! While the cluster runs, gossip measures round trips and migrations measure throughput
//! ([`super::state`]), so tuning is optional. But throughput is unknown before the first large
//! migration. The stored costs are the initial estimates, which later measurements correct.

use crate::cluster::link_costs::to_link_cost;
use crate::node::Node;
use crate::os::clock::unix_ns;
use crate::peer::client;
use crate::peer::message::{PeerReply, PeerRequest};
use std::time::{Duration, Instant};
use tern_control::{Costs, LinkRow, Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_load::LinkEstimate;

/// Number of round trips that are measured; the result is their median.
const ROUND_TRIP_SAMPLES: usize = 64;

/// Bytes per message; also the maximum size of a reply that another node may request.
pub(crate) const MAX_PROBE_LEN: usize = 512 << 10;

/// How long bytes are sent in each direction.
const SEND_DURATION: Duration = Duration::from_millis(500);

/// Timeout of the whole measurement.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(20);

/// Measures the link to a node, and stores the result.
pub(crate) fn measure(node: &Node, peer: NodeId) -> Result<Costs, Refusal> {
    check_other_node(node, peer)?;
    let deadline = Instant::now() + MEASURE_TIMEOUT;
    let mut session = client::PeerSession::open(node, peer, deadline)?;
    let mut probe = |bytes: usize, reply_len: usize| -> Result<Duration, Refusal> {
        let request = PeerRequest::Probe { bytes: vec![0; bytes], reply_len: reply_len as u32 };
        let begun = Instant::now();
        match session.call(&request)? {
            PeerReply::Probed(reply) if reply.len() == reply_len => Ok(begun.elapsed()),
            PeerReply::Refused(refusal) => Err(refusal),
            _ => {
                let message = format!("node {peer} sent an unexpected reply");
                Err(Refusal::new(RefusalKind::Internal, message))
            }
        }
    };
    let mut round_trips = (0..ROUND_TRIP_SAMPLES).map(|_| probe(0, 0)).collect::<Result<Vec<_>, _>>()?;
    round_trips.sort_unstable();
    let round_trip = round_trips[ROUND_TRIP_SAMPLES / 2];
    let mut measure_throughput = |bytes: usize, reply_len: usize| -> Result<u64, Refusal> {
        let begun = Instant::now();
        let (mut carried, mut under_way) = (0u64, Duration::ZERO);
        while begun.elapsed() < SEND_DURATION {
            // Each message is acknowledged, which takes one round trip without data.
            under_way += probe(bytes, reply_len)?.saturating_sub(round_trip);
            carried += MAX_PROBE_LEN as u64;
        }
        Ok((carried as f64 / under_way.as_secs_f64().max(1e-6)) as u64)
    };
    let bytes_per_s = measure_throughput(MAX_PROBE_LEN, 0)?;
    let back_bytes_per_s = measure_throughput(0, MAX_PROBE_LEN)?;
    let rtt_us = u32::try_from(round_trip.as_nanos().div_ceil(1000)).unwrap_or(u32::MAX).max(1);
    let costs = Costs {
        node: peer,
        rtt_us,
        bytes_per_s,
        back_bytes_per_s,
        call_ns: None,
        migration: None,
        at: unix_ns() / 1_000_000_000,
    };
    store(node, costs)?;
    Ok(costs)
}

fn check_other_node(node: &Node, peer: NodeId) -> Result<(), Refusal> {
    if node.map().contains(peer) && peer != node.me() {
        return Ok(());
    }
    let message = format!("there is no other node {peer} in the map");
    Err(Refusal::new(RefusalKind::NotFound, message).hint("tern status"))
}

/// Stores the costs of one node, and makes the balancer use them from now on.
pub(crate) fn store(node: &Node, costs: Costs) -> Result<(), Refusal> {
    check_other_node(node, costs.node)?;
    node.link_costs.store(costs)?;
    node.cluster.set_link(costs.node, to_link_cost(&costs));
    tracing::info!(node = %costs.node, ?costs, "a link was measured");
    Ok(())
}

/// A row for each other node with known costs.
pub(crate) fn rows(node: &Node) -> Vec<LinkRow> {
    let (tuned, links) = (node.link_costs.all(), node.cluster.links());
    let row = |other: NodeId| {
        let (tuned, link) = (tuned.get(&other).copied(), links.get(&other).copied().unwrap_or_default());
        let known = tuned.is_some() || link != LinkEstimate::default();
        known.then_some(LinkRow { node: other, rtt_us: link.rtt_us, bytes_per_s: link.bytes_per_s, tuned })
    };
    node.other_nodes().into_iter().filter_map(row).collect()
}
