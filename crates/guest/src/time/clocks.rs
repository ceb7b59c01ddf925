//! The offset of home's clocks from this node's.
//!
//! Home sends its clock readings several times, and waits for a reply in between. A reading is old
//! by the transit time of its message, so a clock set by it lags behind home's, and is never ahead:
//! a process that comes home sees its clocks go forward. The smallest lag is used. It is shorter
//! than the transit of most messages. So when the result of a sleep at home arrives here, the
//! guest's clock has usually passed the end of that sleep.

use rustix::time::{ClockId, clock_gettime};

/// The best offsets so far, in nanoseconds, of this node's monotonic and boot clocks.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct HomeClocks {
    offsets: Option<[i64; 2]>,
}

/// The monotonic and boot clocks of this machine, in nanoseconds.
fn read_clocks() -> [i64; 2] {
    [ClockId::Monotonic, ClockId::Boottime].map(|clock| {
        let now = clock_gettime(clock);
        now.tv_sec * 1_000_000_000 + now.tv_nsec
    })
}

impl HomeClocks {
    /// Handles a reading of home's clocks that has just arrived.
    pub(crate) fn receive(&mut self, home: [u64; 2]) {
        let now = read_clocks();
        let offsets = [0, 1].map(|at| home[at].cast_signed().wrapping_sub(now[at]));
        let best = self.offsets.unwrap_or(offsets);
        self.offsets = Some([0, 1].map(|at| best[at].max(offsets[at])));
    }

    /// The offsets to add to the clocks here; none before the first reading.
    #[must_use]
    pub(crate) fn offsets(&self) -> Option<[i64; 2]> {
        self.offsets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smallest_lag_is_used() {
        let mut clocks = HomeClocks::default();
        assert_eq!(clocks.offsets(), None);
        let ahead = 5_000_000_000;
        let shows = |late: i64| read_clocks().map(|now| (now + ahead - late).cast_unsigned());
        for late in [900_000_000, 0, 300_000_000] {
            clocks.receive(shows(late));
        }
        let [monotonic, boot] = clocks.offsets().expect("a reading was received");
        // Never ahead of home, and behind it by no more than this test takes between two reads.
        assert!((ahead - 100_000_000..=ahead).contains(&monotonic), "{monotonic}");
        assert!((ahead - 100_000_000..=ahead).contains(&boot), "{boot}");
        // A reading that no clock can have does no harm.
        clocks.receive([u64::MAX, 0]);
    }
}
