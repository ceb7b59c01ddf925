//! The scheduler's time slice of a thread.

use rustix::process::{Pid, getpriority_process};
use std::io;
use std::time::Duration;

/// Sets a thread's time slice (0: the calling thread), or restores the default. A thread with a
/// shorter slice preempts CPU-bound threads as soon as it wakes, and gets no more CPU time in
/// total. Its new threads and child processes inherit the slice. Kernels before 6.12 accept the
/// call and ignore it.
///
/// # Errors
/// If the thread is gone, or the caller may not change it.
pub fn set(thread: i32, length: Option<Duration>) -> io::Result<()> {
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: 0,
        sched_flags: libc::SCHED_FLAG_KEEP_POLICY as u64,
        // The same call sets the nice value: pass the current one.
        sched_nice: getpriority_process(Pid::from_raw(thread))?,
        sched_priority: 0,
        sched_runtime: length.map_or(0, |length| u64::try_from(length.as_nanos()).unwrap_or(u64::MAX)),
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the call reads the structure, which holds its own size.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const attributes, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This thread's time slice in nanoseconds, and its nice value.
    fn own() -> (u64, i32) {
        // SAFETY: integers, for which zero is a value.
        let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
        let size = size_of::<libc::sched_attr>();
        // SAFETY: the call writes no more than this size.
        let done = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
        (attributes.sched_runtime, attributes.sched_nice)
    }

    #[test]
    fn time_slice_can_be_set_and_reset() {
        let (usual, nice) = own();
        set(0, Some(Duration::from_micros(150))).unwrap();
        let short = own();
        set(0, None).unwrap();
        assert_eq!(own(), (usual, nice));
        // Before 6.12 threads have no slice of their own, and the kernel reports 0.
        let expected = if usual == 0 { 0 } else { 150_000 };
        assert_eq!(short, (expected, nice));
        assert!(set(i32::MAX, None).is_err());
    }
}
