//! The home half of a family: keeps its processes' pids, files and relatives; performs forwarded calls;
//! delivers signals.
//!
//! * [`run`]: the one loop that waits for guests, tracees, and the node
//! * `member`: one process; `peer`: one link to a guest shim
//! * `out`: a process becomes a deputy; `back`: a deputy becomes the process again
//! * `perform`: calls; `fork`, `exec`: those that make and replace processes
//! * `signal`: the kernel's verdict on each signal; `coredump`: core dumps
//! * `blob`, `mailbox`: the code that a deputy runs, and how it is told what to do

#![deny(unsafe_code)]

mod back;
mod blob;
mod coredump;
mod exec;
mod family;
mod fork;
mod mailbox;
mod member;
mod out;
mod peer;
mod perform;
pub mod run;
mod signal;
mod space;
mod ternd;

pub use run::run;
