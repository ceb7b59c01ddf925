//! The messages between daemons, and between a daemon and a machine that joins.
//!
//! ```text
//!  Node:  client ── Hello ──▶ ◀── Hello ──   then   ── PeerRequest ──▶ ◀── PeerReply ──
//!  Join:  client ◀── Challenge ──   ── JoinRequest ──▶   ◀── JoinReply ──
//! ```

use crate::cluster::users::UserList;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::time::Instant;
use tern_balancer::{MoveOffer, OfferReply};
use tern_control::{ProcessRow, Refusal};
use tern_ids::{Epoch, Fingerprint, HomePid, MigrationId, NodeId, ShimId};
use tern_wire::{Link, LinkError, MessageError};

/// The version of these messages. Nodes whose versions differ by at most one are compatible.
pub(crate) const PROTOCOL: u16 = 1;

/// The frame kind of every message between daemons.
const FRAME_KIND: u8 = 1;

/// The first message in each direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// [`PROTOCOL`] of the sender.
    pub(crate) protocol: u16,
    /// The version of the sender's ternd.
    pub(crate) version: String,
    /// `/proc/sys/kernel/random/boot_id`. If it changes, all processes of the earlier boot are
    /// gone.
    pub(crate) boot_id: String,
    /// The version of the sender's map.
    pub(crate) map_version: u64,
    /// The sender's wall clock, in nanoseconds since 1970.
    pub(crate) clock_ns: u64,
}

/// A request of one daemon to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum PeerRequest {
    /// Does the node answer?
    Ping,
    /// Start a shim for a guest whose home is the sender.
    StartGuestShim {
        /// The migration that starts.
        migration: MigrationId,
        /// The fingerprints of the keys whose connections the shim accepts.
        accepted_keys: Vec<Fingerprint>,
        /// The user of the process.
        uid: u32,
        /// The group of the process.
        gid: u32,
    },
    /// Does this shim run?
    IsShimAlive {
        /// The shim.
        shim: ShimId,
    },
    /// List the processes of the node.
    Processes,
    /// Send the map.
    GetMap,
    /// A newer map.
    SetMap {
        /// Its text.
        text: String,
    },
    /// A gossip message.
    Gossip(Vec<u8>),
    /// May this process of the sender come? A node that accepts includes it in its load from then
    /// on.
    OfferProcess(MoveOffer),
    /// The outcome of an accepted offer: the process has arrived, is not coming after all, or has
    /// ended or left.
    OfferOutcome {
        /// The pid of the process at its home, which is the sender.
        pid: HomePid,
        /// Whether it has arrived. `false`: it does not come, or it has ended or left.
        arrived: bool,
    },
    /// Move these processes of the receiver off the sender. Acknowledged at once and done later.
    MoveAway {
        /// The pids of the processes at their home, which is the receiver.
        pids: Vec<HomePid>,
    },
    /// Does this home shim run, and does it wait for this epoch of this process? The guest is on the
    /// sender's node.
    IsGuestAwaited {
        /// The shim.
        shim: ShimId,
        /// The process.
        pid: HomePid,
        /// The epoch.
        epoch: Epoch,
    },
    /// A measurement of the link; the bytes are ignored.
    Probe {
        /// Bytes that are sent.
        bytes: Vec<u8>,
        /// Number of bytes to send back.
        reply_len: u32,
    },
}

/// The reply to a [`PeerRequest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum PeerReply {
    /// The request was refused.
    Refused(Refusal),
    /// To `Ping`.
    Pong {
        /// The release of the kernel.
        kernel: String,
        /// The number of guests.
        guests: u32,
        /// Whether the node accepts guests.
        accepts_guests: bool,
    },
    /// To `StartGuestShim`.
    GuestShimStarted {
        /// The new shim.
        shim: ShimId,
        /// The fingerprint of its key.
        fingerprint: Fingerprint,
    },
    /// To `IsShimAlive` and `IsGuestAwaited`.
    YesOrNo(bool),
    /// To `Processes`.
    Processes(Vec<ProcessRow>),
    /// To `GetMap`.
    Map(String),
    /// To `OfferProcess`.
    OfferAnswer(OfferReply),
    /// To `SetMap`: the node has this map or a newer one. To `MoveAway`: the work was started. To
    /// `OfferOutcome` and `Gossip`: the message was processed.
    Done,
    /// To `Probe`.
    Probed(Vec<u8>),
}

/// The first message of the founding node to a machine that joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Challenge {
    /// [`PROTOCOL`] of the sender.
    pub(crate) protocol: u16,
    /// Signed by the machine that joins.
    pub(crate) nonce: [u8; 32],
}

impl Challenge {
    /// The bytes that the joining machine signs with its new key.
    pub(crate) fn signed_bytes(&self, secret: &[u8; 16]) -> Vec<u8> {
        [&b"tern join"[..], &self.nonce, secret].concat()
    }
}

/// The request of a machine that wants to become a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JoinRequest {
    /// [`PROTOCOL`] of the sender.
    pub(crate) protocol: u16,
    /// From the token.
    pub(crate) secret: [u8; 16],
    /// Its new public key.
    pub(crate) public_key: Vec<u8>,
    /// The signature of [`Challenge::signed_bytes`].
    pub(crate) signature: Vec<u8>,
    /// The node number that it asks for.
    pub(crate) node: Option<NodeId>,
    /// `HOST:PORT` under which other nodes reach it.
    pub(crate) address: String,
    /// Its name.
    pub(crate) name: Option<String>,
    /// Its user database.
    pub(crate) users: UserList,
}

/// The reply to a [`JoinRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum JoinReply {
    /// Not admitted. The token stays valid, unless the new map could not be written.
    Refused(Refusal),
    /// The machine is a member now.
    Admitted {
        /// Its node number.
        node: NodeId,
        /// Its certificate.
        certificate: Vec<u8>,
        /// The certificate of the authority.
        authority: Vec<u8>,
        /// The map, which includes the new node.
        map: String,
        /// Sentences about what will not work well.
        warnings: Vec<String>,
    },
}

/// Why an exchange between daemons failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    /// The link failed.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A message could not be encoded or decoded.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The frame is of an unknown kind.
    #[error("the peer sent a frame of unknown kind {0}")]
    Kind(u8),
    /// The versions of the protocol differ by more than one.
    #[error("the peer uses protocol version {0}, this node {PROTOCOL}; upgrade the older one")]
    Protocol(u16),
}

/// Sends one message.
pub(crate) fn send<T: Serialize>(link: &mut Link, message: &T, deadline: Instant) -> Result<(), PeerError> {
    let bytes = tern_wire::encode(message)?;
    Ok(link.send(FRAME_KIND, 0, &[&bytes], deadline)?)
}

/// Receives one message.
pub(crate) fn receive<T: DeserializeOwned>(link: &mut Link, deadline: Instant) -> Result<T, PeerError> {
    let frame = link.recv(deadline)?;
    if frame.kind != FRAME_KIND {
        return Err(PeerError::Kind(frame.kind));
    }
    Ok(tern_wire::decode(&frame.payload)?)
}

/// Checks that a peer's version of the protocol is compatible.
pub(crate) fn check_protocol(theirs: u16) -> Result<(), PeerError> {
    if theirs.abs_diff(PROTOCOL) <= 1 { Ok(()) } else { Err(PeerError::Protocol(theirs)) }
}
