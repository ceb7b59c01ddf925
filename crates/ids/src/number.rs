//! The number of a file of some node among those of all nodes, as MFS shows it (`st_ino`).

use crate::NodeId;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Set in the numbers of files, and not in those of the names that are MFS's own.
const OF_A_FILE: u64 = 1 << 61;

/// The number of this node's file, by its file system's number (`f_fsid`) and its own on that; in the rare case that two meet, that of the
/// second is the [`next`] one.
#[must_use]
pub fn of(node: NodeId, volume: u64, inode: u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    (node, volume).hash(&mut hasher);
    // The same for all files of one file system, so that no two of them meet.
    OF_A_FILE | (inode ^ hasher.finish()) & (OF_A_FILE - 1)
}

/// The number that is tried after this one.
#[must_use]
pub fn next(number: u64) -> u64 {
    OF_A_FILE | (number + 1) & (OF_A_FILE - 1)
}
