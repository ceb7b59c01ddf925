//! What the cluster hears of this node, taken once a second.

use crate::demand::Demand;
use crate::group::Groups;
use crate::memory::Memory;
use crate::pressure::{Pressure, Stalls};
use crate::smooth::Smooth;
use crate::speed::STANDARD;
use serde::{Deserialize, Serialize};
use std::fs;
use std::time::{Duration, Instant};

/// A node, as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// 100 is one standard CPU kept busy: less on a fast node and on one of many CPUs. Smoothed: it has followed a
    /// change by 80 % after 2 s, and by 91 % after 3 s.
    pub load: u32,
    /// Threads that run or wait for a CPU, on average; smoothed as the load.
    pub demand: f32,
    /// What one thread gets here when it is alone; 10,000 is a standard CPU.
    pub speed: u32,
    /// How many threads of that speed it carries: at least 1, and not always whole.
    pub cpus: f32,
    /// CPUs that it sees.
    pub online: u32,
    /// CPUs' worth of time that control groups allow, if they limit it.
    pub quota: Option<f32>,
    /// For a newcomer.
    pub memory: Memory,
    /// Nothing where the kernel does not tell.
    pub pressure: Option<Pressure>,
    /// Percent of its time that it can use: 100 unless it pages.
    pub utilisability: u8,
}

/// Takes [`Sample`]s.
#[derive(Debug)]
pub struct Sampler {
    speed: u32,
    groups: Groups,
    demand: Demand,
    stalls: Stalls,
    smooth: Smooth,
    before: Option<Instant>,
}

/// A process that starts or ends shows within 2 or 3 s, and a turn of the scheduler does not.
const LOAD_MEMORY: Duration = Duration::from_millis(1250);

impl Sampler {
    /// `speed` is that of one CPU of this machine, as [`Calibration`](crate::Calibration) has found it, or as its owner
    /// has set it.
    #[must_use]
    pub fn new(speed: u32) -> Self {
        let groups = Groups::of_this_process();
        Self {
            speed,
            demand: Demand::new(groups.clone()),
            stalls: Stalls::new(groups.pressure()),
            groups,
            smooth: Smooth::new(LOAD_MEMORY),
            before: None,
        }
    }

    /// Another speed of one CPU, from the next sample on.
    pub fn set_speed(&mut self, speed: u32) {
        self.speed = speed;
    }

    /// What has been since the last call; once a second is meant. The first finds no load.
    pub fn sample(&mut self) -> Sample {
        let now = Instant::now();
        let span = self.before.map_or(Duration::from_secs(1), |before| now.duration_since(before));
        if let Some(demand) = self.demand.read() {
            self.smooth.take(demand, span);
        }
        self.before = Some(now);
        let (pressure, utilisability) = self.stalls.read(span);
        let quota = self.groups.quota();
        let online = online();
        let (speed, cpus) = capacity(self.speed, online, quota);
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Sample {
            load: load(self.smooth.value(), speed, cpus),
            demand: self.smooth.value() as f32,
            speed,
            cpus: cpus as f32,
            online,
            quota: quota.map(|quota| quota as f32),
            memory: Memory::of(&meminfo, &self.groups.limits()).unwrap_or_default(),
            pressure,
            utilisability,
        }
    }
}

/// CPUs that this process may use.
fn online() -> u32 {
    rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count()).max(1)
}

/// Speed of a thread that is alone, and how many of them there can be.
fn capacity(one: u32, online: u32, quota: Option<f64>) -> (u32, f64) {
    let allowed = quota.unwrap_or(f64::INFINITY).min(online.into());
    let speed = (f64::from(one) * allowed.min(1.0)).round() as u32;
    (speed.max(1), allowed.max(1.0))
}

/// The load that so many threads make.
fn load(demand: f64, speed: u32, cpus: f64) -> u32 {
    (demand * 100.0 * f64::from(STANDARD) / (f64::from(speed) * cpus)).round() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn faster_and_larger_nodes_show_less() {
        assert_eq!(load(1.0, 10_000, 1.0), 100);
        assert_eq!(load(4.0, 10_000, 2.0), 200);
        assert_eq!(load(1.0, 20_000, 1.0), 50);
        assert_eq!(load(0.0, 20_000, 1.0), 0);
    }

    #[test]
    fn a_quota_below_one_cpu_slows_and_above_it_counts() {
        assert_eq!(capacity(10_000, 2, None), (10_000, 2.0));
        assert_eq!(capacity(10_000, 2, Some(0.65)), (6_500, 1.0));
        assert_eq!(capacity(10_000, 2, Some(1.5)), (10_000, 1.5));
        assert_eq!(capacity(10_000, 2, Some(64.0)), (10_000, 2.0));
        assert_eq!(capacity(0, 1, Some(1e-9)), (1, 1.0));
    }

    #[test]
    fn this_machine_can_be_asked_and_its_sample_can_be_sent() {
        let mut sampler = Sampler::new(12_000);
        assert_eq!(sampler.sample().load, 0);
        std::thread::sleep(Duration::from_millis(50));
        let sample = sampler.sample();
        assert!(sample.memory.total >= sample.memory.free && sample.memory.free > 0);
        assert!(sample.speed <= 12_000 && sample.cpus >= 1.0 && sample.cpus <= sample.online as f32);
        let text = serde_json::to_string(&sample).unwrap();
        assert_eq!(serde_json::from_str::<Sample>(&text).unwrap(), sample);
        sampler.set_speed(24_000);
        assert!(sampler.sample().speed > sample.speed);
    }

    proptest! {
        /// What the two numbers multiply to is what there is to be had.
        #[test]
        fn capacity_is_what_the_quota_allows(one in 100u32..100_000, online in 1u32..512, quota in 0.01f64..600.0) {
            let (speed, cpus) = capacity(one, online, Some(quota));
            let there = f64::from(one) * quota.min(online.into());
            prop_assert!((f64::from(speed) * cpus / there - 1.0).abs() < 0.51 / (0.01 * 100.0));
            prop_assert!(cpus >= 1.0 && cpus <= f64::from(online));
            prop_assert!(speed <= one);
        }
    }
}
