//! Why a process is where it is: what `migrate --why` prints, and its `--json` format.

use serde::{Deserialize, Serialize};
use tern_ids::{HomePid, NodeId};

/// The balancer's view of one process, and its latest decision about it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WhyReport {
    /// The process.
    pub pid: HomePid,
    /// Where it runs.
    pub at: NodeId,
    /// Percent of one CPU that it would use if it never had to wait for one.
    pub demand: f64,
    /// Its memory in bytes.
    pub memory: u64,
    /// System calls a second that home performs, or would perform if it were away.
    pub calls_per_s: f64,
    /// Its I/O on files of other nodes.
    #[serde(default)]
    pub files: Vec<FilesRow>,
    /// Why no move is considered now; `None` if moves are considered.
    pub stays: Option<String>,
    /// The candidate nodes, the fastest first.
    pub nodes: Vec<CandidateRow>,
    /// The latest decision, as a sentence.
    pub last: Option<String>,
    /// Age of that decision in milliseconds.
    pub last_ms: u64,
}

/// A process' I/O on files of a node other than its home, wherever the process runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FilesRow {
    /// The node that has the files.
    pub node: NodeId,
    /// Requests per second that home sends to that node for it, or would send if the process did
    /// not run on that node.
    pub calls_per_s: f64,
    /// Bytes per second that these requests transfer, or would transfer.
    pub bytes_per_s: f64,
}

/// The balancer's estimate for moving a process to a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CandidateRow {
    /// The node.
    pub node: NodeId,
    /// Seconds in which the process would get one standard CPU second of work done there.
    pub pace: f64,
    /// Seconds that the migration would take.
    #[serde(rename = "way_s")]
    pub transfer_s: f64,
    /// Seconds for which it would be frozen.
    pub frozen_s: f64,
    /// Seconds by which it would finish earlier, all costs included; negative: later.
    pub gain_s: f64,
    /// Why the balancer does not choose this node; `None` if nothing prevents it.
    pub against: Option<String>,
}
