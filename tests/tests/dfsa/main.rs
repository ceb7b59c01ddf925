//! File calls that run on the guest's node.
#![forbid(unsafe_code)]

mod connections;
mod local_files;
mod names;
mod open_guard;
mod random_moves;
mod remote_map;
mod shared_files;
mod threads;
mod waiting;
