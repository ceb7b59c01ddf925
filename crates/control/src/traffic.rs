//! What processes read and write of other nodes' files.

use serde::{Deserialize, Serialize};
use tern_ids::{HomePid, NodeId};

/// Of one process, on files of one node, since this was told last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileTraffic {
    /// The process.
    pub pid: HomePid,
    /// The node that has the files.
    pub node: NodeId,
    /// How often that node was asked.
    pub calls: u64,
    /// Bytes read and written.
    pub bytes: u64,
}
