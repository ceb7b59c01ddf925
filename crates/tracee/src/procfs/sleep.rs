//! Since when threads sleep.
//!
//! The kernel shows when a thread last ran (`se.exec_start` in /proc/TID/sched), by the clock of the
//! thread's CPU. That clock stands still while the CPU serves interrupts or its host runs something
//! else, so it can be compared only with a reading of the same CPU's clock.

use super::read_all;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How often a CPU's clock is read until this thread is not interrupted meanwhile.
const MAX_CLOCK_READINGS: u32 = 20;

/// A sleep of a thread in a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sleep {
    /// The number of the call. If the kernel has continued the call by restart_syscall after a stop,
    /// that of the call which the program made.
    pub nr: u32,
    /// When it began, or later: never earlier.
    pub began: Instant,
    /// The kernel has continued the call by restart_syscall.
    pub is_continued: bool,
    /// How often the thread has gone to sleep.
    count: u64,
}

impl Sleep {
    /// The next sleep of a stopped thread. When it is resumed it continues, by restart_syscall, a call
    /// that began then. `None` if the kernel does not show how often the thread has slept.
    #[must_use]
    pub fn of_resumed(tid: i32, nr: u32, began: Instant) -> Option<Self> {
        let count = Schedule::of(&tid.to_string())?.sleeps + 1;
        Some(Self { nr, began, is_continued: true, count })
    }

    /// Whether both are the same sleep of one thread.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        (self.nr, self.is_continued, self.count) == (other.nr, other.is_continued, other.count)
    }

    /// Whether the thread of this process, which may run, sleeps without a break, or is about to.
    #[must_use]
    pub fn lasts(&self, pid: i32, tid: i32) -> bool {
        Schedule::of(&format!("{pid}/task/{tid}")).is_some_and(|now| now.sleeps <= self.count)
    }

    /// Whether the thread, which has stopped since, has stopped before it slept.
    #[must_use]
    pub fn was_to_come(&self, tid: i32) -> bool {
        Schedule::of(&tid.to_string()).is_some_and(|now| now.sleeps == self.count)
    }

    /// Whether the thread, which has stopped since, slept without a break until it stopped. Its
    /// registers must have been read: the kernel may report a stop before it counts it as a sleep.
    #[must_use]
    pub fn lasted_until_stop(&self, tid: i32) -> bool {
        // In the stop it sleeps once more.
        Schedule::of(&tid.to_string()).is_some_and(|now| now.sleeps == self.count + 1)
    }
}

/// Measures sleeps. It moves the calling thread from CPU to CPU, and that thread may have to wait on
/// each: it must be one that nothing else waits for.
#[derive(Debug, Default)]
pub struct SleepMeter {
    /// Readings of the CPUs' clocks, and when they were made.
    clocks: HashMap<usize, Option<(u64, Instant)>>,
}

impl SleepMeter {
    /// The sleep of a thread that is not stopped, if it sleeps in a call with a number and arguments
    /// that are wanted, or in one that the kernel has continued by restart_syscall. `None` also if the
    /// kernel does not show it. The sleep begins now if the clock of its CPU cannot be read.
    pub fn sleep_of(&mut self, tid: i32, is_wanted: impl Fn(u32, &[u64; 6]) -> bool) -> Option<Sleep> {
        let (nr, args) = blocked_in(tid)?;
        let is_continued = i64::from(nr) == libc::SYS_restart_syscall;
        let nr =
            if is_continued { restarted_call(tid)? } else { Some(nr).filter(|nr| is_wanted(*nr, &args))? };
        let Schedule { ran_at, sleeps } = Schedule::of(&tid.to_string())?;
        let cpu = super::stat(tid).ok()?.field(39) as usize;
        let clock = *self.clocks.entry(cpu).or_insert_with(|| cpu_clock(cpu));
        let began = clock.and_then(|(clock, read_at)| match ran_at.checked_sub(clock) {
            Some(later) => read_at.checked_add(Duration::from_nanos(later)),
            None => read_at.checked_sub(Duration::from_nanos(clock - ran_at)),
        });
        Some(Sleep { nr, began: began.unwrap_or_else(Instant::now), is_continued, count: sleeps })
    }
}

