//! ptrace: stopping and resuming processes, their registers, and system calls made inside them.
//!
//! * [`stop`]: seize, wait, resume: all use of ptrace goes through it
//! * [`registers`]: general and extended registers
//! * [`inject`]: makes a stopped process perform one system call
//! * [`batch`]: makes many stopped threads perform several calls each
//! * [`call_timeout`]: a time limit for injected calls
//! * [`reap`]: attaching to the threads of a process while one of them executes a program
//! * [`vdso`]: running a thread out of the vDSO

pub mod batch;
pub mod call_timeout;
pub mod inject;
pub mod reap;
pub mod registers;
pub mod stop;
pub mod vdso;
