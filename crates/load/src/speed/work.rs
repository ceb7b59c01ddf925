//! The work by which a CPU's speed is measured. Rounds are short, so that some of many run
//! undisturbed.
//!
//! Each round depends on the result of the one before, so that the compiler cannot drop any of
//! them.

use std::hint::black_box;
use std::time::Duration;

/// A kind of work, and the duration of a round on the standard CPU.
pub(super) struct Kind {
    pub(super) round: fn(&mut Work),
    pub(super) standard: Duration,
}

/// All kinds: integers, floating point, memory.
pub(super) const ALL: [Kind; 3] = [
    Kind { round: Work::integers, standard: Duration::from_nanos(84_300) },
    Kind { round: Work::floating_point, standard: Duration::from_nanos(88_800) },
    Kind { round: Work::memory, standard: Duration::from_nanos(35_900) },
];

/// The state of the work.
pub(super) struct Work {
    seed: u64,
    point: f64,
    /// A single cycle through all indices, in an order that a prefetcher cannot predict.
    ring: Vec<u32>,
    at: u32,
}

/// 256 KiB in all: larger than a first-level cache, and smaller than the caches that current
/// processors share among cores.
const RING_LEN: u32 = 64 << 10;

impl Work {
    pub(super) fn new() -> Self {
        let mut work = Self { seed: 0x9e37_79b9_7f4a_7c15, point: 0.5, ring: Vec::new(), at: 0 };
        // Sattolo's shuffle: the result is a single cycle.
        let mut order: Vec<u32> = (0..RING_LEN).collect();
        for last in (1..order.len()).rev() {
            let other = (work.random() % last as u64) as usize;
            order.swap(last, other);
        }
        work.ring = order;
        work
    }

    fn random(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }

    /// Collatz sequences from random numbers: shifts, products, unpredictable branches.
    fn integers(&mut self) {
        let mut steps = 0_u64;
        for _ in 0..750 {
            let mut number = self.random() >> 44;
            while number > 1 {
                number = if number & 1 == 0 { number >> 1 } else { number.wrapping_mul(3).wrapping_add(1) };
                steps = steps.wrapping_add(number ^ steps.rotate_left(5));
            }
        }
        self.seed ^= black_box(steps) | 1;
    }

    /// Sums, products, quotients and roots, each of which depends on the one before.
    fn floating_point(&mut self) {
        let (mut a, mut b) = (self.point, 1.0 - self.point);
        for _ in 0..6_250 {
            let c = (a * a + b * b + 0.25).sqrt();
            a = b / (c + 0.5) + 0.125;
            b = c * 0.75 - a * 0.25;
        }
        let point = black_box(a + b);
        self.point = if point.is_finite() { point.abs().fract() } else { 0.5 };
    }

    /// Follows the cycle; each address depends on the load before.
    fn memory(&mut self) {
        let mut at = self.at;
        for _ in 0..10_000 {
            at = self.ring.get(at as usize).copied().unwrap_or(0);
        }
        self.at = black_box(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_is_a_single_cycle() {
        let work = Work::new();
        let mut at = 0;
        for step in 1..=RING_LEN {
            at = work.ring[at as usize];
            assert!(at != 0 || step == RING_LEN, "closed after {step}");
        }
        assert_eq!(at, 0);
    }

    #[test]
    fn rounds_continue_from_the_previous_state() {
        let mut work = Work::new();
        for kind in &ALL {
            let before = (work.seed, work.point.to_bits(), work.at);
            (kind.round)(&mut work);
            assert_ne!((work.seed, work.point.to_bits(), work.at), before);
        }
        assert!((0.0..1.0).contains(&work.point));
    }
}
