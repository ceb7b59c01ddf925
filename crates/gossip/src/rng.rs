//! Seeded random numbers: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). A seed gives the same
//! numbers with every version of every library, so that a simulation can be repeated years later.

/// A pseudo-random number generator. Good enough to choose gossip targets; not for secrets.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator with this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..bound`; 0 if `bound` is 0. For the bounds of a cluster (below 2^16) the bias
    /// is below 2^-48.
    pub fn below(&mut self, bound: usize) -> usize {
        let product = u128::from(self.next_u64()) * (bound as u128);
        (product >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_match_the_reference_implementation() {
        // The reference implementation's first outputs for seed 1234567.
        let mut rng = Rng::new(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| rng.next_u64()).collect();
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn numbers_are_uniform() {
        let mut rng = Rng::new(1);
        let mut faces = [0u32; 6];
        (0..60_000).for_each(|_| faces[rng.below(6)] += 1);
        assert!(faces.iter().all(|&count| (9_600..10_400).contains(&count)), "{faces:?}");
        assert_eq!(rng.below(0), 0);
    }
}
