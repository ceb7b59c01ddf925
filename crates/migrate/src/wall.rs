//! The wall clock. A guest reads its own node's wall clock, since time namespaces do not cover it.
//!
//! Two rules keep a program from seeing time go backwards. A node whose clock is far from home's is
//! not a destination; the two ternds measure the difference over their link. And a process is
//! resumed only when the destination's clock has reached the time that the source's clock showed
//! when the process was stopped.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum difference between a node's clock and home's.
pub const MAX_CLOCK_OFFSET: Duration = Duration::from_millis(50);

/// Maximum time that a process waits for its new node's clock. Two nodes can both be
/// [`MAX_CLOCK_OFFSET`] from home in opposite directions, and each measurement may be wrong by half
/// a round trip. A larger difference means that a clock was set.
const MAX_CLOCK_WAIT: Duration = Duration::from_millis(150);

/// This node's wall clock, in nanoseconds since 1970.
#[must_use]
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The clock here is behind the time that the process may have read, by this much.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the clock here is {} ms behind the time that the process has read; run an NTP client on all nodes", .0.as_millis())]
pub struct ClockBehind(pub Duration);

/// How long a process that may have read the time `last` has to wait on a node whose clock shows
/// `now`.
///
/// # Errors
/// If it would have to wait longer than clocks of nodes may differ.
pub fn wait_time(last: u64, now: u64) -> Result<Duration, ClockBehind> {
    let behind = Duration::from_nanos(last.saturating_sub(now));
    if behind <= MAX_CLOCK_WAIT { Ok(behind) } else { Err(ClockBehind(behind)) }
}

/// Waits until all wall clocks of this node have reached `last`, which the process may have read.
/// The coarse clock counts too: it shows the time of the last tick (1 to 10 ms ago), which may lie
/// before the time at which the process was stopped.
///
/// # Errors
/// Those of [`wait_time`]. After such an error it has not waited.
pub fn wait_until(last: u64) -> Result<(), ClockBehind> {
    /// Number of 1 ms sleeps, enough for the longest tick.
    const MAX_SLEEPS: u32 = 32;
    std::thread::sleep(wait_time(last, coarse())?);
    for _ in 0..MAX_SLEEPS {
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

/// Checks an offer made when home's clock showed `home`. The time that the offer took to arrive is
/// unknown, so a clock that is ahead is not judged here.
///
/// # Errors
/// If the clock here is too far behind.
pub fn check_offer(home: u64, now: u64) -> Result<(), ClockBehind> {
    let behind = Duration::from_nanos(home.saturating_sub(now));
    if behind <= MAX_CLOCK_OFFSET { Ok(()) } else { Err(ClockBehind(behind)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn clock_wait_is_limited() {
        let now = now();
        assert_eq!(wait_time(now - 30 * MS, now), Ok(Duration::ZERO), "this clock is ahead");
        assert_eq!(wait_time(now + 30 * MS, now), Ok(Duration::from_millis(30)));
        assert_eq!(wait_time(now + 151 * MS, now), Err(ClockBehind(Duration::from_millis(151))));
        assert_eq!(wait_time(0, now), Ok(Duration::ZERO), "a sender that says nothing");
        assert!(wait_time(u64::MAX, 0).is_err() && wait_time(u64::MAX, now).is_err());
    }

    #[test]
    fn coarse_clock_reaches_the_stop_time() {
        let stopped = now();
        assert_eq!(wait_until(stopped), Ok(()));
        assert!(coarse() >= stopped);
        assert!(wait_until(now() + 1000 * MS).is_err());
    }

    #[test]
    fn offer_is_checked_against_homes_clock() {
        assert!(check_offer(1000 * MS, 950 * MS).is_ok());
        assert!(check_offer(1000 * MS, 9000 * MS).is_ok(), "under way for long");
        let refused = check_offer(1000 * MS, 949 * MS).unwrap_err().to_string();
        assert!(refused.starts_with("the clock here is 51 ms behind"), "{refused}");
    }
}
