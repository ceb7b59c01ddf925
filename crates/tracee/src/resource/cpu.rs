//! CPU time of a process, as counted by the kernel.

use crate::error::{Error, Result};
use crate::procfs;

/// CPU time that a process has used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuCounters {
    /// User and system time in nanoseconds, exact.
    pub total: u64,
    /// User time in clock ticks, as sampled by the kernel.
    pub user: u64,
    /// System time in clock ticks, as sampled by the kernel.
    pub system: u64,
}

/// The CPU time of a process, of any user.
///
/// # Errors
/// If it is gone.
pub fn cpu_counters(pid: i32) -> Result<CpuCounters> {
    let stat = procfs::stat(pid)?;
    let total = cpu_total_ns(pid)?;
    Ok(CpuCounters { total, user: stat.field(14), system: stat.field(15) })
}

/// The exact total in nanoseconds.
///
/// # Errors
/// If it is gone.
pub fn cpu_total_ns(pid: i32) -> Result<u64> {
    /// The clock type for user and system time.
    const CPUCLOCK_SCHED: i32 = 2;
    read_clock_ns(pid, (!pid << 3) | CPUCLOCK_SCHED)
}

/// The CPU time of one thread of a process.
///
/// # Errors
/// If it is gone.
pub fn thread_cpu_counters(process: i32, thread: i32) -> Result<CpuCounters> {
    let stat = procfs::thread_stat(process, thread)?;
    let (user, system) = (stat.field(14), stat.field(15));
    // While the kernel's scheduling statistics are off, schedstat shows zeroes, and only the
    // samples are left.
    let total = match schedstat(thread)?.0 {
        0 => (user + system).saturating_mul(10_000_000),
        total => total,
    };
    Ok(CpuCounters { total, user, system })
}

/// Time that a thread was runnable without a CPU, in nanoseconds; 0 if the kernel does not count
/// it.
///
/// # Errors
/// If it is gone.
pub fn run_queue_wait(thread: i32) -> Result<u64> {
    Ok(schedstat(thread)?.1)
}

/// CPU time and run-queue wait time of a thread (the kernel's sched-stats.rst). Both are 0 if the
/// kernel does not count them, or has no such file.
pub(crate) fn schedstat(thread: i32) -> Result<(u64, u64)> {
    let text = match procfs::read(thread, "schedstat") {
        Err(Error::Gone { .. }) if procfs::is_alive(thread) => return Ok((0, 0)),
        text => text?,
    };
    let text = String::from_utf8_lossy(&text);
    let mut words = text.split_ascii_whitespace().map(|word| word.parse().unwrap_or(0));
    Ok((words.next().unwrap_or(0), words.next().unwrap_or(0)))
}

/// Whether a clock counts CPU time: CLOCK_PROCESS_CPUTIME_ID, CLOCK_THREAD_CPUTIME_ID, or the CPU
/// clock of a process or thread.
#[must_use]
pub fn is_cpu_clock(clock: i32) -> bool {
    // The lowest two bits of a negative number select the time that is counted. With 3, the
    // number is a device's clock or invalid.
    clock == libc::CLOCK_PROCESS_CPUTIME_ID
        || clock == libc::CLOCK_THREAD_CPUTIME_ID
        || (clock < 0 && clock & 3 != 3)
}

/// User-mode CPU time of a process in nanoseconds, as counted for ITIMER_VIRTUAL.
///
/// # Errors
/// If it is gone.
pub fn user_cpu_ns(pid: i32) -> Result<u64> {
    /// The clock type for user time.
    const CPUCLOCK_VIRT: i32 = 1;
    read_clock_ns(pid, (!pid << 3) | CPUCLOCK_VIRT)
}

fn read_clock_ns(pid: i32, clock: i32) -> Result<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is written to a local.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(Error::Gone { pid });
    }
    Ok(time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_clocks_are_recognised_by_number() {
        let all = [2, 3, -6, !4711 << 3, !4711 << 3 | 1, !4711 << 3 | 6];
        assert!(all.into_iter().all(is_cpu_clock));
        assert!(
            [0, 1, 4, 7, 11, !4711 << 3 | 3, !4711 << 3 | 7].into_iter().all(|clock| !is_cpu_clock(clock))
        );
    }

    #[test]
    fn own_cpu_time_is_counted() {
        let me = std::process::id() as i32;
        let before = cpu_counters(me).unwrap();
        let mut sum = 0u64;
        while cpu_counters(me).unwrap().total < before.total + 20_000_000 {
            sum = (0..10_000).fold(sum, std::hint::black_box(u64::wrapping_add));
        }
        assert!(cpu_counters(me).unwrap().total > before.total);
        assert!(cpu_counters(i32::MAX).is_err());
    }

    #[test]
    fn each_thread_has_its_own_cpu_time() {
        let me = std::process::id() as i32;
        let tid = || {
            let own = std::fs::read_link("/proc/thread-self").unwrap();
            own.file_name().unwrap().to_str().unwrap().parse().unwrap()
        };
        let idle = tid();
        let before = thread_cpu_counters(me, idle).unwrap().total;
        let busy = std::thread::spawn(move || {
            let busy = tid();
            let mut sum = 0u64;
            while thread_cpu_counters(me, busy).unwrap().total < 50_000_000 {
                sum = (0..10_000).fold(sum, std::hint::black_box(u64::wrapping_add));
            }
        });
        busy.join().unwrap();
        assert!(thread_cpu_counters(me, idle).unwrap().total < before + 50_000_000);
        assert!(thread_cpu_counters(me, i32::MAX).is_err());
    }
}
