//! Decaying statistics of a process: `mosctl setdecay`, `slowdecay`, `fastdecay`, `nodecay`.

use serde::{Deserialize, Serialize};

/// How fast a statistic decays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// Not at all: the past counts as much as the present.
    None,
    /// 975 parts in 1,000 are kept each interval, as in MOSIX.
    #[default]
    Slow,
    /// 926 parts in 1,000 are kept, as in MOSIX.
    Fast,
    /// This many parts in 1,000 are kept, for `mosrun -d`.
    Custom(u16),
}

impl Decay {
    /// The fraction kept after one interval, 0 to 1.
    #[must_use]
    pub fn kept(self) -> f64 {
        match self {
            Self::None => 1.0,
            Self::Slow => 0.975,
            Self::Fast => 0.926,
            Self::Custom(kept) => f64::from(kept.min(1000)) / 1000.0,
        }
    }
}

/// The average rate of a counter, with older intervals decaying.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct DecayingRate {
    count: f64,
    intervals: f64,
}

impl DecayingRate {
    /// Adds an interval with this count.
    pub fn add(&mut self, count: f64, decay: Decay) {
        self.count = self.count * decay.kept() + count;
        self.intervals = self.intervals * decay.kept() + 1.0;
    }

    /// The count per interval; exact from the first interval, since intervals decay like counts.
    #[must_use]
    pub fn rate(&self) -> f64 {
        if self.intervals > 0.0 { self.count / self.intervals } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_exact_at_once_and_decays() {
        let mut rate = DecayingRate::default();
        rate.add(40.0, Decay::Fast);
        assert!((rate.rate() - 40.0).abs() < 1e-9);
        // Nine intervals of 0.926 halve the rate.
        (0..200).for_each(|_| rate.add(40.0, Decay::Fast));
        (0..9).for_each(|_| rate.add(0.0, Decay::Fast));
        assert!((19.0..21.0).contains(&rate.rate()), "{}", rate.rate());
    }

    #[test]
    fn rate_without_decay_is_the_average() {
        let mut rate = DecayingRate::default();
        [10.0, 0.0, 20.0].into_iter().for_each(|count| rate.add(count, Decay::None));
        assert!((rate.rate() - 10.0).abs() < 1e-9);
    }
}
