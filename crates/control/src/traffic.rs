//! File traffic of processes to other nodes.

use serde::{Deserialize, Serialize};
use tern_ids::{HomePid, NodeId};

/// Traffic of one process to the files of one node since the last report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileTraffic {
    /// The process.
    pub pid: HomePid,
    /// The node that has the files.
    pub node: NodeId,
    /// Requests sent to that node.
    pub calls: u64,
    /// Bytes read and written.
    pub bytes: u64,
}
