//! Converts a clock that may jump into this node's elapsed time.
//!
//! * Backward jump: no time has passed. Ages are then too small by less than the time since the
//!   last call.
//! * Large forward jump: either the daemon was stopped or the clock is wrong; this code cannot
//!   distinguish the two. The gap counts as elapsed time, because an entry that looks too old is
//!   replaced by the next newer one, while an entry that looks too young would displace newer ones.
//!   But no messages were received during the gap, so silence during the gap is no sign of death
//!   ([`Clock::receiving_since`]), and a message received before the next step may have been queued
//!   for the whole gap ([`Clock::queued_ms`]).

/// The longest gap that one call can add, in ms: about 34 years.
const MAX_GAP_MS: u64 = 1 << 40;

/// Elapsed time, accumulated from the differences between the times passed in.
#[derive(Debug, Clone)]
pub(crate) struct Clock {
    shown: Option<u64>,
    now: i64,
    jump: u64,
    receiving_since: i64,
    queued_ms: i64,
}

impl Clock {
    /// A clock that treats a gap of more than `jump` ms as a forward jump.
    pub(crate) fn new(jump: u64) -> Self {
        Self { shown: None, now: 0, jump, receiving_since: 0, queued_ms: 0 }
    }

    /// Advances to the time `shown`. Returns true if that was a jump forward.
    pub(crate) fn advance(&mut self, shown: u64) -> bool {
        let gap = self.gap(shown);
        self.shown = Some(shown);
        self.now = self.now.saturating_add_unsigned(gap);
        if gap <= self.jump {
            return false;
        }
        self.receiving_since = self.now;
        self.queued_ms = i64::try_from(gap).unwrap_or(i64::MAX);
        true
    }

    /// A step begins: messages received from now on were not queued.
    pub(crate) fn step(&mut self) {
        self.queued_ms = 0;
    }

    /// Elapsed time, in ms since the first call.
    pub(crate) fn now(&self) -> i64 {
        self.now
    }

    /// The elapsed time that `advance(shown)` would give.
    pub(crate) fn at(&self, shown: u64) -> i64 {
        self.now.saturating_add_unsigned(self.gap(shown))
    }

    /// The time since which this node has received without a pause.
    pub(crate) fn receiving_since(&self) -> i64 {
        self.receiving_since
    }

    /// How long a message received now may have been queued on this node, in ms.
    pub(crate) fn queued_ms(&self) -> i64 {
        self.queued_ms
    }

    fn gap(&self, shown: u64) -> u64 {
        shown.saturating_sub(self.shown.unwrap_or(shown)).min(MAX_GAP_MS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backward_jump_adds_no_time() {
        let mut clock = Clock::new(1_000);
        for shown in [5_000, 5_500, 100, 600] {
            assert!(!clock.advance(shown));
        }
        assert_eq!(clock.now(), 1_000);
    }

    #[test]
    fn forward_jump_counts_but_restarts_reception() {
        let mut clock = Clock::new(1_000);
        clock.advance(0);
        assert!(clock.advance(60_000));
        assert_eq!((clock.now(), clock.receiving_since(), clock.queued_ms()), (60_000, 60_000, 60_000));
        clock.step();
        assert_eq!(clock.queued_ms(), 0);
    }

    #[test]
    fn extreme_jumps_do_not_overflow() {
        let mut clock = Clock::new(1_000);
        for round in 0..10_000_000u64 {
            clock.advance(if round % 2 == 0 { 0 } else { u64::MAX });
        }
        assert!(clock.now() > 0);
    }
}
