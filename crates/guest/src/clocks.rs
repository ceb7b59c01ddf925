//! How far home's clocks are ahead of this node's.
//!
//! Home says what its clocks show, several times, waiting for an answer in between. Each time the word travels for a
//! while, so that ours, set by it, lag behind home's by that while, and are never ahead: a process that comes home
//! sees them go forward. The least lag is taken. It is shorter than the way of most messages, so that a guest that
//! slept at home for a time measures at least that time when the result has come here.

use rustix::time::{ClockId, clock_gettime};

/// The best that is known: nanoseconds to add to this node's monotonic and boot clocks.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Clocks {
    shifts: Option<[i64; 2]>,
}

/// What the monotonic and boot clocks of this machine show, in nanoseconds.
fn here() -> [i64; 2] {
    [ClockId::Monotonic, ClockId::Boottime].map(|clock| {
        let now = clock_gettime(clock);
        now.tv_sec * 1_000_000_000 + now.tv_nsec
    })
}

impl Clocks {
    /// Takes what home's clocks showed when it spoke.
    pub(crate) fn heard(&mut self, home: [u64; 2]) {
        let now = here();
        let shifts = [0, 1].map(|at| home[at].cast_signed().wrapping_sub(now[at]));
        let best = self.shifts.unwrap_or(shifts);
        self.shifts = Some([0, 1].map(|at| best[at].max(shifts[at])));
    }

    /// What to add to the clocks here; none before home has spoken.
    #[must_use]
    pub(crate) fn shifts(&self) -> Option<[i64; 2]> {
        self.shifts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_lag_counts() {
        let mut clocks = Clocks::default();
        assert_eq!(clocks.shifts(), None);
        let ahead = 5_000_000_000;
        let shows = |late: i64| here().map(|now| (now + ahead - late).cast_unsigned());
        for late in [900_000_000, 0, 300_000_000] {
            clocks.heard(shows(late));
        }
        let [monotonic, boot] = clocks.shifts().expect("home has spoken");
        // Never ahead of home, and behind it by no more than this test takes between two reads.
        assert!((ahead - 100_000_000..=ahead).contains(&monotonic), "{monotonic}");
        assert!((ahead - 100_000_000..=ahead).contains(&boot), "{boot}");
        // A number that no clock shows does no harm.
        clocks.heard([u64::MAX, 0]);
    }
}
