//! The rows and reports that tools print; their fields are also the `--json` formats.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use tern_ids::{HomePid, MigrationId, NodeId};

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The kind, for scripts and exit codes.
    pub kind: RefusalKind,
    /// One sentence, lower case, no full stop.
    pub message: String,
    /// A remedy that the user can try, if there is one.
    pub hint: Option<String>,
}

impl Refusal {
    /// A refusal without a hint.
    pub fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: None }
    }

    /// This refusal with a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// The kinds of refusal. [`RefusalKind::exit_code`] is the exit code of tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalKind {
    /// There is no such process, node or file.
    NotFound,
    /// The caller lacks the right.
    NotAllowed,
    /// The process cannot be moved. The message gives the reason (docs/reference/limits.md lists
    /// all reasons).
    CannotMove,
    /// The request cannot be performed now; for example, the node is down or accepts no guests.
    Unavailable,
    /// The process is already on the node, or in the state, that the request asks for.
    AlreadyDone,
    /// The request itself is wrong.
    BadRequest,
    /// A kernel feature is missing.
    Unsupported,
    /// Tern failed.
    Internal,
}

impl RefusalKind {
    /// The exit code of a tool: 1 not found, 2 bad request or already done, 3 not allowed, 4 cannot move, 5
    /// unavailable, 6 unsupported, 70 internal.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::NotFound => 1,
            Self::BadRequest | Self::AlreadyDone => 2,
            Self::NotAllowed => 3,
            Self::CannotMove => 4,
            Self::Unavailable => 5,
            Self::Unsupported => 6,
            Self::Internal => 70,
        }
    }
}

/// One finished migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MigrationReport {
    /// The process' pid at home.
    pub pid: HomePid,
    /// Its command name.
    pub command: String,
    /// Its id in both nodes' logs.
    pub migration: MigrationId,
    /// The source node.
    pub from: NodeId,
    /// The node where it runs now.
    pub to: NodeId,
    /// Bytes sent, in all rounds.
    pub bytes: u64,
    /// How long the process was frozen.
    pub freeze_ms: f64,
    /// From the request until it ran on the destination.
    pub total_ms: f64,
}

/// One row of `mps`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessRow {
    /// Its pid at home.
    pub pid: HomePid,
    /// The user at home.
    pub uid: u32,
    /// For a process of this node: the node where it runs (this node if it is at home).
    pub r#where: Option<NodeId>,
    /// For a guest: its home.
    pub from: Option<NodeId>,
    /// `running`, `migrating`, `suspended` (its link is cut), `home`, `frozen` (at home, by
    /// `migrate PID freeze`).
    pub state: String,
    /// CPU seconds used, as far as known to this node.
    pub cpu_seconds: f64,
    /// Migrations so far.
    pub migrations: u32,
    /// Why it cannot move, came home, or stays; empty if nothing prevents a move.
    pub reason: String,
    /// Its command line.
    pub command: String,
    /// Its resource usage where it runs, as far as known to this node.
    pub usage: Usage,
    /// How mosrun or nomig started it or an ancestor, if one of them did. Set by the home's ternd.
    #[serde(default)]
    pub started: Option<StartedAs>,
}

/// The path of the packets of connections that move from another node, their home, to this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathRow {
    /// The home.
    pub home: NodeId,
    /// The path.
    pub path: NetworkPath,
    /// Number of its connections that are on this node and use a tunnel. With a direct path these are
    /// the ones whose clients the node reaches on another way than home.
    pub in_tunnel: usize,
}

/// The path of the packets of moved connections between two nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetworkPath {
    /// The network carries packets with home's address from this node, and to it.
    Direct,
    /// It does not; they go through home and a tunnel.
    Tunnel,
    /// It could not be examined. One sentence.
    Unknown(String),
}

/// One row of `mps -n`: a network socket of a process that is away, or a connection of a guest that
/// is on this node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConnectionRow {
    /// The process' pid at home.
    pub pid: HomePid,
    /// The user at home.
    pub uid: u32,
    /// For a guest: its home.
    pub from: Option<NodeId>,
    /// The node that has the socket. `None` for a guest: it is this node.
    pub r#where: Option<NodeId>,
    /// The descriptor's number.
    pub fd: i32,
    /// The address at home.
    pub local: SocketAddr,
    /// The other end, if it is connected.
    pub peer: Option<SocketAddr>,
    /// Why it stays at home; empty if it is on the process' node.
    pub reason: String,
    /// The process' command line.
    pub command: String,
}

impl ConnectionRow {
    /// Maximum number of rows in a list, and of characters of each command line. Together they fit in
    /// a document.
    pub const MAX_ROWS: usize = 4096;
    /// See [`Self::MAX_ROWS`].
    pub const MAX_COMMAND: usize = 128;
}

/// A command placed by mexec: one of this node's, or another node's that runs here.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlacedRow {
    /// A pid on its home: that of the mexec that waits for it, or its own if it runs on its home.
    pub pid: HomePid,
    /// The user at home.
    pub uid: u32,
    /// The node where it runs; `None` before that.
    pub r#where: Option<NodeId>,
    /// Whether it waits for free capacity. If the command neither waits nor runs, a node for it is
    /// being chosen, or was chosen and is being asked. If that node is lost meanwhile, it is
    /// unknown whether the command was run.
    #[serde(default)]
    pub is_queued: bool,
    /// For another node's command: its home.
    pub from: Option<NodeId>,
    /// How long it has been running, or waiting to run.
    pub seconds: f64,
    /// The beginning of its command line.
    pub command: String,
}

/// Options with which a process or an ancestor was started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartedAs {
    /// `mosrun -J`.
    pub job: Option<u32>,
    /// The cluster does not move it automatically.
    pub locked: bool,
    /// It is never moved (`nomig`).
    pub never: bool,
}

/// A process' use of its node and of the link to its home. Unless noted, counts start when it first
/// leaves home.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes of memory where it runs; 0 if not known to this node.
    pub memory: u64,
    /// Seconds, while away, in which it was runnable but had no CPU.
    pub waited_seconds: f64,
    /// System calls that home has performed for it.
    pub calls: u64,
    /// Bytes transferred by these calls, in both directions.
    pub call_bytes: u64,
    /// Bytes read and written on local files of the node where it runs, since it arrived there.
    #[serde(default, rename = "near_bytes")]
    pub local_bytes: u64,
}

/// `tern status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StatusReport {
    /// This node.
    pub node: NodeId,
    /// Version of ternd.
    pub version: String,
    /// Name of the cluster's certificate authority.
    pub cluster: String,
    /// The nodes of the map, this one included.
    pub nodes: Vec<NodeRow>,
    /// Number of own processes that are away.
    pub away: u32,
    /// Number of guests here.
    pub guests: u32,
}

/// A node in `tern status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeRow {
    /// Its number.
    pub node: NodeId,
    /// As in the map.
    pub host: String,
    /// Whether it has just responded.
    pub up: bool,
    /// The round trip of that response.
    pub rtt_ms: Option<f64>,
    /// Its versions, number of guests and restrictions, or why it did not respond.
    pub note: String,
}
