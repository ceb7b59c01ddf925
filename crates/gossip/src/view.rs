//! What a node knows of the others, as it tells it.

use tern_ids::NodeId;

/// What is believed of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It is in the map, and nothing of it has been heard.
    Unheard,
    /// It runs.
    Alive,
    /// This node could not reach it, or got no answer from it, and is asking others.
    Suspect,
    /// Two nodes could not reach it.
    Dead,
}

/// What this node knows of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen<'a> {
    /// Which.
    pub node: NodeId,
    /// What is believed of it.
    pub status: Status,
    /// False if the last message of this node to it could not be sent. It can be alive all the same, when the way to it
    /// is cut: then it is no place to send a process to.
    pub reachable: bool,
    /// Which life of the node this is; a higher one is later.
    pub incarnation: u64,
    /// How old the payload is, in ms; of the dead, how long ago their death was found out. `None` if unheard.
    pub age: Option<u64>,
    /// What it last said of itself.
    pub payload: &'a [u8],
}

/// What has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// First heard of.
    Joined(NodeId),
    /// Found dead, by this node and another or by two others.
    Died(NodeId),
    /// Alive after all, or again.
    Returned(NodeId),
}
