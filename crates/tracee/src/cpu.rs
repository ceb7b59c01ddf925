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
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock's number goes to a local.
    if unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) } != 0 {
        return Err(Error::Gone { pid });
    }
    // SAFETY: the time goes to a local.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(Error::Gone { pid });
    }
    let total = time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned();
    Ok(Counted { total, user: stat.field(14), system: stat.field(15) })
}

/// Nanoseconds that its first thread was ready to run and had no CPU; 0 where the kernel does not count them.
///
/// # Errors
/// If it is gone.
pub fn waited(pid: i32) -> Result<u64> {
    // CPU time, waiting time, turns (the kernel's sched-stats.rst).
    let text = procfs::read(pid, "schedstat")?;
    let words = String::from_utf8_lossy(&text).split_ascii_whitespace().nth(1).map(str::parse);
    Ok(words.and_then(|w| w.ok()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
