//! The files of other nodes, in the tree that is mounted on each node.
#![forbid(unsafe_code)]

mod coherence;
mod kept;
mod listed;
mod locks;
mod made;
mod many;
mod names;
mod packed;
mod passthrough;
mod programs;
mod random;
mod tree;
