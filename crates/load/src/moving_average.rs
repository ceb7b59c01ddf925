//! Exponential moving averages over time, not over the number of readings, so that a late reading
//! weighs more.

use std::time::Duration;

/// An average in which a reading that is `time_constant` old weighs 1/e.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MovingAverage {
    time_constant: Duration,
    value: Option<f64>,
}

impl MovingAverage {
    /// An average without readings.
    #[must_use]
    pub fn new(time_constant: Duration) -> Self {
        Self { time_constant, value: None }
    }

    /// Adds a reading, the average over the last `span`, and returns the new average. The first
    /// reading is taken as it is; NaN and infinities are ignored.
    pub fn add(&mut self, reading: f64, span: Duration) -> f64 {
        if !reading.is_finite() {
            return self.value();
        }
        let kept = (-span.as_secs_f64() / self.time_constant.as_secs_f64().max(1e-9)).exp();
        let value = self.value.map_or(reading, |old| old * kept + reading * (1.0 - kept));
        self.value = Some(value);
        value
    }

    /// The average; 0 before the first reading.
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
    fn average_depends_on_time_not_on_number_of_readings() {
        let mut often = MovingAverage::new(SECOND);
        let mut once = MovingAverage::new(SECOND);
        assert_eq!(often.add(0.0, SECOND), 0.0);
        assert_eq!(once.add(0.0, SECOND), 0.0);
        for _ in 0..10 {
            often.add(100.0, SECOND / 5);
        }
        let late = once.add(100.0, SECOND * 2);
        assert!((often.value() - late).abs() < 1e-9);
        assert!((late - 86.5).abs() < 0.1, "{late}");
    }

    #[test]
    fn nan_and_infinity_are_ignored() {
        let mut average = MovingAverage::new(SECOND);
        assert_eq!(average.add(f64::NAN, SECOND), 0.0);
        assert_eq!(average.add(5.0, Duration::ZERO), 5.0);
        assert_eq!(average.add(f64::INFINITY, SECOND), 5.0);
        assert_eq!(MovingAverage::new(Duration::ZERO).add(1.0, SECOND), 1.0);
    }
}
