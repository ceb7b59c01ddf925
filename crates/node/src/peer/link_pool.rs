//! Idle links to other daemons.

use crate::os::sync::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_wire::Link;

/// How long a link may be idle: less than the timeout of the other side.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum number of links that are kept.
const MAX_IDLE_LINKS: usize = 64;

/// Idle links to other daemons, kept for the next request. Some requests are made every second, and
/// a new link would cost a handshake each time.
#[derive(Debug, Default)]
pub(crate) struct LinkPool(Mutex<HashMap<NodeId, (Link, Instant)>>);

impl LinkPool {
    /// Takes the idle link to a node, if there is one that was used recently enough.
    pub(super) fn take(&self, peer: NodeId) -> Option<Link> {
        lock(&self.0).remove(&peer).filter(|(_, since)| since.elapsed() < IDLE_TIMEOUT).map(|(link, _)| link)
    }

    /// Keeps a link for the next request, unless the pool is full.
    pub(super) fn put(&self, peer: NodeId, link: Link) {
        let mut pool = lock(&self.0);
        if pool.len() >= MAX_IDLE_LINKS {
            pool.retain(|_, (_, since)| since.elapsed() < IDLE_TIMEOUT);
        }
        if pool.len() < MAX_IDLE_LINKS {
            pool.insert(peer, (link, Instant::now()));
        }
    }
}
