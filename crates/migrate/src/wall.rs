//! The wall clock is each node's own: a program away reads that of the node where it runs.
//!
//! Time namespaces do not cover it. Two things keep a program from noticing: a node whose clock is far from home's
//! is no destination (ternd has measured that, over its link to that node's), and a process is let go on only when
//! the clock that it will read has reached what the last one showed when the process was stopped.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How far a node's clock may be from home's.
pub const MOST_OFF: Duration = Duration::from_millis(50);

/// How long a process is held back for its clock. Two nodes can both be [`MOST_OFF`] from home, in different
/// directions, and each measurement was wrong by half a round trip. Beyond that somebody has set a clock.
const MOST_HELD: Duration = Duration::from_millis(150);

/// This node's wall clock, in nanoseconds since 1970.
#[must_use]
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// A clock that a process would see go back by this much.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the clock here is {} ms behind the one that it has read last; run an NTP client on all nodes", .0.as_millis())]
pub struct Behind(pub Duration);

/// How long a process that may have read `last` has to wait where it is `now`.
///
/// # Errors
/// If that is longer than nodes may differ.
pub fn wait(last: u64, now: u64) -> Result<Duration, Behind> {
    let behind = Duration::from_nanos(last.saturating_sub(now));
    if behind <= MOST_HELD { Ok(behind) } else { Err(Behind(behind)) }
}

/// Waits until no clock that a process reads here, the coarse one included, shows less than the `last` that it may have
/// read: that one shows the last tick (1 to 10 ms), which may have been before the process was stopped elsewhere.
///
/// # Errors
/// As [`wait`]; then it has not waited.
pub fn reach(last: u64) -> Result<(), Behind> {
    /// More ticks than a tick of waiting can miss.
    const TICKS: u32 = 32;
    std::thread::sleep(wait(last, coarse())?);
    for _ in 0..TICKS {
        if coarse() >= last {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// This node's coarse wall clock, in nanoseconds since 1970.
fn coarse() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    let since = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
    u64::try_from(since).unwrap_or(0)
}

/// Whether a process may come whose home showed `home` when it offered it. The offer has been under way, so that
/// nothing is said here about a clock that is ahead.
///
/// # Errors
/// If the clock here is too far behind.
pub fn judge(home: u64, now: u64) -> Result<(), Behind> {
    let behind = Duration::from_nanos(home.saturating_sub(now));
    if behind <= MOST_OFF { Ok(()) } else { Err(Behind(behind)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_process_waits_for_its_clock_and_never_for_long() {
        let now = now();
        assert_eq!(wait(now - 30 * MS, now), Ok(Duration::ZERO), "this clock is ahead");
        assert_eq!(wait(now + 30 * MS, now), Ok(Duration::from_millis(30)));
        assert_eq!(wait(now + 151 * MS, now), Err(Behind(Duration::from_millis(151))));
        assert_eq!(wait(0, now), Ok(Duration::ZERO), "a sender that says nothing");
        assert!(wait(u64::MAX, 0).is_err() && wait(u64::MAX, now).is_err());
    }

    #[test]
    fn no_tick_of_before_is_read() {
        let stopped = now();
        assert_eq!(reach(stopped), Ok(()));
        assert!(coarse() >= stopped);
        assert!(reach(now() + 1000 * MS).is_err());
    }

    #[test]
    fn an_offer_is_judged_by_home_s_clock() {
        assert!(judge(1000 * MS, 950 * MS).is_ok());
        assert!(judge(1000 * MS, 9000 * MS).is_ok(), "under way for long");
        let refused = judge(1000 * MS, 949 * MS).unwrap_err().to_string();
        assert!(refused.starts_with("the clock here is 51 ms behind"), "{refused}");
    }
}