/// The number and the arguments of the call in which a thread is blocked.
fn blocked_in(tid: i32) -> Option<(u32, [u64; 6])> {
    let text = read_all(&format!("/proc/{tid}/syscall")).ok()?;
    let mut words = std::str::from_utf8(&text).ok()?.split(' ');
    let nr = words.next()?.parse().ok()?;
    let mut args = [0; 6];
    for arg in &mut args {
        *arg = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    Some((nr, args))
}

/// The call that a thread continues by restart_syscall, if it is not a sleep: the function in which it
/// waits shows that.
fn restarted_call(tid: i32) -> Option<u32> {
    let waits_in = read_all(&format!("/proc/{tid}/wchan")).ok()?;
    let waits_in = std::str::from_utf8(&waits_in).ok()?;
    let calls = [("poll", libc::SYS_poll), ("futex", libc::SYS_futex)];
    calls.iter().find(|(name, _)| waits_in.contains(name)).map(|(_, nr)| *nr as u32)
}

/// A reading of the clock of a CPU. It is at most a tick of the kernel (10 ms) slow: this thread was
/// not interrupted for longer, or its own time of running would have changed meanwhile. `None` if the
/// CPU is too busy for that.
fn cpu_clock(cpu: usize) -> Option<(u64, Instant)> {
    if cpu >= CpuSet::MAX_CPU {
        return None;
    }
    let mut only = CpuSet::new();
    only.set(cpu);
    sched_setaffinity(None, &only).ok()?;
    (0..MAX_CLOCK_READINGS).find_map(|_| {
        let own = Schedule::of("thread-self")?;
        let read_at = Instant::now();
        let is_undisturbed = Schedule::of("thread-self")?.ran_at == own.ran_at;
        is_undisturbed.then_some((own.ran_at, read_at))
    })
}

/// The kernel's scheduling statistics of a thread.
struct Schedule {
    /// When it last ran, in nanoseconds of its CPU's clock.
    ran_at: u64,
    /// How often it has gone to sleep.
    sleeps: u64,
}

impl Schedule {
    fn of(thread: &str) -> Option<Self> {
        let text = String::from_utf8(read_all(&format!("/proc/{thread}/sched")).ok()?).ok()?;
        let value = |name: &str| {
            let line = text.lines().find(|line| line.split([' ', ':']).next() == Some(name))?;
            Some(line.rsplit([' ', ':']).next()?.trim())
        };
        // Milliseconds, with the nanoseconds as six decimals.
        let (millis, nanos) = value("se.exec_start")?.split_once('.')?;
        let (millis, nanos): (u64, u64) = (millis.parse().ok()?, nanos.parse().ok()?);
        Some(Self {
            ran_at: millis.checked_mul(1_000_000)?.checked_add(nanos)?,
            sleeps: value("nr_voluntary_switches")?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::{interrupt, seize, wait_stop};
    use std::process::Command;

    #[test]
    fn sleep_of_a_child_is_measured() {
        let measure = |pid, is_wanted: fn(u32, &[u64; 6]) -> bool| {
            std::thread::spawn(move || SleepMeter::default().sleep_of(pid, is_wanted)).join().unwrap()
        };
        let is_sleep = |nr: u32, args: &[u64; 6]| i64::from(nr) == libc::SYS_clock_nanosleep && args[2] != 0;
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id().cast_signed();
        let spawned = Instant::now();
        let sleep = loop {
            if let Some(sleep) = measure(pid, is_sleep) {
                break sleep;
            }
            assert!(spawned.elapsed() < Duration::from_secs(20), "it does not sleep");
        };
        let found = Instant::now();
        std::thread::sleep(Duration::from_millis(50));
        let again = measure(pid, is_sleep).unwrap();
        assert!(again.began <= found + Duration::from_millis(20), "{:?} late", again.began - found);
        assert_eq!(again.count, sleep.count);
        assert!(measure(pid, |_, _| false).is_none());
        seize(pid, 0).unwrap();
        interrupt(pid).unwrap();
        let stopped = wait_stop(pid).unwrap();
        let _read = stopped.registers().unwrap();
        assert!(again.lasted_until_stop(pid));
        stopped.resume(0).unwrap();
        interrupt(pid).unwrap();
        let stopped = wait_stop(pid).unwrap();
        let _read = stopped.registers().unwrap();
        assert!(!again.lasted_until_stop(pid), "another sleep");
        drop(stopped.detach(0));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
