//! Why a process is where it is: what `migrate --why` prints, and its `--json` format.

use serde::{Deserialize, Serialize};
use tern_ids::{HomePid, NodeId};

/// The balancer's view of one process, and its last word about it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WhyReport {
    /// The process.
    pub pid: HomePid,
    /// Where it runs.
    pub at: NodeId,
    /// Percent of one CPU that it would use if it did not have to wait for one.
    pub demand: f64,
    /// Bytes of memory that it has.
    pub memory: u64,
    /// System calls to home a second: those that go there, or that would.
    pub calls_per_s: f64,
    /// Files of other nodes that it reads and writes.
    #[serde(default)]
    pub files: Vec<FilesRow>,
    /// Why no move of it is considered now; `None` if any is.
    pub stays: Option<String>,
    /// Each node that is considered, the fastest first.
    pub nodes: Vec<ProspectRow>,
    /// The last word about it, a sentence.
    pub last: Option<String>,
    /// How long ago that was said.
    pub last_ms: u64,
}

/// What a process does on files of another node than its home, wherever it runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FilesRow {
    /// The node that has them.
    pub node: NodeId,
    /// How often home asks that node a second, or would.
    pub calls_per_s: f64,
    /// Bytes of that a second.
    pub bytes_per_s: f64,
}

/// What a process has to hope for on a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProspectRow {
    /// Which.
    pub node: NodeId,
    /// Seconds that it would take for each second of work on a standard CPU.
    pub pace: f64,
    /// Seconds that the way there would take.
    pub way_s: f64,
    /// Seconds for which it would stand still.
    pub frozen_s: f64,
    /// Seconds by which it would be done earlier, all counted; negative: later.
    pub gain_s: f64,
    /// What speaks against it; `None` if nothing does.
    pub against: Option<String>,
}
