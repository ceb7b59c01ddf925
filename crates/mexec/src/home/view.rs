//! What is known of all nodes: ternd is asked now and then.

use super::choice::Known;
use crate::lock;
use anyhow::{Result, bail};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_control::{ClusterReport, NodeState, Refusal, RefusalKind, Reply, Request, stream};
use tern_ids::NodeId;
use tern_node::Config;

/// How old an answer may be; ternd itself hears of the others every half second.
const FRESH: Duration = Duration::from_millis(300);

/// How old it may be while ternd does not answer: that is restarted, say, and builds go on.
const STALE: Duration = Duration::from_secs(15);

/// How long ternd may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// The nodes, as ternd said last.
#[derive(Debug)]
pub(super) struct View {
    control: PathBuf,
    last: Mutex<Option<(Instant, ClusterReport)>>,
}

impl View {
    pub(super) fn new(config: &Config) -> Self {
        Self { control: config.run_dir.join("control"), last: Mutex::new(None) }
    }

    /// All nodes of the map; of each, how many commands are there from here, and how many of them its load has in it.
    ///
    /// # Errors
    /// If ternd does not answer, or is in no cluster.
    pub(super) fn nodes(&self, ours: impl Fn(NodeId) -> (u32, f32)) -> Result<Vec<Known>> {
        let mut last = lock(&self.last);
        if last.as_ref().is_none_or(|(since, _)| since.elapsed() > FRESH) {
            // Whoever else wants it waits for this one.
            match self.ask() {
                Ok(report) => *last = Some((Instant::now(), report)),
                Err(_) if last.as_ref().is_some_and(|(since, _)| since.elapsed() < STALE) => {}
                Err(error) => return Err(error),
            }
        }
        let Some((_, report)) = &*last else { bail!("ternd has said nothing") };
        let known = report.nodes.iter().map(|node| {
            let mine = node.node == report.me;
            let (ours, seen) = ours(node.node);
            Known {
                node: node.node,
                speed: node.speed,
                cpus: node.cpus,
                load: node.load,
                ours,
                seen,
                // Whoever blocks his node keeps others out, and not himself.
                open: mine || node.state == NodeState::Alive && !node.flags.block,
                there: mine || node.state != NodeState::Dead,
            }
        });
        Ok(known.collect())
    }

    fn ask(&self) -> Result<ClusterReport> {
        let unavailable = |error: std::io::Error| {
            let said = format!("ternd does not answer: {error}");
            Refusal::new(RefusalKind::Unavailable, said).hint("systemctl start ternd")
        };
        let mut socket = UnixStream::connect(&self.control).map_err(unavailable)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        stream::write(&mut socket, &Request::Cluster).map_err(unavailable)?;
        match stream::read(&mut socket).map_err(unavailable)? {
            Reply::Cluster(report) => Ok(report),
            Reply::Refused(refusal) => Err(refusal.into()),
            _ => bail!("ternd answers something else"),
        }
    }
}
