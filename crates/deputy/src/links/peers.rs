//! The guest shims that a home shim has links to.

use crate::links::peer::Peer;
use std::collections::BTreeMap;
use tern_ids::{HomePid, NodeId};
use tern_migrate::message::Message;
use tern_wire::{Link, LinkError};

/// Identifies a peer for the lifetime of the home shim: no other peer ever has the same id, so that
/// the late result of a reconnect cannot reach another peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PeerId(u64);

impl PeerId {
    /// The peer of a process that has never been away.
    pub(crate) const NONE: Self = Self(0);
}

/// The peers by id. Each move has a guest shim of its own, so a peer to which no process refers any
/// more is removed ([`crate::shim::Shim::keep_alive`]).
#[derive(Debug, Default)]
pub(crate) struct Peers {
    by_id: BTreeMap<PeerId, Peer>,
    last_id: u64,
}

impl Peers {
    pub(crate) fn insert(&mut self, peer: Peer) -> PeerId {
        self.last_id += 1;
        self.by_id.insert(PeerId(self.last_id), peer);
        PeerId(self.last_id)
    }

    pub(crate) fn remove(&mut self, id: PeerId) {
        self.by_id.remove(&id);
    }

    pub(crate) fn get(&self, id: PeerId) -> Option<&Peer> {
        self.by_id.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: PeerId) -> Option<&mut Peer> {
        self.by_id.get_mut(&id)
    }

    /// The link of a peer; none if it is lost or closed.
    pub(crate) fn link(&self, id: PeerId) -> Option<&Link> {
        self.get(id)?.link.as_ref()
    }

    /// Sends a message, as [`Peer::send`].
    pub(crate) fn send(&mut self, id: PeerId, pid: HomePid, message: &Message) -> Result<(), LinkError> {
        self.get_mut(id).ok_or(LinkError::Closed)?.send(pid, message, &[])
    }

    /// The node of a peer.
    pub(crate) fn node(&self, id: PeerId) -> Option<NodeId> {
        Some(self.get(id)?.node)
    }

    /// A copy of the ids, so that peers can be removed while they are visited.
    pub(crate) fn ids(&self) -> Vec<PeerId> {
        self.by_id.keys().copied().collect()
    }

    /// The links that are up.
    pub(crate) fn links(&self) -> impl Iterator<Item = &Link> {
        self.by_id.values().filter_map(|peer| peer.link.as_ref())
    }

    /// All peers.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Peer> {
        self.by_id.values_mut()
    }
}
