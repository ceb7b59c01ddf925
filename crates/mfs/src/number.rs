//! The number of a file of some node among those of all nodes (`st_ino`).

use crate::message::FileKey;
use std::hash::{DefaultHasher, Hash, Hasher};
use tern_ids::NodeId;

/// Set in the numbers of files, and not in those of the names that are ours.
const OF_A_FILE: u64 = 1 << 61;

/// The number of this node's file; in the rare case that two meet, that of the second is the [`next`] one.
pub(crate) fn of(node: NodeId, key: &FileKey) -> u64 {
    let mut hasher = DefaultHasher::new();
    (node, key.volume).hash(&mut hasher);
    // The same for all files of one file system, so that no two of them meet.
    OF_A_FILE | (key.inode ^ hasher.finish()) & (OF_A_FILE - 1)
}

/// The number that is tried after this one.
pub(crate) fn next(number: u64) -> u64 {
    OF_A_FILE | (number + 1) & (OF_A_FILE - 1)
}
