//! Chance from a seed: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). The same seed gives the same throws with every
//! version of every library, so that a simulation can be run again years later.

/// A source of pseudo-random numbers; good enough to choose whom to tell, useless for secrets.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// The throws that belong to this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 if that is 0. For the bounds of a cluster (below 2^16) the bias is below 2^-48.
    pub fn below(&mut self, bound: usize) -> usize {
        let product = u128::from(self.bits()) * (bound as u128);
        (product >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_throws_are_those_of_the_paper() {
        // The reference implementation's first outputs for seed 1234567.
        let mut dice = Dice::new(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| dice.bits()).collect();
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn each_face_comes_up_as_often() {
        let mut dice = Dice::new(1);
        let mut faces = [0u32; 6];
        (0..60_000).for_each(|_| faces[dice.below(6)] += 1);
        assert!(faces.iter().all(|&count| (9_600..10_400).contains(&count)), "{faces:?}");
        assert_eq!(dice.below(0), 0);
    }
}
