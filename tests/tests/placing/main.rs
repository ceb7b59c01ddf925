//! Tests of placed commands, which run elsewhere but do not migrate: mexec, builds, and clients
//! outside the cluster.
#![forbid(unsafe_code)]

mod build_tools;
mod faults;
mod files;
mod many_commands;
mod mexec;
mod mexec_queue;
mod outside;
mod owner_priority;
mod report;
mod shared_fs;
