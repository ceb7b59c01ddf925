//! How long a thread's turns on a processor are.

use rustix::process::{Pid, getpriority_process};
use std::io;
use std::time::Duration;

/// Asks for turns of this length for a thread (0: the calling one), or for the usual ones again. Who has short turns is let
/// in before those that compute as soon as it wakes, and gets no more of the processor in all. What it makes, threads and
/// processes, has the same. Kernels before 6.12 accept it and change nothing.
///
/// # Errors
/// If it is gone, or not ours to change.
pub fn set(thread: i32, length: Option<Duration>) -> io::Result<()> {
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: 0,
        sched_flags: libc::SCHED_FLAG_KEEP_POLICY as u64,
        // Set by the same call, so it is said as it is.
        sched_nice: getpriority_process(Pid::from_raw(thread))?,
        sched_priority: 0,
        sched_runtime: length.map_or(0, |length| u64::try_from(length.as_nanos()).unwrap_or(u64::MAX)),
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the call reads the structure, whose size is in it.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const attributes, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel says of this thread: the length of its turns in nanoseconds, and how nice it is.
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
    fn turns_are_short_until_they_are_as_usual_again() {
        let (usual, nice) = own();
        set(0, Some(Duration::from_micros(150))).unwrap();
        let short = own();
        set(0, None).unwrap();
        assert_eq!(own(), (usual, nice));
        // Before 6.12 no thread has a length of its own, and none is told.
        let expected = if usual == 0 { 0 } else { 150_000 };
        assert_eq!(short, (expected, nice));
        assert!(set(i32::MAX, None).is_err());
    }
}
