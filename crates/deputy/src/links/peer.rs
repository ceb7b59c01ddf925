//! The connection to one guest shim, which survives broken links.

use std::time::{Duration, Instant};
use tern_ids::{Fingerprint, HomePid, NodeId, ShimId};
use tern_migrate::message::{Message, Reassembler, send};
use tern_wire::{Link, LinkError};

/// How long the last messages to a peer that is not needed any more may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A guest shim.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) node: NodeId,
    pub(crate) shim: ShimId,
    pub(crate) address: String,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) link: Option<Link>,
    pub(crate) inbox: Reassembler,
    /// When the last heartbeat was sent.
    pub(crate) last_heartbeat: Instant,
    /// When the link broke.
    pub(crate) lost_since: Option<Instant>,
    /// Its node mounts this home's files for its guests, so large mapped files need not be sent.
    pub(crate) mounts_home_files: bool,
    /// Since when no process refers to it.
    pub(crate) unused_since: Option<Instant>,
    /// A thread is trying to reconnect.
    pub(crate) is_reconnecting: bool,
}

impl Peer {
    pub(crate) fn new(
        node: NodeId,
        shim: ShimId,
        address: String,
        fingerprint: Fingerprint,
        link: Link,
    ) -> Self {
        let (now, inbox) = (Instant::now(), Reassembler::default());
        let link = Some(link);
        Self {
            node,
            shim,
            address,
            fingerprint,
            link,
            inbox,
            last_heartbeat: now,
            lost_since: None,
            mounts_home_files: false,
            unused_since: None,
            is_reconnecting: false,
        }
    }

    /// Whether its link is up and has sent everything.
    pub(crate) fn is_ready(&self) -> bool {
        self.link.as_ref().is_some_and(|link| !link.wants_write())
    }

    /// Sends a message if the link is up. A message that must not be lost is sent again on the next
    /// link by the code that needs it.
    pub(crate) fn send(&mut self, pid: HomePid, message: &Message, bytes: &[u8]) -> Result<(), LinkError> {
        match &mut self.link {
            Some(link) => send(link, pid, message, bytes),
            None => Err(LinkError::Closed),
        }
    }

    /// Sends what is queued on the link of a peer to which no process refers. Returns whether the
    /// peer can be removed, which closes the link.
    pub(crate) fn flush_and_check_removable(&mut self) -> bool {
        let since = *self.unused_since.get_or_insert_with(Instant::now);
        let Some(link) = &mut self.link else { return true };
        // Ok(true): all is sent.
        !matches!(link.flush(), Ok(false)) || since.elapsed() > CLOSE_TIMEOUT
    }

    /// Records that the link is broken.
    pub(crate) fn mark_lost(&mut self) {
        if self.link.take().is_some() {
            tracing::warn!(node = %self.node, "the link to a guest's node is cut");
            self.lost_since = Some(Instant::now());
            self.inbox = Reassembler::default();
        }
    }

    /// Takes the new link after a reconnect.
    pub(crate) fn reconnected(&mut self, link: Link) {
        tracing::info!(node = %self.node, "the link to a guest's node is back");
        self.link = Some(link);
        self.lost_since = None;
    }

    /// How long the link has been broken; zero while it is up.
    pub(crate) fn time_since_loss(&self) -> Duration {
        self.lost_since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}
