//! CPU-time timers and limits of a process, as reported by the kernel, and a timer of the tracer
//! that runs on another process's CPU time.

use crate::error::{Error, Result};
use crate::{limit, procfs};

/// A POSIX timer of a process (timer_create(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PosixTimer {
    /// Its number.
    pub id: i32,
    /// The signal that it raises.
    pub signal: i32,
    /// No signal (SIGEV_NONE).
    pub silent: bool,
    /// The thread that it signals, in this process's numbering (SIGEV_THREAD_ID).
    pub thread: Option<i32>,
    /// The clock, in the numbering of the process that created it.
    pub clock: i32,
}

/// The POSIX timers of a process. Empty on kernels without CONFIG_CHECKPOINT_RESTORE, which
/// distributions enable.
///
/// # Errors
/// If it is gone.
pub fn posix_timers(pid: i32) -> Result<Vec<PosixTimer>> {
    match procfs::read(pid, "timers") {
        Ok(text) => Ok(parse(&String::from_utf8_lossy(&text))),
        Err(error) if error.is_gone() => procfs::status(pid).map(|_| Vec::new()),
        Err(_) => Ok(Vec::new()),
    }
}

fn parse(text: &str) -> Vec<PosixTimer> {
    let mut all = Vec::new();
    let mut timer = PosixTimer { id: -1, signal: 0, silent: false, thread: None, clock: 0 };
    for line in text.lines() {
        let Some((key, value)) = line.split_once(": ") else { continue };
        let number = |text: &str| text.parse().unwrap_or_default();
        match key {
            "ID" => timer.id = number(value),
            "signal" => timer.signal = number(value.split('/').next().unwrap_or_default()),
            "notify" => {
                timer.silent = value.starts_with("none");
                timer.thread = value.split_once("/tid.").map(|(_, tid)| number(tid));
            }
            // The last line of each timer.
            "ClockID" => all.push(PosixTimer { clock: number(value), ..timer }),
            _ => {}
        }
    }
    all
}

/// The CPU time, in seconds, after which a process gets SIGXCPU, and SIGKILL (RLIMIT_CPU). `None`:
/// unlimited.
///
/// # Errors
/// If it is gone.
pub fn cpu_limits(pid: i32) -> Result<[Option<u64>; 2]> {
    let (soft, hard) = limit::get(pid, libc::RLIMIT_CPU)?;
    Ok([soft, hard].map(|seconds| Some(seconds).filter(|seconds| *seconds != u64::MAX)))
}

/// A timer that runs on the CPU time of another process. When it expires, the tracer gets a
/// SIGCHLD, as for any change of a tracee.
#[derive(Debug)]
pub struct Alarm {
    pid: i32,
    id: i32,
}

impl Alarm {
    /// Creates a timer that is not running.
    ///
    /// # Errors
    /// If the process is gone, or this process has too many timers.
    pub fn new(pid: i32) -> Result<Self> {
        // The clock type for user and system time.
        const CPUCLOCK_SCHED: i32 = 2;
        // SAFETY: all-zero is a valid sigevent.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        (event.sigev_notify, event.sigev_signo) = (libc::SIGEV_SIGNAL, libc::SIGCHLD);
        let mut id = -1;
        // SAFETY: event and id are locals. libc's own timer_create uses other identifiers.
        let created = unsafe {
            libc::syscall(libc::SYS_timer_create, (!pid << 3) | CPUCLOCK_SCHED, &raw const event, &raw mut id)
        };
        if created != 0 {
            return Err(Error::from_io("create a timer", pid, std::io::Error::last_os_error()));
        }
        Ok(Self { pid, id })
    }

    /// Starts it, to expire after this many nanoseconds of the process's CPU time.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn set(&self, nanos: u64) -> Result<()> {
        let (seconds, rest) = (nanos / 1_000_000_000, nanos % 1_000_000_000);
        let value = libc::timespec { tv_sec: seconds.cast_signed(), tv_nsec: rest.cast_signed() };
        let once =
            libc::itimerspec { it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        // SAFETY: the times are a local; the old value is not requested.
        let set = unsafe { libc::syscall(libc::SYS_timer_settime, self.id, 0, &raw const once, 0) };
        if set == 0 { Ok(()) } else { Err(Error::Gone { pid: self.pid }) }
    }

    /// Whether it has expired since it was set, or was never set.
    #[must_use]
    pub fn has_expired(&self) -> bool {
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let mut left = libc::itimerspec { it_interval: zero, it_value: zero };
        // SAFETY: the times are written to a local.
        unsafe { libc::syscall(libc::SYS_timer_gettime, self.id, &raw mut left) };
        (left.it_value.tv_sec, left.it_value.tv_nsec) == (0, 0)
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: integers only.
        unsafe { libc::syscall(libc::SYS_timer_delete, self.id) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::cpu_counters;

    #[test]
    fn posix_timers_are_parsed() {
        let text = "ID: 1\nsignal: 10/00007f0000000000\nnotify: signal/pid.23416\nClockID: -6\n\
                    ID: 0\nsignal: 0/0000000000000000\nnotify: none/tid.7\nClockID: 1\n";
        let first = PosixTimer { id: 1, signal: 10, silent: false, thread: None, clock: -6 };
        let second = PosixTimer { id: 0, signal: 0, silent: true, thread: Some(7), clock: 1 };
        assert_eq!(parse(text), [first, second]);
        assert_eq!(parse("ClockID"), []);
        let me = std::process::id() as i32;
        assert!(posix_timers(me).is_ok() && cpu_limits(me).is_ok());
        assert!(posix_timers(i32::MAX).is_err() && cpu_limits(i32::MAX).is_err());
    }

    #[test]
    fn alarm_expires_after_cpu_time() {
        let me = std::process::id() as i32;
        let alarm = Alarm::new(me).unwrap();
        assert!(alarm.has_expired(), "it was not set");
        let begun = cpu_counters(me).unwrap().total;
        alarm.set(30_000_000).unwrap();
        assert!(!alarm.has_expired());
        let mut sum = 0u64;
        while !alarm.has_expired() {
            sum = (0..10_000).fold(sum, std::hint::black_box(u64::wrapping_add));
        }
        assert!(cpu_counters(me).unwrap().total >= begun + 30_000_000);
        assert!(Alarm::new(5_000_000).is_err());
    }
}
