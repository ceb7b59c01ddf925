//! What nodes say to each other, and to a machine that joins.
//!
//! ```text
//!  Node:  asker ── Hello ──▶ ◀── Hello ──   then   ── PeerRequest ──▶ ◀── PeerReply ──
//!  Join:        ◀── Challenge ──   ── Application ──▶   ◀── Admission ──
//! ```

use crate::users::Users;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::time::Instant;
use tern_balancer::{Answer, Offer};
use tern_control::{ProcessRow, Refusal};
use tern_ids::{Epoch, Fingerprint, HomePid, MigrationId, NodeId, ShimId};
use tern_wire::{Link, LinkError, MessageError};

/// The version of these messages. Nodes whose versions differ by one understand each other.
pub const PROTOCOL: u16 = 1;

/// The kind of every frame between daemons.
const KIND: u8 = 1;

/// The first message in either direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`] of the sender.
    pub protocol: u16,
    /// Version of its ternd.
    pub version: String,
    /// `/proc/sys/kernel/random/boot_id`: another one, and all that ran there before is gone.
    pub boot: String,
    /// The version of its map.
    pub map: u64,
    /// Its wall clock, nanoseconds since 1970.
    pub clock: u64,
}

/// What one node asks of another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum PeerRequest {
    /// Are you there?
    Ping,
    /// Start a shim for a guest from my processes.
    Host {
        /// The migration that begins.
        migration: MigrationId,
        /// Whose connections it shall accept.
        accept: Vec<Fingerprint>,
        /// The user.
        uid: u32,
        /// The group.
        gid: u32,
    },
    /// Does this shim run?
    ShimAlive {
        /// The shim.
        shim: ShimId,
    },
    /// The processes that you would show.
    Processes,
    /// Your map, please.
    GetMap,
    /// A newer map.
    SetMap {
        /// Its text.
        text: String,
    },
    /// What is known here of the cluster.
    Gossip(Vec<u8>),
    /// May this process of mine come? Who agrees counts it in from now on.
    MayCome(Offer),
    /// What has become of it: it is there, or does not come after all, or was there and has ended or left.
    Settled {
        /// By its number at its home, which is mine.
        pid: HomePid,
        /// It is there, or was: it may have ended or left by now.
        came: bool,
    },
    /// These processes of yours shall leave me; I have reasons. Answered at once, done after.
    TakeBack {
        /// By their numbers at their home, which is yours.
        pids: Vec<HomePid>,
    },
    /// Does this shim run, and wait for this life of this process, which is a guest here?
    Awaited {
        /// The shim.
        shim: ShimId,
        /// The process.
        pid: HomePid,
        /// The life.
        epoch: Epoch,
    },
    /// Nothing is meant by these bytes but that they arrive, nor by those that are wanted back.
    Probe {
        /// Sent.
        bytes: Vec<u8>,
        /// How many to send back.
        want: u32,
    },
}

/// What it answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum PeerReply {
    /// Not done.
    Refused(Refusal),
    /// To `Ping`.
    Pong {
        /// Release of the kernel, and what it lacks for guests.
        kernel: String,
        /// Guests here.
        guests: u32,
        /// Whether it takes guests.
        open: bool,
    },
    /// To `Host`.
    Hosted {
        /// The new shim.
        shim: ShimId,
        /// The key to expect of it.
        fingerprint: Fingerprint,
    },
    /// To `ShimAlive` and `Awaited`.
    Alive(bool),
    /// To `Processes`.
    Processes(Vec<ProcessRow>),
    /// To `GetMap`.
    Map(String),
    /// To `MayCome`.
    Answer(Answer),
    /// To `SetMap`: it has that map, or a newer one. To `TakeBack`: it will. To `Settled` and `Gossip`.
    Done,
    /// To `Probe`.
    Probed(Vec<u8>),
}

/// What the founding node sends first to a machine that joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// [`PROTOCOL`] of the sender.
    pub protocol: u16,
    /// To be signed.
    pub nonce: [u8; 32],
}

impl Challenge {
    /// What the joining machine signs with its new key.
    pub fn to_sign(&self, secret: &[u8; 16]) -> Vec<u8> {
        [&b"tern join"[..], &self.nonce, secret].concat()
    }
}

/// A machine that wants to become a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Application {
    /// [`PROTOCOL`] of the sender.
    pub protocol: u16,
    /// From the token.
    pub secret: [u8; 16],
    /// Its new key.
    pub public_key: Vec<u8>,
    /// Over [`Challenge::to_sign`].
    pub signature: Vec<u8>,
    /// The number that it wishes.
    pub node: Option<NodeId>,
    /// `HOST:PORT` under which others reach it.
    pub address: String,
    /// Its name.
    pub name: Option<String>,
    /// Its people.
    pub users: Users,
}

/// The answer to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Admission {
    /// No; the token is as before.
    Refused(Refusal),
    /// Welcome.
    Admitted {
        /// Its number.
        node: NodeId,
        /// Its certificate.
        certificate: Vec<u8>,
        /// The authority's.
        authority: Vec<u8>,
        /// The map, with it in it.
        map: String,
        /// What it should know.
        warnings: Vec<String>,
    },
}

/// Why a conversation between daemons failed.
#[derive(Debug, thiserror::Error)]
pub enum TalkError {
    /// The link.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// What was said.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A frame of another kind.
    #[error("the peer sent a frame of unknown kind {0}")]
    Kind(u8),
    /// A version too different from ours.
    #[error("the peer speaks protocol version {0}, this node {PROTOCOL}; upgrade the older one")]
    Protocol(u16),
}

/// Sends one message.
pub(crate) fn say<T: Serialize>(link: &mut Link, message: &T, deadline: Instant) -> Result<(), TalkError> {
    let bytes = tern_wire::encode(message)?;
    Ok(link.send(KIND, 0, &[&bytes], deadline)?)
}

/// Receives one message.
pub(crate) fn hear<T: DeserializeOwned>(link: &mut Link, deadline: Instant) -> Result<T, TalkError> {
    let frame = link.recv(deadline)?;
    if frame.kind != KIND {
        return Err(TalkError::Kind(frame.kind));
    }
    Ok(tern_wire::decode(&frame.payload)?)
}

/// Whether a peer's version can be talked to.
pub(crate) fn check_protocol(theirs: u16) -> Result<(), TalkError> {
    if theirs.abs_diff(PROTOCOL) <= 1 { Ok(()) } else { Err(TalkError::Protocol(theirs)) }
}
