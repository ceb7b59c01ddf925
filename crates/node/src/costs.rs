//! What it costs to send to other nodes: measured when somebody asks for it (`tune`), and kept.
//!
//! While the cluster runs, round trips are measured by gossip and throughput by migrations (`cluster`), so that nobody
//! has to tune anything. What that cannot know before the first large migration is what a link carries; from what was
//! kept here the estimates start, and each new measurement corrects them.

use crate::files;
use crate::message::{PeerReply, PeerRequest};
use crate::slots::lock;
use crate::state::Node;
use crate::{cluster, peers};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_control::{Costs, LinkRow, Refusal, RefusalKind};
use tern_ids::NodeId;
use tern_load::LinkCost;

/// Round trips that are measured. Half of them are slower than what is told.
const ROUND_TRIPS: usize = 64;

/// Bytes that are sent at once; also the most that a node may ask for.
pub(crate) const PIECE: usize = 512 << 10;

/// How long bytes are sent in each direction.
const SENDING: Duration = Duration::from_millis(500);

/// How long it may take in all.
const LIMIT: Duration = Duration::from_secs(20);

/// The file has a line's worth for each of the map's 65535 nodes, at most.
const MOST_TEXT: usize = 16 << 20;

/// What was measured, in memory and in a file.
#[derive(Debug)]
pub(crate) struct Measured {
    path: PathBuf,
    now: Mutex<BTreeMap<NodeId, Costs>>,
}

impl Measured {
    /// What an earlier ternd left.
    pub(crate) fn open(cache_dir: &Path) -> Self {
        let path = cache_dir.join("costs.json");
        let text = files::read_bounded(&path, MOST_TEXT).unwrap_or_default();
        let read: Vec<Costs> = serde_json::from_str(&text).unwrap_or_default();
        Self { path, now: Mutex::new(read.into_iter().map(|costs| (costs.node, costs)).collect()) }
    }

    /// All of it.
    pub(crate) fn all(&self) -> BTreeMap<NodeId, Costs> {
        lock(&self.now).clone()
    }

    /// Keeps what was measured of a node.
    fn keep(&self, costs: Costs) -> Result<(), Refusal> {
        let mut now = lock(&self.now);
        let mut then = now.clone();
        then.insert(costs.node, costs);
        let list: Vec<_> = then.values().collect();
        let text = serde_json::to_string(&list).unwrap_or_default();
        files::replace(&self.path, &text, 0o644).map_err(|error| {
            let path = self.path.display();
            Refusal::new(RefusalKind::Internal, format!("cannot write {path}: {error}"))
        })?;
        *now = then;
        Ok(())
    }
}

/// What the balancer is to reckon with: what a migration gets through is less than what the link carries, where the
/// pages of a process are not read as fast.
pub(crate) fn link(costs: &Costs) -> LinkCost {
    let migrations = costs.migration.map_or(u64::MAX, |cost| (1_000_000 << 20) / cost.us_per_mib.max(1));
    LinkCost { rtt_us: costs.rtt_us, bytes_per_s: costs.bytes_per_s.min(migrations) }
}

