//! The home half of moved processes: keeps their pids, files and relatives, performs the calls that
//! their guests request, and delivers their signals.
//!
//! In the order of a process's life:
//!
//! * [`run()`]: the main loop; `shim`: the state of the shim
//! * `links`: connections to guest shims and to ternd
//! * `waker`: wakes the main loop from helper threads
//! * `inotify`: inotify instances, charged to the program's user
//! * `process`: one process, its threads, and the mailboxes and code by which deputies make calls
//! * `stops`: wait statuses, and quiescing a process
//! * `migrate`: from the request to move a process until it is a deputy, and back
//! * `calls`: performing a guest's calls; fork and exec
//! * `signals`: the kernel's verdict on each signal, the order of signals, signals that are held
//!   until the guest can take them, core dumps
//! * `time`: CPU time used away, and the timers and limits that count it
//! * `files`: files and directories that are delegated to guests
//! * `shm`: shared memory, which must not be accessed at home while its content is away

#![deny(unsafe_code)]

mod calls;
mod files;
mod inotify;
mod links;
mod migrate;
mod process;
mod run;
mod shim;
mod shm;
mod signals;
mod stops;
mod time;
mod waker;

pub use run::run;
