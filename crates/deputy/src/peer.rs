//! One link to a guest shim, kept up over breaks.

use std::time::{Duration, Instant};
use tern_ids::{Fingerprint, HomePid, NodeId, ShimId};
use tern_migrate::message::{Inbox, Message, send};
use tern_wire::{Link, LinkError};

/// A guest shim.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) node: NodeId,
    pub(crate) shim: ShimId,
    pub(crate) address: String,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) link: Option<Link>,
    pub(crate) inbox: Inbox,
    /// When it was last heard of.
    pub(crate) heard: Instant,
    /// When we last showed it that we are there.
    pub(crate) spoke: Instant,
    /// Since when the link has been broken.
    pub(crate) lost: Option<Instant>,
    /// Its node shows its guests files of this home, so that large ones that they map need not be sent.
    pub(crate) shows_files: bool,
    /// A thread is trying to reach it again.
    pub(crate) seeking: bool,
}

impl Peer {
    pub(crate) fn new(
        node: NodeId,
        shim: ShimId,
        address: String,
        fingerprint: Fingerprint,
        link: Link,
    ) -> Self {
        let (now, inbox) = (Instant::now(), Inbox::default());
        let link = Some(link);
        Self {
            node,
            shim,
            address,
            fingerprint,
            link,
            inbox,
            heard: now,
            spoke: now,
            lost: None,
            shows_files: false,
            seeking: false,
        }
    }

    /// Sends a message, if the link is up. What must not be lost is sent again on the next link by whoever
    /// needs it.
    pub(crate) fn tell(&mut self, pid: HomePid, message: &Message, bytes: &[u8]) -> Result<(), LinkError> {
        match &mut self.link {
            Some(link) => send(link, pid, message, bytes),
            None => Err(LinkError::Closed),
        }
    }

    /// Closes the link: there is nothing left to say.
    pub(crate) fn close(&mut self) {
        if let Some(mut link) = self.link.take() {
            let _best_effort = link.drain(Instant::now() + Duration::from_millis(200));
        }
    }

    /// Notes that the link is broken.
    pub(crate) fn lose(&mut self) {
        if self.link.take().is_some() {
            tracing::warn!(node = %self.node, "the link to a guest's node is cut");
            self.lost = Some(Instant::now());
            self.inbox = Inbox::default();
        }
    }

    /// Notes that it is back.
    pub(crate) fn found(&mut self, link: Link) {
        tracing::info!(node = %self.node, "the link to a guest's node is back");
        self.link = Some(link);
        (self.lost, self.heard) = (None, Instant::now());
    }

    /// How long it has been out of reach.
    pub(crate) fn missing(&self) -> Duration {
        self.lost.map_or(Duration::ZERO, |since| since.elapsed())
    }
}
