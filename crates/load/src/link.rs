//! What it costs to talk to another node. Who has a link measures; here it is smoothed.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A link's round trip and throughput; 0 is not known yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LinkCost {
    /// A round trip, in microseconds.
    pub rtt_us: u32,
    /// What goes through it one way, in bytes per second.
    pub bytes_per_s: u64,
}

/// What is shorter measures round trips, buffers and the preparation of a move, not the link: half a megabyte that a busy
/// node takes in in a quarter of a second came over a link of any speed.
const LEAST_TRANSFER: u64 = 8 << 20;
/// Of a shorter round trip, half is believed at once; of a longer one, a sixteenth: it is more often an end that was busy
/// than a way that has become longer, and what is asked for is the way.
const SHORTER: f64 = 2.0;
const LONGER: f64 = 16.0;
/// One new transfer in 3: they are rare, and each is a mean in itself.
const TRANSFERS: f64 = 3.0;

impl LinkCost {
    /// Takes in one measured round trip.
    pub fn round_trip(&mut self, took: Duration) {
        // Rounded up: 0 would say that it is not known.
        let micros = (took.as_nanos().div_ceil(1000)).clamp(1, u32::MAX.into()) as f64;
        let one_in = if micros < self.rtt_us.into() { SHORTER } else { LONGER };
        self.rtt_us = follow(self.rtt_us.into(), micros, one_in) as u32;
    }

    /// Takes in a transfer; short ones say nothing and are passed over.
    pub fn transfer(&mut self, bytes: u64, took: Duration) {
        if bytes < LEAST_TRANSFER {
            return;
        }
        let rate = (bytes as f64 / took.as_secs_f64().max(1e-6)).max(1.0);
        self.bytes_per_s = follow(self.bytes_per_s as f64, rate, TRANSFERS) as u64;
    }

    /// How long that many bytes take, the round trip included; nothing if the link has not been measured.
    #[must_use]
    pub fn time_for(&self, bytes: u64) -> Option<Duration> {
        if self.bytes_per_s == 0 {
            return None;
        }
        let transfer = Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_s as f64).ok()?;
        Some(transfer + Duration::from_micros(self.rtt_us.into()))
    }
}

fn follow(old: f64, new: f64, one_in: f64) -> f64 {
    if old == 0.0 { new } else { (old + (new - old) / one_in).round().max(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_is_believed_and_outliers_fade() {
        let mut link = LinkCost::default();
        assert_eq!(link.time_for(1), None);
        link.round_trip(Duration::from_micros(200));
        assert_eq!(link.rtt_us, 200);
        link.round_trip(Duration::from_micros(1000));
        assert_eq!(link.rtt_us, 250);
        for _ in 0..5 {
            link.round_trip(Duration::from_micros(200));
        }
        assert!(link.rtt_us.abs_diff(200) <= 4, "{link:?}");
        // One in three comes from an end that had something else to do.
        for round in 0..300 {
            link.round_trip(Duration::from_micros(if round % 3 == 0 { 5000 } else { 200 }));
        }
        assert!(link.rtt_us < 600, "{link:?}");
        for _ in 0..60 {
            link.round_trip(Duration::from_micros(5000));
        }
        assert!(link.rtt_us > 4500, "a way that has become longer is not believed: {link:?}");
        link.round_trip(Duration::ZERO);
        assert_ne!(link.rtt_us, 0);
    }

    #[test]
    fn throughput_is_that_of_long_transfers() {
        let mut link = LinkCost::default();
        link.transfer(1000, Duration::from_secs(1));
        assert_eq!(link.bytes_per_s, 0);
        link.transfer(10_000_000, Duration::from_secs(1));
        assert_eq!(link.bytes_per_s, 10_000_000);
        for _ in 0..12 {
            link.transfer(100_000_000, Duration::from_secs(1));
        }
        assert!(link.bytes_per_s > 98_000_000, "{link:?}");
        link.rtt_us = 500;
        let time = link.time_for(link.bytes_per_s).unwrap();
        assert_eq!(time, Duration::from_micros(1_000_500));
    }

    proptest! {
        #[test]
        fn it_stays_between_what_was_measured(rtts in prop::collection::vec(1u64..10_000_000, 1..50)) {
            let mut link = LinkCost::default();
            for &rtt in &rtts {
                link.round_trip(Duration::from_micros(rtt));
            }
            let (low, high) = (*rtts.iter().min().unwrap(), *rtts.iter().max().unwrap());
            prop_assert!((low..=high).contains(&u64::from(link.rtt_us)));
        }

        #[test]
        fn nothing_measured_can_harm(bytes in any::<u64>(), nanos in any::<u64>(), ask in any::<u64>()) {
            let mut link = LinkCost::default();
            link.transfer(bytes, Duration::from_nanos(nanos));
            link.transfer(bytes, Duration::from_nanos(nanos));
            link.round_trip(Duration::from_nanos(nanos));
            let _time = link.time_for(ask);
            prop_assert!(link.rtt_us > 0);
        }
    }
}
