//! CPU time that the kernel has counted for a process.

use crate::error::{Error, Result};
use crate::procfs;

/// What the kernel has counted for a process so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// All of it, in nanoseconds, exactly.
    pub total: u64,
    /// In the program's own code, in clock ticks: as sampled.
    pub user: u64,
    /// In the kernel for it, in clock ticks.
    pub system: u64,
}

/// Reads it. The process may be anybody's.
///
/// # Errors
/// If it is gone.
pub fn counted(pid: i32) -> Result<Counted> {
    let stat = procfs::stat(pid)?;
    let total = counted_in_all(pid)?;
    Ok(Counted { total, user: stat.field(14), system: stat.field(15) })
}

/// All of it, in nanoseconds, exactly.
///
/// # Errors
/// If it is gone.
pub fn counted_in_all(pid: i32) -> Result<u64> {
    const ALL: i32 = 2;
    clock(pid, (!pid << 3) | ALL)
}

/// Reads it of one thread of a process.
///
/// # Errors
/// If it is gone.
pub fn counted_thread(process: i32, thread: i32) -> Result<Counted> {
    let stat = procfs::thread_stat(process, thread)?;
    let (user, system) = (stat.field(14), stat.field(15));
    // A kernel that does not count turns has only the samples.
    let total = match turns(thread)?.0 {
        0 => (user + system).saturating_mul(10_000_000),
        total => total,
    };
    Ok(Counted { total, user, system })
}

/// Nanoseconds that this thread was ready to run and had no CPU; 0 where the kernel does not count them.
///
/// # Errors
/// If it is gone.
pub fn waited(thread: i32) -> Result<u64> {
    Ok(turns(thread)?.1)
}

/// CPU time and waiting time of a thread (the kernel's sched-stats.rst).
fn turns(thread: i32) -> Result<(u64, u64)> {
    let text = procfs::read(thread, "schedstat")?;
    let text = String::from_utf8_lossy(&text);
    let mut words = text.split_ascii_whitespace().map(|word| word.parse().unwrap_or(0));
    Ok((words.next().unwrap_or(0), words.next().unwrap_or(0)))
}

/// Whether a clock's number is that of one that counts CPU time: CLOCK_PROCESS_CPUTIME_ID, CLOCK_THREAD_CPUTIME_ID, or
/// the CPU clock of some process or thread.
#[must_use]
pub fn counts(clock: i32) -> bool {
    // Of a number below zero the last two bits say what is counted; with both it is a device.
    clock == libc::CLOCK_PROCESS_CPUTIME_ID
        || clock == libc::CLOCK_THREAD_CPUTIME_ID
        || (clock < 0 && clock & 3 != 3)
}

/// CPU time in user mode that a process has used, in nanoseconds, as the kernel counts it for ITIMER_VIRTUAL.
///
/// # Errors
/// If it is gone.
pub fn counted_in_user_mode(pid: i32) -> Result<u64> {
    const USER: i32 = 1;
    clock(pid, (!pid << 3) | USER)
}

fn clock(pid: i32, clock: i32) -> Result<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time goes to a local.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(Error::Gone { pid });
    }
    Ok(time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_clocks_are_known_by_their_numbers() {
        let all = [2, 3, -6, !4711 << 3, !4711 << 3 | 1, !4711 << 3 | 6];
        assert!(all.into_iter().all(counts));
        assert!([0, 1, 4, 7, 11, !4711 << 3 | 3, !4711 << 3 | 7].into_iter().all(|clock| !counts(clock)));
    }

    #[test]
    fn what_we_use_is_counted() {
        let me = std::process::id() as i32;
        let before = counted(me).unwrap();
        let mut sum = 0u64;
        while counted(me).unwrap().total < before.total + 20_000_000 {
            sum = (0..10_000).fold(sum, std::hint::black_box(u64::wrapping_add));
        }
        assert!(counted(me).unwrap().total > before.total);
        assert!(counted(i32::MAX).is_err());
    }

    #[test]
    fn each_thread_is_counted_by_itself() {
        let me = std::process::id() as i32;
        let tid = || {
            let own = std::fs::read_link("/proc/thread-self").unwrap();
            own.file_name().unwrap().to_str().unwrap().parse().unwrap()
        };
        let idle = tid();
        let before = counted_thread(me, idle).unwrap().total;
        let busy = std::thread::spawn(move || {
            let busy = tid();
            let mut sum = 0u64;
            while counted_thread(me, busy).unwrap().total < 50_000_000 {
                sum = (0..10_000).fold(sum, std::hint::black_box(u64::wrapping_add));
            }
        });
        busy.join().unwrap();
        assert!(counted_thread(me, idle).unwrap().total < before + 50_000_000);
        assert!(counted_thread(me, i32::MAX).is_err());
    }
}
