//! A process' statistics, which fade: `mosctl setdecay`, `slowdecay`, `fastdecay`, `nodecay`.

use serde::{Deserialize, Serialize};

/// How fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// Never: what has been counts as much as what is.
    None,
    /// 975 parts of 1,000 are kept each interval (ALG-22).
    #[default]
    Slow,
    /// 926 parts of 1,000.
    Fast,
    /// So many parts of 1,000, for `mosrun -d`.
    Custom(u16),
}

impl Decay {
    /// The part that one interval leaves, 0 to 1.
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

/// The average rate of something that is counted, with the past fading interval by interval.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Decayed {
    count: f64,
    intervals: f64,
}

impl Decayed {
    /// `count` more in one more interval.
    pub fn add(&mut self, count: f64, decay: Decay) {
        self.count = self.count * decay.kept() + count;
        self.intervals = self.intervals * decay.kept() + 1.0;
    }

    /// So many an interval; right from the first one, since the intervals fade like the counts.
    #[must_use]
    pub fn rate(&self) -> f64 {
        if self.intervals > 0.0 { self.count / self.intervals } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steady_rates_are_seen_at_once_and_old_ones_fade() {
        let mut rate = Decayed::default();
        rate.add(40.0, Decay::Fast);
        assert!((rate.rate() - 40.0).abs() < 1e-9);
        // Nine intervals of 0.926 halve what was.
        (0..200).for_each(|_| rate.add(40.0, Decay::Fast));
        (0..9).for_each(|_| rate.add(0.0, Decay::Fast));
        assert!((19.0..21.0).contains(&rate.rate()), "{}", rate.rate());
    }

    #[test]
    fn without_decay_it_is_the_average() {
        let mut rate = Decayed::default();
        [10.0, 0.0, 20.0].into_iter().for_each(|count| rate.add(count, Decay::None));
        assert!((rate.rate() - 10.0).abs() < 1e-9);
    }
}
