//! Seeded random numbers: SplitMix64, as in `tern_balancer`; a seed always gives the same numbers.

/// A pseudo-random number generator.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    /// A generator with this seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number in `0..1`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A number in `0..count`.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        usize::try_from((u128::from(self.next_u64()) * count as u128) >> 64).unwrap_or(0)
    }

    /// A uniformly distributed number between two bounds.
    pub(crate) fn uniform(&mut self, min: f64, max: f64) -> f64 {
        min + (max - min) * self.unit()
    }

    /// The time to the next event, if events come once in `mean` on average (exponentially
    /// distributed).
    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// A length with a heavy tail: P(more than t) falls like `min`/t, up to `max`.
    pub(crate) fn heavy_tailed(&mut self, min: f64, max: f64) -> f64 {
        (min / (1.0 - self.unit() * (1.0 - min / max))).min(max)
    }
}
