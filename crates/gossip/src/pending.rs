//! Messages that a node still has to send: suspicions, probes, replies and urgent news. All these
//! queues are bounded. They hold node numbers instead of row indices, because rows of the table
//! move when the map changes.

use std::collections::VecDeque;
use tern_ids::NodeId;

/// Limit of queued probes, and of queued replies. Further ones are dropped; the asking node asks
/// again later.
const MAX_QUEUED: usize = 32;

/// How many other nodes are asked about a suspect.
pub(crate) const ASKED_NODES: u8 = 3;

/// A node that this one could not reach, or that did not acknowledge its probes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Suspicion {
    pub(crate) node: NodeId,
    /// When the suspicion began. Any later sign of life ends it.
    pub(crate) since: i64,
    /// Failed sends and unacknowledged probes.
    pub(crate) failures: u8,
    /// How many more nodes are to be asked.
    pub(crate) asks_left: u8,
    /// When a node was last asked.
    pub(crate) asked_at: i64,
}

/// A message to send that requests an acknowledgement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Probe {
    pub(crate) node: NodeId,
    /// The node that suspects the probed node and has asked for the probe; `None` if this node
    /// started it.
    pub(crate) asker: Option<NodeId>,
    /// A sign of life later than this settles the probe.
    pub(crate) since: i64,
    pub(crate) sent: Option<i64>,
    pub(crate) attempts: u8,
}

/// A message owed to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) to: NodeId,
    /// A node whose entry or death it must include, besides this node's own entry.
    pub(crate) about: Option<NodeId>,
}

/// A death or a return that all nodes should learn soon.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piggyback {
    pub(crate) node: NodeId,
    /// Number of further messages that will carry it.
    pub(crate) sends_left: u8,
}

/// Everything that is pending.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    pub(crate) suspicions: Vec<Suspicion>,
    pub(crate) probes: VecDeque<Probe>,
    pub(crate) replies: VecDeque<Reply>,
    pub(crate) piggybacks: Vec<Piggyback>,
}

impl Pending {
    pub(crate) fn suspicion(&mut self, node: NodeId) -> Option<&mut Suspicion> {
        self.suspicions.iter_mut().find(|suspicion| suspicion.node == node)
    }

    pub(crate) fn queue_probe(&mut self, probe: Probe) {
        let same = |other: &Probe| (other.node, other.asker) == (probe.node, probe.asker);
        if self.probes.len() < MAX_QUEUED && !self.probes.iter().any(same) {
            self.probes.push_back(probe);
        }
    }

    /// Whether another node suspects it and has asked this one.
    pub(crate) fn is_suspected_by_others(&self, node: NodeId) -> bool {
        self.probes.iter().any(|probe| probe.node == node && probe.asker.is_some())
    }

    pub(crate) fn queue_reply(&mut self, to: NodeId, about: Option<NodeId>) {
        let reply = Reply { to, about };
        if self.replies.len() < MAX_QUEUED && !self.replies.contains(&reply) {
            self.replies.push_back(reply);
        }
    }

    /// The node was alive at that time: settles earlier suspicions and probes, and queues replies
    /// to the nodes that asked. Returns whether that ended a suspicion of the node.
    pub(crate) fn settle(&mut self, node: NodeId, born: i64) -> bool {
        let mut asked = Vec::new();
        self.probes.retain(|probe| {
            let settled = probe.node == node && probe.since < born;
            asked.extend(probe.asker.filter(|_| settled));
            !settled
        });
        asked.into_iter().for_each(|asker| self.queue_reply(asker, Some(node)));
        let before = self.suspicions.len();
        self.suspicions.retain(|suspicion| suspicion.node != node || suspicion.since >= born);
        self.suspicions.len() < before
    }

    /// The node is dead or no longer in the map: drops its probes and suspicion.
    pub(crate) fn drop_suspicion(&mut self, node: NodeId) {
        self.probes.retain(|probe| probe.node != node);
        self.suspicions.retain(|suspicion| suspicion.node != node);
    }

    /// Queues urgent news of a node.
    pub(crate) fn queue_piggyback(&mut self, node: NodeId, sends_left: u8) {
        self.piggybacks.retain(|news| news.node != node);
        self.piggybacks.push(Piggyback { node, sends_left });
    }

    /// This piece of news has been put into a message.
    pub(crate) fn mark_sent(&mut self, node: NodeId) {
        if let Some(news) = self.piggybacks.iter_mut().find(|news| news.node == node) {
            news.sends_left = news.sends_left.saturating_sub(1);
        }
    }
}
