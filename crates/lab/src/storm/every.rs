//! `--every 50..500ms`: the pause between two moves of a process.

use crate::error::LabError;
use rand::RngExt;
use rand::rngs::StdRng;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Shortest and longest pause, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Every {
    least: u64,
    most: u64,
}

/// Upper limit for a pause, in milliseconds. A longer one is rejected as a mistake.
const MOST: u64 = 3_600_000;

impl Every {
    /// Returns a pause from the range, uniformly distributed.
    pub(super) fn pick(self, random: &mut StdRng) -> Duration {
        Duration::from_millis(random.random_range(self.least..=self.most))
    }
}

impl Default for Every {
    fn default() -> Self {
        Self { least: 50, most: 500 }
    }
}

impl fmt::Display for Every {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}ms", self.least, self.most)
    }
}

impl FromStr for Every {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        let bad = || {
            LabError::BadOption(format!(
                "{text:?} is not a range of milliseconds up to an hour; write it as 50..500ms, or one number as 100ms"
            ))
        };
        let number = |part: &str| part.trim().trim_end_matches("ms").parse::<u64>().ok();
        let (least, most) = match text.split_once("..") {
            Some((least, most)) => (number(least), number(most)),
            None => (number(text), number(text)),
        };
        match (least, most) {
            (Some(least), Some(most)) if least <= most && most <= MOST => Ok(Self { least, most }),
            _ => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn ranges_read_as_they_are_written() {
        let read = |text: &str| text.parse::<Every>().map(|every| (every.least, every.most));
        assert_eq!(read("50..500ms").unwrap(), (50, 500));
        assert_eq!(read("5ms..20ms").unwrap(), (5, 20));
        assert_eq!(read("100").unwrap(), (100, 100));
        assert_eq!(Every::default().to_string().parse::<Every>().unwrap(), Every::default());
        for bad in ["", "..", "500..50ms", "-1..5ms", "1s", "0..3600001ms"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn pauses_are_within() {
        let every: Every = "3..5ms".parse().unwrap();
        let mut random = StdRng::seed_from_u64(2);
        let all: std::collections::BTreeSet<_> =
            (0..100).map(|_| every.pick(&mut random).as_millis()).collect();
        assert_eq!(all.into_iter().collect::<Vec<_>>(), [3, 4, 5]);
    }
}
