//! What tools print, field for field; these are also the `--json` formats.

use serde::{Deserialize, Serialize};
use tern_ids::{HomePid, MigrationId, NodeId};

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// For scripts and exit codes.
    pub kind: RefusalKind,
    /// One sentence, lower case, no full stop.
    pub message: String,
    /// What to try, if there is something.
    pub hint: Option<String>,
}

impl Refusal {
    /// A refusal without a hint.
    pub fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: None }
    }

    /// The same with a way out.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// The kinds of refusal; `exit_code` says what tools exit with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalKind {
    /// No such process, node, file.
    NotFound,
    /// The caller has not the right.
    NotAllowed,
    /// The process cannot be moved; the message says why (docs/limits.md lists the reasons).
    CannotMove,
    /// The node is down, unreachable, or refuses guests.
    Unavailable,
    /// The request itself is wrong.
    BadRequest,
    /// A kernel feature is missing.
    Unsupported,
    /// Tern failed.
    Internal,
}

impl RefusalKind {
    /// What a tool exits with: 1 is not found, 2 a bad request, 3 no right, 4 cannot move, 5 unavailable,
    /// 6 unsupported, 70 internal.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::NotFound => 1,
            Self::BadRequest => 2,
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
    /// The process at home.
    pub pid: HomePid,
    /// Its command name.
    pub command: String,
    /// The same id in both nodes' logs.
    pub migration: MigrationId,
    /// Where it was.
    pub from: NodeId,
    /// Where it runs now.
    pub to: NodeId,
    /// Bytes sent for it, all rounds together.
    pub bytes: u64,
    /// How long the process stood still.
    pub freeze_ms: f64,
    /// From the request to running there.
    pub total_ms: f64,
}

/// One row of `mps`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessRow {
    /// The process at its home.
    pub pid: HomePid,
    /// The user at home.
    pub uid: u32,
    /// For a process of this node: the node where it runs (itself when it is home).
    pub r#where: Option<NodeId>,
    /// For a guest: its home.
    pub from: Option<NodeId>,
    /// `running`, `migrating`, `suspended` (its link is cut), `home`, `frozen` (at home, by `migrate PID freeze`).
    pub state: String,
    /// CPU seconds used, as far as known here.
    pub cpu_seconds: f64,
    /// Migrations so far.
    pub migrations: u32,
    /// Why it cannot move, or came home, or stays; empty if nothing holds it.
    pub reason: String,
    /// Its command line.
    pub command: String,
    /// What it uses where it runs, as far as known here.
    pub usage: Usage,
    /// How it was started, if mosrun or nomig has started it or what it descends from. Its home's ternd knows.
    #[serde(default)]
    pub started: Option<StartedAs>,
}

/// One command that mexec has placed: one of this node, or one of another node here.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlacedRow {
    /// The process at its home that waits for it (mexec), or is it, if it runs there.
    pub pid: HomePid,
    /// The user at home.
    pub uid: u32,
    /// The node where it runs; none while it waits for room.
    pub r#where: Option<NodeId>,
    /// Of another node's: its home.
    pub from: Option<NodeId>,
    /// How long it has run, or waited.
    pub seconds: f64,
    /// The beginning of its command line.
    pub command: String,
}

/// What was said of a process when it, or what it descends from, was started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartedAs {
    /// `mosrun -J`.
    pub job: Option<u32>,
    /// The cluster does not move it by itself.
    pub locked: bool,
    /// Nobody moves it (`nomig`).
    pub never: bool,
}

/// What a process asks of its node and of the link to its home. All counts grow from the first time it left home.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes of memory that it has where it runs; 0 if that is not known here.
    pub memory: u64,
    /// Seconds that it was ready to run and had no CPU, away.
    pub waited_seconds: f64,
    /// System calls that home has made for it.
    pub calls: u64,
    /// Bytes that these have brought it and taken from it.
    pub call_bytes: u64,
    /// Bytes that it has read and written itself of files of the node where it runs, since it came there.
    #[serde(default)]
    pub near_bytes: u64,
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
    /// Own processes that are away.
    pub away: u32,
    /// Guests here.
    pub guests: u32,
}

/// A node in `tern status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeRow {
    /// Its number.
    pub node: NodeId,
    /// As in the map.
    pub host: String,
    /// Whether it answered just now.
    pub up: bool,
    /// Round trip of that answer.
    pub rtt_ms: Option<f64>,
    /// What it said, or why it did not.
    pub note: String,
}
