//! How fast a node's memory fills.

/// The smallest of the last three slopes. A step, such as a program that allocates its memory at
/// once, affects only one of them, and predicts nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trend {
    last: Option<(u64, u64)>,
    slopes: [f64; 3],
}

/// Shortest time between two samples, in milliseconds; over less, the slope is noise.
const MIN_INTERVAL_MS: u64 = 500;

impl Trend {
    /// Adds a sample: this many bytes were free at that time.
    pub(crate) fn sample(&mut self, free: u64, at_ms: u64) {
        let Some((last_ms, last_free)) = self.last else {
            self.last = Some((at_ms, free));
            return;
        };
        if at_ms >= last_ms.saturating_add(MIN_INTERVAL_MS) {
            let seconds = (at_ms - last_ms) as f64 / 1000.0;
            self.slopes.rotate_left(1);
            self.slopes[2] = (last_free as f64 - free as f64) / seconds;
            self.last = Some((at_ms, free));
        }
    }

    /// How fast memory fills, in bytes a second; never negative.
    pub(crate) fn fill_rate(&self) -> f64 {
        self.slopes.into_iter().fold(f64::INFINITY, f64::min).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trend_ignores_steps_and_follows_slopes_after_three_samples() {
        let mut trend = Trend::default();
        for (second, free) in [(0, 900), (1, 900), (2, 500), (3, 500), (4, 500)] {
            trend.sample(free, second * 1000);
            assert!(trend.fill_rate() < 1e-9, "second {second}");
        }
        for second in 5..8 {
            trend.sample(500 - (second - 4) * 50, second * 1000);
        }
        assert!((trend.fill_rate() - 50.0).abs() < 1e-9);
    }
}
