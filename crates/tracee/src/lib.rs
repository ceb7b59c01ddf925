//! A Linux process in our hand: held by ptrace, its memory, its registers, calls made inside it, and its
//! trapped system calls.
//!
//! This is the floor on which everything else stands, and with the blob it is where the unsafe code lives.
//! ptrace belongs to a thread: whoever calls [`seize`] must be the one that waits and continues.
//!
//! * [`stop`]: seize, wait, continue: the only door to ptrace
//! * [`registers`]: general and extended registers
//! * [`memory`]: another process' memory
//! * [`inject`]: make a stopped process perform one call;  [`errand`]: many threads several
//! * [`attend`]: taking hold of threads while one executes a program
//! * [`patience`]: a bound on how long it may take for that
//! * [`procfs`]: what /proc tells;  [`cpu`]: CPU time;  [`timers`]: timers that count it
//! * [`pagemap`], [`dirty`]: which pages are there, and which were written
//! * [`listener`]: trapped system calls (seccomp user notification)
//! * [`heap`]: what this process itself has allocated
//! * [`limit`]: how much of something it may have
//! * [`siginfo`]: what a signal tells, and which the kernel keeps one of
//! * [`shared`]: memory shared with a deputy, and the futexes in it
//! * [`turn`]: how long a thread's turns on a processor are
//! * [`vdso`]: leading a thread out of it

pub mod attend;
pub mod cpu;
pub mod dirty;
pub mod errand;
pub mod error;
pub mod heap;
pub mod inject;
pub mod limit;
pub mod listener;
pub mod memory;
pub mod pagemap;
pub mod patience;
pub mod pidfd;
pub mod procfs;
pub mod registers;
pub mod shared;
pub mod siginfo;
pub mod stop;
pub mod timers;
pub mod turn;
pub mod vdso;

pub use error::{Error, Result};
pub use inject::Site;
pub use memory::Memory;
pub use registers::{Registers, Xstate};
pub use stop::{Change, Stop, Stopped, seize};

/// The page size of x86-64.
pub const PAGE: u64 = 4096;

/// The end of the address space that ordinary programs use (47 bits less one page).
pub const TASK_END: u64 = 0x7fff_ffff_f000;
