//! The cluster as its users and administrators steer it: balancing, commands, the tree of files for both, and what strangers may not do.
#![forbid(unsafe_code)]

mod administered;
mod balanced;
mod by_hand;
mod no_way_in;
mod stranger;
