//! The home half of a family: keeps its processes' pids, files and relatives; performs forwarded calls;
//! delivers signals.
//!
//! * [`run`]: the one loop that waits for guests, tracees, and the node;  `messages`, `stops`, `asked`: what these say
//! * `family`: its processes;  `outbound`, `onward`: who of them moves when;  `links`: to guest shims
//! * `company`: processes that share memory move together;  `sharers`: who they are;  `watch`, `gate`: somebody else opens that memory;
//!   `touched`: they do so themselves, or end with it
//! * `member`: one process; `thread`: one of its threads; `peer`: one link to a guest shim
//! * `leaving`: a process as it is sent; `out`: it becomes a deputy; `back`: a deputy becomes the process again; `settle`: its last calls
//! * `perform`: calls; `own`: what /proc says of its memory; `fork`, `exec`: those that make and replace processes
//! * `timers`: those that count CPU time; `due`: when they are due; `firing`: what becomes of them in the kernel
//! * `relatives`: what children have used away; `ledger`: that, of processes that nobody holds
//! * `frozen`: processes that stand still at home
//! * `signal`: the kernel's verdict on each signal; `sent`: those that a call has sent; `coredump`: core dumps
//! * `blob`, `mailbox`: the code that a deputy runs, and how it is told what to do

#![deny(unsafe_code)]

mod asked;
mod back;
mod begins;
mod blob;
mod chain;
mod company;
mod coredump;
mod direct;
mod due;
mod exec;
mod family;
mod firing;
mod fork;
mod frozen;
mod gate;
mod leaving;
mod ledger;
mod links;
mod mailbox;
mod member;
mod messages;
mod names;
mod onward;
mod out;
mod outbound;
mod own;
mod peer;
mod perform;
mod relatives;
pub mod run;
mod sent;
mod settle;
mod shared;
mod sharers;
mod signal;
mod space;
mod stops;
mod ternd;
mod thread;
mod timers;
mod touched;
mod watch;

pub use run::run;
