//! The work that a CPU's speed is measured by. Rounds are short, so that one of many is left in peace.
//!
//! Each round depends on what the one before has left, so that nothing of it can be left out.

use std::hint::black_box;
use std::time::Duration;

/// A kind of work, and how long a round takes on the standard CPU.
pub(super) struct Kind {
    pub(super) round: fn(&mut Work),
    pub(super) standard: Duration,
}

/// All kinds: whole numbers, floating point, memory.
pub(super) const ALL: [Kind; 3] = [
    Kind { round: Work::whole_numbers, standard: Duration::from_nanos(84_300) },
    Kind { round: Work::floating_point, standard: Duration::from_nanos(88_800) },
    Kind { round: Work::memory, standard: Duration::from_nanos(35_900) },
];

/// What is worked on.
pub(super) struct Work {
    seed: u64,
    point: f64,
    /// A ring through all its places, in an order that no prefetcher guesses.
    ring: Vec<u32>,
    at: u32,
}

/// 256 KiB: more than the first cache holds, and less than what is shared with other cores on processors of today.
const PLACES: u32 = 64 << 10;

impl Work {
    pub(super) fn new() -> Self {
        let mut work = Self { seed: 0x9e37_79b9_7f4a_7c15, point: 0.5, ring: Vec::new(), at: 0 };
        // Sattolo's shuffle: the result is one ring.
        let mut order: Vec<u32> = (0..PLACES).collect();
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

    /// Collatz's walks from random numbers: shifts, products, branches that cannot be foretold.
    fn whole_numbers(&mut self) {
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

    /// Sums, products, quotients and roots, each of which waits for the one before.
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

    /// From place to place, each of which only the one before tells.
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
    fn the_ring_passes_through_every_place() {
        let work = Work::new();
        let mut at = 0;
        for step in 1..=PLACES {
            at = work.ring[at as usize];
            assert!(at != 0 || step == PLACES, "closed after {step}");
        }
        assert_eq!(at, 0);
    }

    #[test]
    fn rounds_go_on_where_the_last_one_ended() {
        let mut work = Work::new();
        for kind in &ALL {
            let before = (work.seed, work.point.to_bits(), work.at);
            (kind.round)(&mut work);
            assert_ne!((work.seed, work.point.to_bits(), work.at), before);
        }
        assert!((0.0..1.0).contains(&work.point));
    }
}
