//! The state of all nodes, queried from ternd and cached.

use super::ranking::NodeInfo;
use crate::lock;
use anyhow::{Result, bail};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_control::{ClusterReport, NodeState, Refusal, RefusalKind, Reply, Request, stream};
use tern_ids::NodeId;
use tern_node::Config;

/// Maximum age of the cache. ternd itself receives the others' loads every half second.
const MAX_AGE: Duration = Duration::from_millis(300);

/// Maximum age of the cache while ternd does not respond: builds continue while it is restarted.
const MAX_STALE_AGE: Duration = Duration::from_secs(15);

/// Time limit for ternd's reply.
const TERND_TIMEOUT: Duration = Duration::from_secs(5);

/// The cached state of all nodes.
#[derive(Debug)]
pub(super) struct ClusterView {
    control: PathBuf,
    cache: Mutex<Option<(Instant, ClusterReport)>>,
}

impl ClusterView {
    pub(super) fn new(config: &Config) -> Self {
        Self { control: config.run_dir.join("control"), cache: Mutex::new(None) }
    }

    /// All nodes of the map. `our_commands` returns the number of this node's commands on a node,
    /// and how many busy CPUs of the node's load are due to them.
    ///
    /// # Errors
    /// If ternd does not respond, or is in no cluster.
    pub(super) fn nodes(&self, our_commands: impl Fn(NodeId) -> (u32, f32)) -> Result<Vec<NodeInfo>> {
        let mut cache = lock(&self.cache);
        if cache.as_ref().is_none_or(|(since, _)| since.elapsed() > MAX_AGE) {
            // The cache stays locked, so other callers wait for this query.
            match self.query() {
                Ok(report) => *cache = Some((Instant::now(), report)),
                Err(_) if cache.as_ref().is_some_and(|(since, _)| since.elapsed() < MAX_STALE_AGE) => {}
                Err(error) => return Err(error),
            }
        }
        let Some((_, report)) = &*cache else { bail!("ternd has not reported yet") };
        let nodes = report.nodes.iter().map(|node| {
            let is_me = node.node == report.me;
            let (our_commands, in_load) = our_commands(node.node);
            NodeInfo {
                node: node.node,
                speed: node.speed,
                cpus: node.cpus,
                load: node.load,
                our_commands,
                in_load,
                // `block` keeps other nodes' commands out, not this node's.
                is_open: is_me || node.state == NodeState::Alive && !node.flags.block,
                is_reachable: is_me || node.state != NodeState::Dead,
            }
        });
        Ok(nodes.collect())
    }

    fn query(&self) -> Result<ClusterReport> {
        let unavailable = |error: std::io::Error| {
            let message = format!("ternd does not answer: {error}");
            Refusal::new(RefusalKind::Unavailable, message).hint("systemctl start ternd")
        };
        let mut socket = UnixStream::connect(&self.control).map_err(unavailable)?;
        socket.set_read_timeout(Some(TERND_TIMEOUT))?;
        socket.set_write_timeout(Some(TERND_TIMEOUT))?;
        stream::write(&mut socket, &Request::Cluster).map_err(unavailable)?;
        match stream::read(&mut socket).map_err(unavailable)? {
            Reply::Cluster(report) => Ok(report),
            Reply::Refused(refusal) => Err(refusal.into()),
            _ => bail!("ternd sent an unexpected reply"),
        }
    }
}
