//! Threads of Tern's own process.

use crate::stop;
use std::io;
use std::thread::Builder;

/// Runs `work` in a new thread with a stack of `stack_size` bytes.
///
/// The kernel creates a thread while no process changes its control group. It may be some 20 ms
/// before it does, as for each fork on the machine, and half a second where many groups are created
/// at once. That counts as time slept ([`stop::time_slept`]).
///
/// # Errors
/// At a limit on the number of processes.
pub fn spawn(name: &str, stack_size: usize, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = Builder::new().name(name.into()).stack_size(stack_size);
    stop::counting(|| thread.spawn(work)).map(drop)
}
