//! Threads of Tern's own process.

use crate::stop;
use std::io;
use std::thread::Builder;

/// Runs `work` in a new thread with a stack of `stack_size` bytes.
///
/// The kernel creates a thread or a process only while no process changes its control group. So
/// this call may wait some 20 ms, as each fork on the machine may, and half a second where many
/// groups are created at once. The wait counts as time slept ([`stop::time_slept`]).
///
/// # Errors
/// At a limit on the number of processes.
pub fn spawn(name: &str, stack_size: usize, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = Builder::new().name(name.into()).stack_size(stack_size);
    stop::count_as_slept(|| thread.spawn(work)).map(drop)
}
