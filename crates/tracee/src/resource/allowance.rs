//! The time that a thread of another process has had to do something.
//!
//! On a busy machine a thread may be runnable for seconds without getting a CPU. That time does not
//! count, or a slow process would be taken for one that does not do what it must. The same holds
//! for time in which the caller itself did not run, or the machine was suspended.

use crate::procfs;
use crate::resource::cpu::schedstat;
use std::time::{Duration, Instant};

/// How often the thread is looked at by default.
const INTERVAL: Duration = Duration::from_millis(50);

/// A limit on the time that a thread has for something.
#[derive(Debug)]
pub struct Allowance {
    thread: i32,
    limit: Duration,
    used: Duration,
    /// How often the thread is looked at.
    interval: Duration,
    looked_at: Instant,
    /// CPU time of the thread at the last look; 0 if the kernel does not count it.
    cpu: Duration,
}

impl Allowance {
    /// For a thread, from now on.
    #[must_use]
    pub fn new(thread: i32, limit: Duration) -> Self {
        Self::looked_at_each(INTERVAL, thread, limit)
    }

    /// For a caller that asks no more often than at this interval.
    pub(crate) fn looked_at_each(interval: Duration, thread: i32, limit: Duration) -> Self {
        let (used, looked_at, cpu) = (Duration::ZERO, Instant::now(), cpu_time(thread));
        Self { thread, limit, used, interval, looked_at, cpu }
    }

    /// Whether the thread has had more time than allowed. The caller calls this repeatedly while it
    /// waits; most calls only read a clock.
    pub fn is_exceeded(&mut self) -> bool {
        let passed = self.looked_at.elapsed();
        if passed < self.interval {
            return false;
        }
        let (cpu, is_runnable) = (cpu_time(self.thread), is_runnable(self.thread));
        // A reading of zero may also be an error.
        let is_counted = !cpu.is_zero() && !self.cpu.is_zero();
        self.used += if is_runnable && is_counted {
            cpu.saturating_sub(self.cpu)
        } else {
            // If more has passed, the caller did not run.
            passed.min(self.interval * 2)
        };
        (self.looked_at, self.cpu) = (Instant::now(), cpu);
        self.used > self.limit
    }
}

fn cpu_time(thread: i32) -> Duration {
    Duration::from_nanos(schedstat(thread).unwrap_or_default().0)
}

fn is_runnable(thread: i32) -> bool {
    procfs::status(thread).is_ok_and(|status| status.state == b'R')
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    struct Running(Child);

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn run(command: &str) -> (Running, i32) {
        let child = Command::new("sh").args(["-c", &format!("exec {command}")]).spawn().unwrap();
        let pid = child.id() as i32;
        (Running(child), pid)
    }

    /// Whether a thread has had 100 ms before this time has passed.
    fn is_exceeded_within(pid: i32, time: Duration) -> bool {
        let (begun, mut allowance) = (Instant::now(), Allowance::new(pid, Duration::from_millis(100)));
        loop {
            let is_exceeded = allowance.is_exceeded();
            if is_exceeded || begun.elapsed() > time {
                return is_exceeded;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn time_asleep_and_cpu_time_count() {
        let minute = Duration::from_secs(60);
        let (_sleeping, asleep) = run("sleep 60");
        assert!(is_exceeded_within(asleep, minute));
        let (_busy, busy) = run("sh -c 'while :; do :; done'");
        assert!(is_exceeded_within(busy, minute));
    }

    #[test]
    fn time_without_a_cpu_does_not_count() {
        // A process with the lowest priority gets a thousandth of a CPU beside three others.
        let spin = "while :; do :; done";
        let (_starved, starved) = run(&format!("taskset -c 0 chrt -i 0 sh -c '{spin}'"));
        let _others: Vec<_> = (0..3).map(|_| run(&format!("taskset -c 0 sh -c '{spin}'"))).collect();
        assert!(!is_exceeded_within(starved, Duration::from_secs(2)));
    }
}
