//! The away half of a family: runs the guests, makes the calls that can be made on their node, and
//! forwards all others home.
//!
//! In the order of a process's life:
//! * [`run()`]: runs a shim;  `shim`: its loop, with the links, the workers and the guests: messages
//!   from home, requests from the node, and the kernel's reports. Nothing below uses it
//! * `workers`: threads for operations that block
//! * `sandbox`: the namespaces that hold the guests, and the helper that is their first process
//! * `process`: one guest, its threads and its address space;  how they are stopped and resumed;
//!   its messages for home, which the shim sends
//! * `arrive`: an empty process becomes a guest;  `depart`: a guest goes home or onward
//! * [`vdso`]: a guest is never stopped inside it, and gets trampolines if home has another one
//! * `calls`: forwarded calls, calls with a local part, forks, new threads, and files of /proc
//! * `signals`: signals from home, and the guest's own faults
//! * `time`: CPU time of both halves, CPU thresholds, and home's clocks
//! * `files`: delegated files, cached directories, files of the guest's node, and remote mappings
//! * `fastpath`: calls on delegated files that do not even trap

#![deny(unsafe_code)]

mod arrive;
mod calls;
mod depart;
mod error;
mod fastpath;
mod files;
mod process;
mod run;
mod sandbox;
mod shim;
mod signals;
mod time;
pub mod vdso;
mod workers;

pub use run::run;
