//! Measures the speed of one CPU of this machine with three kinds of work: integers, floating
//! point, memory.
//!
//! **The standard**, 10,000, is a core of an AMD EPYC of family 26 (2.6 GHz nominal), in a virtual
//! machine with no other load. The best times of the work on it are the constants of [`work::ALL`].
//!
//! Only this thread's CPU time counts, so that a quota or other programs do not slow the work down.
//! The best of many short rounds is taken, since other programs can disturb a core (its caches, its
//! SMT sibling). A core can also be faster than usual while its clock is boosted (by 12 % in
//! measurements), so the time is divided into parts, and the median of their best rounds is used.
//! All this takes about [`MEASURE_TIME`] of CPU time, once: the result is stored, and is valid for
//! the same processor and kernel.

mod work;

use crate::clock::thread_cpu_time;
use serde::{Deserialize, Serialize};
use std::fs;
use std::time::Duration;

/// The speed of a standard CPU.
pub const STANDARD_SPEED: u32 = 10_000;
/// CPU time of a whole measurement.
pub const MEASURE_TIME: Duration = Duration::from_millis(1000);
/// Number of parts into which a measurement is divided.
const PART_COUNT: usize = 7;
/// Version of the work: stored results of another version are not valid.
const WORK_VERSION: u32 = 1;

/// A measured speed, and where it was measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calibration {
    /// Speed of one CPU, without a quota; 10,000 is the standard.
    pub speed: u32,
    /// Version of the work that was measured.
    pub work: u32,
    /// The processor's name.
    pub processor: String,
    /// The kernel's release.
    pub kernel: String,
}

impl Calibration {
    /// Measures the speed. Uses up to [`MEASURE_TIME`] of CPU time on one CPU, and more wall time
    /// if other programs use it as well or a quota limits it.
    #[must_use]
    pub fn measure() -> Self {
        let mut work = work::Work::new();
        let mut speeds = [(); PART_COUNT].map(|()| speed(&best(&mut work, MEASURE_TIME / PART_COUNT as u32)));
        speeds.sort_unstable();
        let (processor, kernel) = machine();
        Self { speed: speeds[PART_COUNT / 2], work: WORK_VERSION, processor, kernel }
    }

    /// Whether the result is valid on this machine.
    #[must_use]
    pub fn is_valid_here(&self) -> bool {
        let (processor, kernel) = machine();
        self.work == WORK_VERSION && self.speed > 0 && self.processor == processor && self.kernel == kernel
    }
}

/// The shortest round of each kind within `limit` of CPU time.
fn best(work: &mut work::Work, limit: Duration) -> [Duration; 3] {
    let mut best = [Duration::MAX; 3];
    let began = thread_cpu_time();
    while thread_cpu_time().saturating_sub(began) < limit {
        for (kind, best) in work::ALL.iter().zip(&mut best) {
            let start = thread_cpu_time();
            (kind.round)(work);
            *best = (*best).min(thread_cpu_time().saturating_sub(start));
        }
    }
    best
}

/// The geometric mean, so that no kind of work outweighs the others.
fn speed(best: &[Duration; 3]) -> u32 {
    let ratios = work::ALL
        .iter()
        .zip(best)
        .map(|(kind, best)| kind.standard.as_secs_f64() / best.as_secs_f64().max(1e-9));
    let product: f64 = ratios.product();
    (product.cbrt() * f64::from(STANDARD_SPEED)).round().max(1.0) as u32
}

fn machine() -> (String, String) {
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    (processor(&processors), kernel)
}

const MAX_NAME_LEN: usize = 200;

/// The first processor's name, with the fields that distinguish processors of the same name.
fn processor(cpuinfo: &str) -> String {
    // Virtual machines use one name for many processors; other architectures name an implementer
    // and a part.
    const KEYS: [&str; 8] = [
        "model name",
        "cpu family",
        "model",
        "stepping",
        "cache size",
        "CPU implementer",
        "CPU part",
        "CPU revision",
    ];
    let first = cpuinfo.split("\n\n").next().unwrap_or_default();
    let values = first.lines().filter_map(|line| {
        let (key, value) = line.split_once(':')?;
        KEYS.contains(&key.trim()).then(|| value.trim())
    });
    values.collect::<Vec<_>>().join(" / ").chars().take(MAX_NAME_LEN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn standard_times_give_the_standard_speed() {
        let standard = work::ALL.map(|kind| kind.standard);
        assert_eq!(speed(&standard), STANDARD_SPEED);
        assert_eq!(speed(&standard.map(|time| time / 2)), 2 * STANDARD_SPEED);
        let slow_memory = [standard[0], standard[1], standard[2] * 8];
        assert_eq!(speed(&slow_memory), STANDARD_SPEED / 2);
        assert!(speed(&[Duration::ZERO; 3]) > 0 && speed(&[Duration::MAX; 3]) > 0);
    }

    /// Two consecutive measurements agree, whatever else this machine does, unless a neighbour uses
    /// the core's SMT sibling during only one of them.
    #[test]
    fn measurements_agree_and_are_valid_here() {
        let all: Vec<_> = (0..6).map(|_| Calibration::measure()).collect();
        let agree = |two: &[Calibration]| {
            let ratio = f64::from(two[0].speed) / f64::from(two[1].speed);
            (0.9..1.1).contains(&ratio)
        };
        assert!(all.windows(2).any(agree), "{all:?}");
        let first = all[0].clone();
        assert!(first.is_valid_here());
        let kept = serde_json::to_string(&first).unwrap();
        assert_eq!(serde_json::from_str::<Calibration>(&kept).unwrap(), first);
        let elsewhere = Calibration { kernel: "5.15".to_owned(), ..first.clone() };
        let before = Calibration { work: WORK_VERSION - 1, ..first };
        assert!(!elsewhere.is_valid_here() && !before.is_valid_here());
    }

    #[test]
    fn processor_names_are_parsed() {
        let text = "processor\t: 0\nmodel name\t: AMD EPYC\nmodel\t\t: 2\ncpu MHz\t: 2596.1\n\nprocessor\t: 1\nmodel\t: 3\n";
        assert_eq!(processor(text), "AMD EPYC / 2");
        assert_eq!(processor(""), "");
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_harmless(text in "(model name|model)?[ :a-zé\n]{0,300}") {
            prop_assert!(processor(&text).chars().count() <= MAX_NAME_LEN);
        }
    }
}
