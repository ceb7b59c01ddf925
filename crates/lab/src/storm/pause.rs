//! `--every 50..500ms`: the pause between two moves of a process.

use crate::error::LabError;
use rand::RngExt;
use rand::rngs::StdRng;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Shortest and longest pause, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PauseRange {
    min: u64,
    max: u64,
}

/// Upper limit for a pause, in milliseconds. A longer one is rejected as a mistake.
const MAX_PAUSE_MS: u64 = 3_600_000;

impl PauseRange {
    /// Returns a pause from the range, uniformly distributed.
    pub(super) fn pick(self, random: &mut StdRng) -> Duration {
        Duration::from_millis(random.random_range(self.min..=self.max))
    }
}

impl Default for PauseRange {
    fn default() -> Self {
        Self { min: 50, max: 500 }
    }
}

impl fmt::Display for PauseRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}ms", self.min, self.max)
    }
}

impl FromStr for PauseRange {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        let bad = || {
            LabError::BadOption(format!(
                "{text:?} is not a range of milliseconds up to an hour; write it as 50..500ms, or one number as 100ms"
            ))
        };
        let number = |part: &str| part.trim().trim_end_matches("ms").parse::<u64>().ok();
        let (min, max) = match text.split_once("..") {
            Some((min, max)) => (number(min), number(max)),
            None => (number(text), number(text)),
        };
        match (min, max) {
            (Some(min), Some(max)) if min <= max && max <= MAX_PAUSE_MS => Ok(Self { min, max }),
            _ => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn ranges_are_parsed() {
        let read = |text: &str| text.parse::<PauseRange>().map(|range| (range.min, range.max));
        assert_eq!(read("50..500ms").unwrap(), (50, 500));
        assert_eq!(read("5ms..20ms").unwrap(), (5, 20));
        assert_eq!(read("100").unwrap(), (100, 100));
        assert_eq!(PauseRange::default().to_string().parse::<PauseRange>().unwrap(), PauseRange::default());
        for bad in ["", "..", "500..50ms", "-1..5ms", "1s", "0..3600001ms"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn pauses_are_within_the_range() {
        let range: PauseRange = "3..5ms".parse().unwrap();
        let mut random = StdRng::seed_from_u64(2);
        let all: std::collections::BTreeSet<_> =
            (0..100).map(|_| range.pick(&mut random).as_millis()).collect();
        assert_eq!(all.into_iter().collect::<Vec<_>>(), [3, 4, 5]);
    }
}
