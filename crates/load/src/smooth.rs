//! Means that forget: exponential, by time and not by number of readings, so that a late reading weighs more.

use std::time::Duration;

/// A mean in which what is `memory` old weighs 1/e.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Smooth {
    memory: Duration,
    value: Option<f64>,
}

impl Smooth {
    /// One that has heard nothing.
    #[must_use]
    pub fn new(memory: Duration) -> Self {
        Self { memory, value: None }
    }

    /// Takes in what held on average over the last `span`, and tells the mean. The first reading is believed as it
    /// is; one that is no number is passed over.
    pub fn take(&mut self, reading: f64, span: Duration) -> f64 {
        if !reading.is_finite() {
            return self.value();
        }
        let kept = (-span.as_secs_f64() / self.memory.as_secs_f64().max(1e-9)).exp();
        let value = self.value.map_or(reading, |old| old * kept + reading * (1.0 - kept));
        self.value = Some(value);
        value
    }

    /// The mean, 0 before the first reading.
    #[must_use]
    pub fn value(&self) -> f64 {
        self.value.unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_step_is_followed_by_time_and_not_by_readings() {
        let mut often = Smooth::new(SECOND);
        let mut once = Smooth::new(SECOND);
        assert_eq!(often.take(0.0, SECOND), 0.0);
        assert_eq!(once.take(0.0, SECOND), 0.0);
        for _ in 0..10 {
            often.take(100.0, SECOND / 5);
        }
        let late = once.take(100.0, SECOND * 2);
        assert!((often.value() - late).abs() < 1e-9);
        assert!((late - 86.5).abs() < 0.1, "{late}");
    }

    #[test]
    fn what_is_no_number_changes_nothing() {
        let mut mean = Smooth::new(SECOND);
        assert_eq!(mean.take(f64::NAN, SECOND), 0.0);
        assert_eq!(mean.take(5.0, Duration::ZERO), 5.0);
        assert_eq!(mean.take(f64::INFINITY, SECOND), 5.0);
        assert_eq!(Smooth::new(Duration::ZERO).take(1.0, SECOND), 1.0);
    }
}
