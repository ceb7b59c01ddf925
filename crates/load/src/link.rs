//! The cost of communication with another node. The owner of the link measures it; this module
//! smooths the results.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Round-trip time and throughput of a link; 0 is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LinkEstimate {
    /// Round-trip time, in microseconds.
    pub rtt_us: u32,
    /// Throughput one way, in bytes per second.
    pub bytes_per_s: u64,
}

/// The shortest transfer that measures a link. Shorter ones measure round trips, buffers and the
/// preparation of a move: half a megabyte that a busy node receives in a quarter of a second may
/// have come over a link of any speed.
const MIN_TRANSFER_LEN: u64 = 8 << 20;
/// Divisors for a new round-trip time: it weighs a half if it is shorter than the average, a
/// sixteenth if it is longer. A longer one is more often due to a busy end than to a slower path,
/// and only the path is of interest.
const SHORTER_RTT_DIVISOR: f64 = 2.0;
const LONGER_RTT_DIVISOR: f64 = 16.0;
/// Divisor for a new transfer: it weighs a third. Transfers are rare, and each is an average in
/// itself.
const TRANSFER_DIVISOR: f64 = 3.0;

impl LinkEstimate {
    /// Adds a measured round-trip time.
    pub fn add_round_trip(&mut self, took: Duration) {
        // Rounded up, because 0 means unknown.
        let micros = (took.as_nanos().div_ceil(1000)).clamp(1, u32::MAX.into()) as f64;
        let divisor = if micros < self.rtt_us.into() { SHORTER_RTT_DIVISOR } else { LONGER_RTT_DIVISOR };
        self.rtt_us = smooth(self.rtt_us.into(), micros, divisor) as u32;
    }

    /// Adds a measured transfer; short ones are ignored.
    pub fn add_transfer(&mut self, bytes: u64, took: Duration) {
        if bytes < MIN_TRANSFER_LEN {
            return;
        }
        let rate = (bytes as f64 / took.as_secs_f64().max(1e-6)).max(1.0);
        self.bytes_per_s = smooth(self.bytes_per_s as f64, rate, TRANSFER_DIVISOR) as u64;
    }

    /// How long a transfer takes, including the round trip; `None` if the link has not been
    /// measured.
    #[must_use]
    pub fn time_for(&self, bytes: u64) -> Option<Duration> {
        if self.bytes_per_s == 0 {
            return None;
        }
        let transfer = Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_s as f64).ok()?;
        Some(transfer + Duration::from_micros(self.rtt_us.into()))
    }
}

fn smooth(old: f64, new: f64, divisor: f64) -> f64 {
    if old == 0.0 { new } else { (old + (new - old) / divisor).round().max(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn first_rtt_is_taken_whole_and_outliers_decay() {
        let mut link = LinkEstimate::default();
        assert_eq!(link.time_for(1), None);
        link.add_round_trip(Duration::from_micros(200));
        assert_eq!(link.rtt_us, 200);
        link.add_round_trip(Duration::from_micros(1000));
        assert_eq!(link.rtt_us, 250);
        for _ in 0..5 {
            link.add_round_trip(Duration::from_micros(200));
        }
        assert!(link.rtt_us.abs_diff(200) <= 4, "{link:?}");
        // One measurement in three is from a busy end.
        for round in 0..300 {
            link.add_round_trip(Duration::from_micros(if round % 3 == 0 { 5000 } else { 200 }));
        }
        assert!(link.rtt_us < 600, "{link:?}");
        for _ in 0..60 {
            link.add_round_trip(Duration::from_micros(5000));
        }
        assert!(link.rtt_us > 4500, "a way that has become longer is not believed: {link:?}");
        link.add_round_trip(Duration::ZERO);
        assert_ne!(link.rtt_us, 0);
    }

    #[test]
    fn throughput_uses_only_long_transfers() {
        let mut link = LinkEstimate::default();
        link.add_transfer(1000, Duration::from_secs(1));
        assert_eq!(link.bytes_per_s, 0);
        link.add_transfer(10_000_000, Duration::from_secs(1));
        assert_eq!(link.bytes_per_s, 10_000_000);
        for _ in 0..12 {
            link.add_transfer(100_000_000, Duration::from_secs(1));
        }
        assert!(link.bytes_per_s > 98_000_000, "{link:?}");
        link.rtt_us = 500;
        let time = link.time_for(link.bytes_per_s).unwrap();
        assert_eq!(time, Duration::from_micros(1_000_500));
    }

    proptest! {
        #[test]
        fn rtt_stays_within_the_measured_range(rtts in prop::collection::vec(1u64..10_000_000, 1..50)) {
            let mut link = LinkEstimate::default();
            for &rtt in &rtts {
                link.add_round_trip(Duration::from_micros(rtt));
            }
            let (low, high) = (*rtts.iter().min().unwrap(), *rtts.iter().max().unwrap());
            prop_assert!((low..=high).contains(&u64::from(link.rtt_us)));
        }

        #[test]
        fn extreme_measurements_are_harmless(bytes in any::<u64>(), nanos in any::<u64>(), ask in any::<u64>()) {
            let mut link = LinkEstimate::default();
            link.add_transfer(bytes, Duration::from_nanos(nanos));
            link.add_transfer(bytes, Duration::from_nanos(nanos));
            link.add_round_trip(Duration::from_nanos(nanos));
            let _time = link.time_for(ask);
            prop_assert!(link.rtt_us > 0);
        }
    }
}