/// Measures the link to a node, and keeps that.
pub(crate) fn measure(node: &Node, peer: NodeId) -> Result<Costs, Refusal> {
    must_be_another(node, peer)?;
    let deadline = Instant::now() + LIMIT;
    let mut talk = peers::Talk::begin(node, peer, deadline)?;
    let mut turn = |bytes: usize, want: usize| -> Result<Duration, Refusal> {
        let request = PeerRequest::Probe { bytes: vec![0; bytes], want: want as u32 };
        let begun = Instant::now();
        match talk.ask(&request)? {
            PeerReply::Probed(back) if back.len() == want => Ok(begun.elapsed()),
            PeerReply::Refused(refusal) => Err(refusal),
            _ => {
                let said = format!("node {peer} gave an answer to another question");
                Err(Refusal::new(RefusalKind::Internal, said))
            }
        }
    };
    let mut round_trips = (0..ROUND_TRIPS).map(|_| turn(0, 0)).collect::<Result<Vec<_>, _>>()?;
    round_trips.sort_unstable();
    let round_trip = round_trips[ROUND_TRIPS / 2];
    let mut carry = |bytes: usize, want: usize| -> Result<u64, Refusal> {
        let begun = Instant::now();
        let (mut carried, mut under_way) = (0u64, Duration::ZERO);
        while begun.elapsed() < SENDING {
            // Each piece is answered: that takes a round trip, in which nothing is carried.
            under_way += turn(bytes, want)?.saturating_sub(round_trip);
            carried += PIECE as u64;
        }
        Ok((carried as f64 / under_way.as_secs_f64().max(1e-6)) as u64)
    };
    let bytes_per_s = carry(PIECE, 0)?;
    let back_bytes_per_s = carry(0, PIECE)?;
    let rtt_us = u32::try_from(round_trip.as_nanos().div_ceil(1000)).unwrap_or(u32::MAX).max(1);
    let costs = Costs {
        node: peer,
        rtt_us,
        bytes_per_s,
        back_bytes_per_s,
        call_ns: None,
        migration: None,
        at: crate::state::clock() / 1_000_000_000,
    };
    keep(node, costs)?;
    Ok(costs)
}

fn must_be_another(node: &Node, peer: NodeId) -> Result<(), Refusal> {
    if node.map().contains(peer) && peer != node.me() {
        return Ok(());
    }
    let said = format!("there is no other node {peer} in the map");
    Err(Refusal::new(RefusalKind::NotFound, said).hint("tern status"))
}

/// Keeps what was measured of a node, and has the balancer reckon with it from now on.
pub(crate) fn keep(node: &Node, costs: Costs) -> Result<(), Refusal> {
    must_be_another(node, costs.node)?;
    node.measured.keep(costs)?;
    cluster::set_link(node, costs.node, link(&costs));
    tracing::info!(node = %costs.node, ?costs, "the way to a node was measured");
    Ok(())
}

/// Each other node of which something is known.
pub(crate) fn rows(node: &Node) -> Vec<LinkRow> {
    let (tuned, links) = (node.measured.all(), cluster::links(node));
    let row = |other: NodeId| {
        let (tuned, link) = (tuned.get(&other).copied(), links.get(&other).copied().unwrap_or_default());
        let known = tuned.is_some() || link != LinkCost::default();
        known.then_some(LinkRow { node: other, rtt_us: link.rtt_us, bytes_per_s: link.bytes_per_s, tuned })
    };
    node.others().into_iter().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use tern_control::MigrationCosts;

    fn costs(node: u16, us_per_mib: Option<u64>) -> Costs {
        Costs {
            node: NodeId(node),
            rtt_us: 150,
            bytes_per_s: 1 << 30,
            back_bytes_per_s: 1 << 30,
            call_ns: Some(90_000),
            migration: us_per_mib.map(|us_per_mib| MigrationCosts { fixed_us: 20_000, us_per_mib }),
            at: 1_800_000_000,
        }
    }

    #[test]
    fn what_was_measured_survives_a_restart() {
        let dir = Scratch::new("costs");
        let measured = Measured::open(&dir.0);
        assert!(measured.all().is_empty());
        for each in [costs(2, None), costs(3, Some(4_000)), costs(2, Some(2_000))] {
            measured.keep(each).unwrap();
        }
        let again = Measured::open(&dir.0).all();
        assert_eq!(
            again.values().copied().collect::<Vec<_>>(),
            [costs(2, Some(2_000)), costs(3, Some(4_000))]
        );
        std::fs::write(dir.0.join("costs.json"), "[{}]").unwrap();
        assert!(Measured::open(&dir.0).all().is_empty());
    }

    #[test]
    fn the_balancer_reckons_with_what_a_migration_gets_through() {
        assert_eq!(link(&costs(2, None)), LinkCost { rtt_us: 150, bytes_per_s: 1 << 30 });
        assert_eq!(link(&costs(2, Some(4_000))).bytes_per_s, 250 << 20);
        // Nothing that a file or a tool says can harm.
        assert!(link(&costs(2, Some(0))).bytes_per_s > 0 && link(&costs(2, Some(u64::MAX))).bytes_per_s == 0);
    }
}
