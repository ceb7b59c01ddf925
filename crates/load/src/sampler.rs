//! The sample of this node that is published to the cluster, taken once a second.

use crate::demand::DemandMeter;
use crate::group::Groups;
use crate::memory::NodeMemory;
use crate::moving_average::MovingAverage;
use crate::pressure::{Pressure, StallMeter};
use crate::speed::STANDARD_SPEED;
use serde::{Deserialize, Serialize};
use std::fs;
use std::time::{Duration, Instant};

/// A node's current state.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// 100 is one busy standard CPU; on a fast node, or one with many CPUs, the same threads are
    /// less load. Smoothed: it follows 80 % of a change within 2 s, and 91 % within 3 s.
    pub load: u32,
    /// Average number of threads that run or wait for a CPU; smoothed like the load.
    pub demand: f32,
    /// Speed that one thread gets here when it is alone; 10,000 is a standard CPU.
    pub speed: u32,
    /// How many threads of that speed it can run: at least 1, possibly fractional.
    pub cpus: f32,
    /// Number of CPUs that it may use.
    pub online: u32,
    /// CPU quota of the control groups, in CPUs, if there is one.
    pub quota: Option<f32>,
    /// Memory available to an arriving process.
    pub memory: NodeMemory,
    /// PSI pressure; `None` where the kernel does not report it.
    pub pressure: Option<Pressure>,
    /// Percentage of its time that it can use: 100 unless it pages.
    pub utilisability: u8,
}

/// Takes [`Sample`]s.
#[derive(Debug)]
pub struct Sampler {
    speed: u32,
    groups: Groups,
    demand: DemandMeter,
    stalls: StallMeter,
    smoothed_demand: MovingAverage,
    last_sampled: Option<Instant>,
}

/// Time constant of the load: a process that starts or ends is visible within 2 or 3 s, a time
/// slice of the scheduler is not.
const LOAD_TIME_CONSTANT: Duration = Duration::from_millis(1250);

impl Sampler {
    /// `speed` is that of one CPU of this machine, as measured by
    /// [`Calibration`](crate::Calibration) or set by the owner.
    #[must_use]
    pub fn new(speed: u32) -> Self {
        let groups = Groups::of_this_process();
        Self {
            speed,
            demand: DemandMeter::new(groups.clone()),
            stalls: StallMeter::new(groups.pressure_group()),
            groups,
            smoothed_demand: MovingAverage::new(LOAD_TIME_CONSTANT),
            last_sampled: None,
        }
    }

    /// Sets the speed of one CPU, from the next sample on.
    pub fn set_speed(&mut self, speed: u32) {
        self.speed = speed;
    }

    /// Samples the time since the last call; to be called once a second. The first sample has a
    /// load of 0.
    pub fn sample(&mut self) -> Sample {
        let now = Instant::now();
        let span = self.last_sampled.map_or(Duration::from_secs(1), |last| now.duration_since(last));
        if let Some(demand) = self.demand.read() {
            self.smoothed_demand.add(demand, span);
        }
        self.last_sampled = Some(now);
        let (pressure, utilisability) = self.stalls.read(span);
        let quota = self.groups.quota();
        let online = online();
        let (speed, cpus) = capacity(self.speed, online, quota);
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Sample {
            load: load(self.smoothed_demand.value(), speed, cpus),
            demand: self.smoothed_demand.value() as f32,
            speed,
            cpus: cpus as f32,
            online,
            quota: quota.map(|quota| quota as f32),
            memory: NodeMemory::of(&meminfo, &self.groups.limits()).unwrap_or_default(),
            pressure,
            utilisability,
        }
    }
}

/// Number of CPUs that this process may use.
fn online() -> u32 {
    rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count()).max(1)
}

/// Speed of a single thread, and how many such threads the node can run.
fn capacity(cpu_speed: u32, online: u32, quota: Option<f64>) -> (u32, f64) {
    let allowed = quota.unwrap_or(f64::INFINITY).min(online.into());
    let speed = (f64::from(cpu_speed) * allowed.min(1.0)).round() as u32;
    (speed.max(1), allowed.max(1.0))
}

/// The load caused by this many threads.
fn load(demand: f64, speed: u32, cpus: f64) -> u32 {
    (demand * 100.0 * f64::from(STANDARD_SPEED) / (f64::from(speed) * cpus)).round() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn faster_and_larger_nodes_have_less_load() {
        assert_eq!(load(1.0, 10_000, 1.0), 100);
        assert_eq!(load(4.0, 10_000, 2.0), 200);
        assert_eq!(load(1.0, 20_000, 1.0), 50);
        assert_eq!(load(0.0, 20_000, 1.0), 0);
    }

    #[test]
    fn quota_below_one_cpu_reduces_speed_and_above_it_cpus() {
        assert_eq!(capacity(10_000, 2, None), (10_000, 2.0));
        assert_eq!(capacity(10_000, 2, Some(0.65)), (6_500, 1.0));
        assert_eq!(capacity(10_000, 2, Some(1.5)), (10_000, 1.5));
        assert_eq!(capacity(10_000, 2, Some(64.0)), (10_000, 2.0));
        assert_eq!(capacity(0, 1, Some(1e-9)), (1, 1.0));
    }

    #[test]
    fn this_machine_can_be_sampled_and_its_sample_serialized() {
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
        /// Speed times CPUs is the capacity that the quota allows.
        #[test]
        fn capacity_is_limited_by_the_quota(one in 100u32..100_000, online in 1u32..512, quota in 0.01f64..600.0) {
            let (speed, cpus) = capacity(one, online, Some(quota));
            let there = f64::from(one) * quota.min(online.into());
            prop_assert!((f64::from(speed) * cpus / there - 1.0).abs() < 0.51 / (0.01 * 100.0));
            prop_assert!(cpus >= 1.0 && cpus <= f64::from(online));
            prop_assert!(speed <= one);
        }
    }
}
