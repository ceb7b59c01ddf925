//! The home half of a family: keeps its processes' pids, files and relatives; performs forwarded calls;
//! delivers signals.
//!
//! * [`run`]: the one loop that waits for guests, tracees, and the node;  `messages`, `stops`, `asked`: what these say
//! * `family`: its processes;  `outbound`, `onward`: who of them moves when;  `links`: to guest shims
//! * `member`: one process; `peer`: one link to a guest shim
//! * `out`: a process becomes a deputy; `back`: a deputy becomes the process again
//! * `perform`: calls; `fork`, `exec`: those that make and replace processes
//! * `frozen`: processes that stand still at home
//! * `signal`: the kernel's verdict on each signal; `coredump`: core dumps
//! * `blob`, `mailbox`: the code that a deputy runs, and how it is told what to do

#![deny(unsafe_code)]

mod asked;
mod back;
mod blob;
mod coredump;
mod exec;
mod family;
mod fork;
mod frozen;
mod links;
mod mailbox;
mod member;
mod messages;
mod onward;
mod out;
mod outbound;
mod peer;
mod perform;
pub mod run;
mod signal;
mod space;
mod stops;
mod ternd;

pub use run::run;
