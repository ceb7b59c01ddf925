//! Numbers by chance, the same for ever for one seed (splitmix64; see `tern_balancer`'s seed).

/// A stream of them.
#[derive(Debug, Clone)]
pub(crate) struct Chance(u64);

impl Chance {
    /// The stream of this seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// 0 to 1, without 1.
    pub(crate) fn part(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// One of `0..count`.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        usize::try_from((u128::from(self.bits()) * count as u128) >> 64).unwrap_or(0)
    }

    /// Between two numbers, all equally likely.
    pub(crate) fn between(&mut self, least: f64, most: f64) -> f64 {
        least + (most - least) * self.part()
    }

    /// The time to the next of events that come once in `mean` on average.
    pub(crate) fn until_next(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.part()).ln()
    }

    /// A length with a heavy tail: P(more than t) falls as `least`/t, up to `most`.
    pub(crate) fn heavy(&mut self, least: f64, most: f64) -> f64 {
        (least / (1.0 - self.part() * (1.0 - least / most))).min(most)
    }
}
