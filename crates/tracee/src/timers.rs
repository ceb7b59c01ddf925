//! Timers that count CPU time, and the limit on it: those of a process, as the kernel tells of them; and one of ours that
//! runs on the time of another process.

use crate::error::{Error, Result};
use crate::{limit, procfs};

/// A timer that a process has made with timer_create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PosixTimer {
    /// Its number.
    pub id: i32,
    /// The signal that it raises.
    pub signal: i32,
    /// It raises none (SIGEV_NONE).
    pub silent: bool,
    /// The thread that it raises it in, as we number it (SIGEV_THREAD_ID).
    pub thread: Option<i32>,
    /// The clock that it was made for, as the process numbers it.
    pub clock: i32,
}

/// The timers that a process has made. None on kernels that do not tell (CONFIG_CHECKPOINT_RESTORE; distributions have it).
///
/// # Errors
/// If it is gone.
pub fn posix(pid: i32) -> Result<Vec<PosixTimer>> {
    match procfs::read(pid, "timers") {
        Ok(text) => Ok(parse(&String::from_utf8_lossy(&text))),
        Err(error) if error.is_gone() => procfs::status(pid).map(|_| Vec::new()),
        Err(_) => Ok(Vec::new()),
    }
}

fn parse(text: &str) -> Vec<PosixTimer> {
    let mut all = Vec::new();
    let mut now = PosixTimer { id: -1, signal: 0, silent: false, thread: None, clock: 0 };
    for line in text.lines() {
        let Some((key, value)) = line.split_once(": ") else { continue };
        let number = |text: &str| text.parse().unwrap_or_default();
        match key {
            "ID" => now.id = number(value),
            "signal" => now.signal = number(value.split('/').next().unwrap_or_default()),
            "notify" => {
                now.silent = value.starts_with("none");
                now.thread = value.split_once("/tid.").map(|(_, tid)| number(tid));
            }
            // The last of each.
            "ClockID" => all.push(PosixTimer { clock: number(value), ..now }),
            _ => {}
        }
    }
    all
}

/// After how many seconds of CPU time a process is warned, and killed (RLIMIT_CPU).
///
/// # Errors
/// If it is gone.
pub fn limits(pid: i32) -> Result<[Option<u64>; 2]> {
    let (soft, hard) = limit::get(pid, libc::RLIMIT_CPU)?;
    Ok([soft, hard].map(|seconds| Some(seconds).filter(|seconds| *seconds != u64::MAX)))
}

/// A timer of ours that runs on the CPU time of another process. When it has run down we get a SIGCHLD, as whenever
/// something changes with a process in our hand.
#[derive(Debug)]
pub struct Alarm {
    pid: i32,
    id: i32,
}

impl Alarm {
    /// Makes one, which does not run yet.
    ///
    /// # Errors
    /// If the process is gone, or we have too many timers.
    pub fn of(pid: i32) -> Result<Self> {
        const ALL: i32 = 2;
        // SAFETY: all-zero is a valid sigevent.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        (event.sigev_notify, event.sigev_signo) = (libc::SIGEV_SIGNAL, libc::SIGCHLD);
        let mut id = -1;
        // SAFETY: the event is a local, the timer's number goes to one. libc's own function has other numbers.
        let made = unsafe {
            libc::syscall(libc::SYS_timer_create, (!pid << 3) | ALL, &raw const event, &raw mut id)
        };
        if made != 0 {
            return Err(Error::from_io("make a timer for", pid, std::io::Error::last_os_error()));
        }
        Ok(Self { pid, id })
    }

    /// Lets it ring when the process has used so many nanoseconds more.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn set(&self, left: u64) -> Result<()> {
        let (seconds, rest) = (left / 1_000_000_000, left % 1_000_000_000);
        let value = libc::timespec { tv_sec: seconds.cast_signed(), tv_nsec: rest.cast_signed() };
        let once =
            libc::itimerspec { it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        // SAFETY: the times are a local; the old ones are not asked for.
        let set = unsafe { libc::syscall(libc::SYS_timer_settime, self.id, 0, &raw const once, 0) };
        if set == 0 { Ok(()) } else { Err(Error::Gone { pid: self.pid }) }
    }

    /// Whether it has rung since it was set, or was never set.
    #[must_use]
    pub fn has_rung(&self) -> bool {
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let mut left = libc::itimerspec { it_interval: zero, it_value: zero };
        // SAFETY: the times go to a local.
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
    use crate::cpu::counted;

    #[test]
    fn timers_are_read_as_the_kernel_shows_them() {
        let text = "ID: 1\nsignal: 10/00007f0000000000\nnotify: signal/pid.23416\nClockID: -6\n\
                    ID: 0\nsignal: 0/0000000000000000\nnotify: none/tid.7\nClockID: 1\n";
        let first = PosixTimer { id: 1, signal: 10, silent: false, thread: None, clock: -6 };
        let second = PosixTimer { id: 0, signal: 0, silent: true, thread: Some(7), clock: 1 };
        assert_eq!(parse(text), [first, second]);
        assert_eq!(parse("ClockID"), []);
        let me = std::process::id() as i32;
        assert!(posix(me).is_ok() && limits(me).is_ok());
        assert!(posix(i32::MAX).is_err() && limits(i32::MAX).is_err());
    }

    #[test]
    fn an_alarm_rings_when_so_much_has_been_used() {
        let me = std::process::id() as i32;
        let alarm = Alarm::of(me).unwrap();
        assert!(alarm.has_rung(), "it was not set");
        let begun = counted(me).unwrap().total;
        alarm.set(30_000_000).unwrap();
        assert!(!alarm.has_rung());
        let mut sum = 0u64;
        while !alarm.has_rung() {
            sum = (0..10_000).fold(sum, std::hint::black_box(u64::wrapping_add));
        }
        assert!(counted(me).unwrap().total >= begun + 30_000_000);
        assert!(Alarm::of(5_000_000).is_err());
    }
}
