//! Control of another Linux process: ptrace, its memory and registers, system calls made inside it,
//! and its trapped system calls.
//!
//! All other crates that handle processes build on this one. Most of Tern's unsafe code is here and
//! in the blob. ptrace belongs to a thread: the thread that calls [`seize`] must also wait for the
//! process and resume it.
//!
//! * [`ptrace`]: seizing, stopping and resuming processes, and system calls made inside them
//! * [`memory`]: another process's memory, its pages, and memory shared with a deputy
//! * [`procfs`]: reads /proc
//! * [`resource`]: CPU time, timers, limits, time slices
//! * [`listener`]: trapped system calls (seccomp user notification)
//! * [`siginfo`]: siginfo_t, and how the kernel queues signals
//! * [`pidfd`]: processes and their descriptors by pidfd
//! * [`heap`], [`threads`]: the allocator and the threads of Tern's own process

pub mod error;
pub mod heap;
pub mod listener;
pub mod memory;
pub mod pidfd;
pub mod procfs;
pub mod ptrace;
pub mod resource;
pub mod siginfo;
pub mod threads;

pub use error::{Error, Result};
pub use memory::{Memory, pagemap, shared_memory, write_tracker};
pub use ptrace::inject::Site;
pub use ptrace::registers::{Registers, Xstate};
pub use ptrace::stop::{Stop, Stopped, WaitEvent, seize};
pub use ptrace::{batch, call_timeout, inject, reap, registers, stop, vdso};
pub use resource::{allowance, cpu, limit, time_slice, timers};

/// The page size of x86-64.
pub const PAGE: u64 = 4096;

/// End of the address space that programs use by default (47 bits less one page).
pub const TASK_END: u64 = 0x7fff_ffff_f000;
