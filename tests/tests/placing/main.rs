//! Commands that are placed, not moved: mexec, builds, and machines outside of the cluster.
#![forbid(unsafe_code)]

mod build_tools;
mod faults;
mod files;
mod many;
mod mexec;
mod mexec_waits;
mod outside;
mod owned;
mod report;
mod shared;
