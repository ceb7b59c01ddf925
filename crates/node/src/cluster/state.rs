//! The state of the cluster as this node sees it: its own load, gossip, links and recent
//! migrations.

use crate::cluster::link_costs::to_link_cost;
use crate::cluster::load_entry::LoadEntry;
use crate::os::clock::unix_ns;
use crate::os::sync::lock;
use crate::process::procfs::{is_same_process, read_stat};
use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_control::{Costs, MigrationReport};
use tern_gossip::Gossip;
use tern_ids::{HomePid, NodeId};
use tern_load::LinkEstimate;

/// Number of migrations that are kept for `mon`.
const MAX_RECENT_MIGRATIONS: usize = 64;

/// When migrations of this many processes are counted, the counts of ended ones are dropped.
const MAX_COUNTED_PROCESSES: usize = 4096;

/// Own load, gossip, links and migrations.
#[derive(Debug)]
pub(crate) struct ClusterState {
    pub(super) gossip: Mutex<Gossip>,
    pub(super) period: Duration,
    /// The last sample, and when it was taken in milliseconds since boot.
    pub(super) own: Mutex<Option<(LoadEntry, u64)>>,
    links: Mutex<HashMap<NodeId, LinkEstimate>>,
    pub(super) recent: Mutex<VecDeque<(Instant, MigrationReport)>>,
    /// Number of migrations of each process, by pid and start time.
    migrations: Mutex<HashMap<(HomePid, u64), u32>>,
}

impl ClusterState {
    /// A state without information, except for link costs that were measured earlier.
    pub(crate) fn new<'a>(me: NodeId, measured: impl Iterator<Item = &'a Costs>) -> Self {
        let config = tern_gossip::GossipConfig::default();
        // Later incarnations have higher numbers unless the clock was set back across a restart. In
        // that case the other nodes report a later incarnation, and this node takes a higher
        // number.
        let incarnation = unix_ns() / 1_000_000;
        Self {
            gossip: Mutex::new(Gossip::new(me, incarnation, config, rand::random())),
            period: Duration::from_millis(config.period),
            own: Mutex::default(),
            links: Mutex::new(measured.map(|costs| (costs.node, to_link_cost(costs))).collect()),
            recent: Mutex::default(),
            migrations: Mutex::default(),
        }
    }

    /// Records the round trip of a short request.
    pub(crate) fn record_round_trip(&self, peer: NodeId, took: Duration) {
        lock(&self.links).entry(peer).or_default().add_round_trip(took);
    }

    /// Records a finished migration of a process of this home.
    pub(crate) fn record_migration(&self, report: &MigrationReport) {
        let mut recent = lock(&self.recent);
        recent.push_front((Instant::now(), report.clone()));
        recent.truncate(MAX_RECENT_MIGRATIONS);
        drop(recent);
        if let Ok(found) = read_stat(report.pid.0) {
            self.drop_ended();
            *lock(&self.migrations).entry((report.pid, found.start)).or_default() += 1;
        }
        let took = Duration::try_from_secs_f64(report.total_ms / 1e3).unwrap_or_default();
        lock(&self.links).entry(report.to).or_default().add_transfer(report.bytes, took);
    }

    /// Drops the counts of ended processes if there are many.
    fn drop_ended(&self) {
        let counted: Vec<(HomePid, u64)> = {
            let migrations = lock(&self.migrations);
            if migrations.len() < MAX_COUNTED_PROCESSES {
                return;
            }
            migrations.keys().copied().collect()
        };
        for (pid, start) in counted.into_iter().filter(|(pid, start)| !is_same_process(pid.0, *start)) {
            lock(&self.migrations).remove(&(pid, start));
        }
    }

    /// Number of migrations of a process since this ternd started.
    pub(crate) fn migrations_of(&self, pid: HomePid, start: u64) -> u32 {
        lock(&self.migrations).get(&(pid, start)).copied().unwrap_or(0)
    }

    /// The measured costs of the links to other nodes.
    pub(crate) fn links(&self) -> HashMap<NodeId, LinkEstimate> {
        lock(&self.links).clone()
    }

    /// Sets the cost of one link; later measurements correct it.
    pub(crate) fn set_link(&self, peer: NodeId, link: LinkEstimate) {
        lock(&self.links).insert(peer, link);
    }
}
