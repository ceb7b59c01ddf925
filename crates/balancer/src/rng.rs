//! Seeded random numbers: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), the same in every
//! version of every library, so that a simulation can be repeated years later.

/// A pseudo-random number generator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rng(u64);

impl Rng {
    /// A generator with this seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// One of `0..count`; 0 if `count` is 0.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        // The high half of the product is uniform also for counts that are not powers of two.
        usize::try_from((u128::from(mixed) * count as u128) >> 64).unwrap_or(0)
    }
}
