//! Inode numbers of the files of all nodes, as MFS shows them (`st_ino`).

use crate::NodeId;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Set in the numbers of files, and clear in those of MFS's own directories and links.
const FILE_BIT: u64 = 1 << 61;

/// The number of a node's file, from its file system's identifier (`f_fsid`) and its inode there.
/// In the rare case that two files collide, the second gets the [`next`] number.
#[must_use]
pub fn of(node: NodeId, volume: u64, inode: u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    (node, volume).hash(&mut hasher);
    // All files of a file system use the same mask, so no two of them collide.
    FILE_BIT | (inode ^ hasher.finish()) & (FILE_BIT - 1)
}

/// The number to try after this one.
#[must_use]
pub fn next(number: u64) -> u64 {
    FILE_BIT | (number + 1) & (FILE_BIT - 1)
}
