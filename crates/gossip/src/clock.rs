//! Time as this node has lived it, from a clock that may jump.
//!
//! * Back: no time has passed. Ages are then too small by less than the time since the last call.
//! * Far ahead: the daemon was stopped, or the clock is wrong; nobody can tell which. The time counts, because an
//!   entry that looks too old is replaced by the next newer one, while one that looks too young would win over it.
//!   But nobody was listening meanwhile, so silence in it is no sign of death ([`Clock::listening_since`]), and what
//!   is received before the next step may have waited all that time ([`Clock::waited`]).

/// The most that one step of the clock can count for, in ms: some 34 years.
const MOST_GAP: u64 = 1 << 40;

/// A clock made of the differences between the times that it is shown.
#[derive(Debug, Clone)]
pub(crate) struct Clock {
    shown: Option<u64>,
    now: i64,
    leap: u64,
    listening_since: i64,
    waited: i64,
}

impl Clock {
    /// A clock that takes a difference of more than `leap` ms for a jump.
    pub(crate) fn new(leap: u64) -> Self {
        Self { shown: None, now: 0, leap, listening_since: 0, waited: 0 }
    }

    /// Goes on to the time shown. True if that was a leap ahead.
    pub(crate) fn advance(&mut self, shown: u64) -> bool {
        let gap = self.gap(shown);
        self.shown = Some(shown);
        self.now = self.now.saturating_add_unsigned(gap);
        if gap <= self.leap {
            return false;
        }
        self.listening_since = self.now;
        self.waited = i64::try_from(gap).unwrap_or(i64::MAX);
        true
    }

    /// A step begins: what is received from here on has not waited.
    pub(crate) fn step(&mut self) {
        self.waited = 0;
    }

    /// The time, in ms since the first call.
    pub(crate) fn now(&self) -> i64 {
        self.now
    }

    /// What the time would be if the clock were shown this now.
    pub(crate) fn at(&self, shown: u64) -> i64 {
        self.now.saturating_add_unsigned(self.gap(shown))
    }

    /// Since when this node has listened without a pause.
    pub(crate) fn listening_since(&self) -> i64 {
        self.listening_since
    }

    /// How long a message that is received now may have waited here for its reader.
    pub(crate) fn waited(&self) -> i64 {
        self.waited
    }

    fn gap(&self, shown: u64) -> u64 {
        shown.saturating_sub(self.shown.unwrap_or(shown)).min(MOST_GAP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on_from_where_the_clock_jumped_back_to() {
        let mut clock = Clock::new(1_000);
        for shown in [5_000, 5_500, 100, 600] {
            assert!(!clock.advance(shown));
        }
        assert_eq!(clock.now(), 1_000);
    }

    #[test]
    fn a_leap_counts_but_nobody_listened() {
        let mut clock = Clock::new(1_000);
        clock.advance(0);
        assert!(clock.advance(60_000));
        assert_eq!((clock.now(), clock.listening_since(), clock.waited()), (60_000, 60_000, 60_000));
        clock.step();
        assert_eq!(clock.waited(), 0);
    }

    #[test]
    fn the_wildest_clock_is_harmless() {
        let mut clock = Clock::new(1_000);
        for round in 0..10_000_000u64 {
            clock.advance(if round % 2 == 0 { 0 } else { u64::MAX });
        }
        assert!(clock.now() > 0);
    }
}
