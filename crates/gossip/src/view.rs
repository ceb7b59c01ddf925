//! The other nodes as the caller of this crate sees them.

use tern_ids::NodeId;

/// The state of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberStatus {
    /// It is in the map, and no entry of it has been received.
    NeverSeen,
    /// It is running.
    Alive,
    /// This node could not reach it, or got no acknowledgement from it, and is asking others.
    Suspect,
    /// It was declared dead: two nodes could not reach it, or this node could not, and had no other
    /// to ask.
    Dead,
}

/// The stored state of another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member<'a> {
    /// Its number.
    pub node: NodeId,
    /// Its state.
    pub status: MemberStatus,
    /// False if this node's last message to it could not be sent. It can be alive all the same when
    /// only the path to it is cut; processes must not be sent there.
    pub reachable: bool,
    /// Its incarnation; a higher one is a later run.
    pub incarnation: u64,
    /// Age of the payload, in ms; for a dead node, the time since its death was declared. `None`
    /// without an entry.
    pub age: Option<u64>,
    /// Its payload, as last received.
    pub payload: &'a [u8],
}

/// A change of a node's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MembershipEvent {
    /// The first entry of it was received.
    Joined(NodeId),
    /// It was declared dead.
    Died(NodeId),
    /// It is alive after having been declared dead.
    Returned(NodeId),
}
