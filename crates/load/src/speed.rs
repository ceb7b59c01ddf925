//! How fast one CPU of this machine is, by work of our own: whole numbers, floating point, memory.
//!
//! **The standard**, 10,000, is a core of the machine on which this was written: an AMD EPYC of family 26 (2.6 GHz
//! nominal), in a virtual machine, with nothing else running. The work's best times there are the constants of
//! [`work::ALL`].
//!
//! Only this thread's own CPU time counts, so that a quota or other programs do not slow the work down; and of many
//! short rounds the best, since others can disturb a core (its caches, its twin). What can help it is a clock that
//! is raised for a moment (12 % were seen): so the time is cut into parts, and the median of their bests is taken. All
//! this takes about [`MOST`] of CPU time, once: the result is kept, and holds for the same processor and kernel.

mod work;

use crate::clock::own_time;
use serde::{Deserialize, Serialize};
use std::fs;
use std::time::Duration;

/// The speed of a standard CPU.
pub const STANDARD: u32 = 10_000;
/// CPU time for all rounds together.
pub const MOST: Duration = Duration::from_millis(1000);
/// The time is cut into so many parts.
const PARTS: usize = 7;
/// Another number for another kind of work: what was kept no longer holds.
const WORK: u32 = 1;

/// A measured speed, and what it was measured on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calibration {
    /// Of one CPU, with no quota; 10,000 is the standard.
    pub speed: u32,
    /// Which work it was.
    pub work: u32,
    /// The processor's name.
    pub processor: String,
    /// The kernel's release.
    pub kernel: String,
}

impl Calibration {
    /// Measures. Keeps one CPU busy for up to [`MOST`], and longer by the clock where others want it as well or a quota
    /// holds it back.
    #[must_use]
    pub fn measure() -> Self {
        let mut work = work::Work::new();
        let mut speeds = [(); PARTS].map(|()| speed(&best(&mut work, MOST / PARTS as u32)));
        speeds.sort_unstable();
        let (processor, kernel) = machine();
        Self { speed: speeds[PARTS / 2], work: WORK, processor, kernel }
    }

    /// Whether it was measured on a machine like this.
    #[must_use]
    pub fn holds_here(&self) -> bool {
        let (processor, kernel) = machine();
        self.work == WORK && self.speed > 0 && self.processor == processor && self.kernel == kernel
    }
}

/// The shortest round of each kind, within so much CPU time.
fn best(work: &mut work::Work, most: Duration) -> [Duration; 3] {
    let mut best = [Duration::MAX; 3];
    let began = own_time();
    while own_time().saturating_sub(began) < most {
        for (kind, best) in work::ALL.iter().zip(&mut best) {
            let start = own_time();
            (kind.round)(work);
            *best = (*best).min(own_time().saturating_sub(start));
        }
    }
    best
}

/// The geometric mean: no kind of work outweighs the others.
fn speed(best: &[Duration; 3]) -> u32 {
    let ratios = work::ALL
        .iter()
        .zip(best)
        .map(|(kind, best)| kind.standard.as_secs_f64() / best.as_secs_f64().max(1e-9));
    let product: f64 = ratios.product();
    (product.cbrt() * f64::from(STANDARD)).round().max(1.0) as u32
}

fn machine() -> (String, String) {
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    (processor(&processors), kernel)
}

const LONGEST_NAME: usize = 200;

/// The first processor's name, with what tells apart those of the same name.
fn processor(cpuinfo: &str) -> String {
    // Virtual machines call many a processor the same; other architectures name an implementer and a part.
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
    values.collect::<Vec<_>>().join(" / ").chars().take(LONGEST_NAME).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_standard_is_the_standard() {
        let standard = work::ALL.map(|kind| kind.standard);
        assert_eq!(speed(&standard), STANDARD);
        assert_eq!(speed(&standard.map(|time| time / 2)), 2 * STANDARD);
        let slow_memory = [standard[0], standard[1], standard[2] * 8];
        assert_eq!(speed(&slow_memory), STANDARD / 2);
        assert!(speed(&[Duration::ZERO; 3]) > 0 && speed(&[Duration::MAX; 3]) > 0);
    }

    /// Two measurements agree, whatever else this machine does meanwhile: but not while a neighbour has the other half of a core for one of
    /// them only.
    #[test]
    fn it_is_the_same_twice_and_holds_here() {
        let all: Vec<_> = (0..6).map(|_| Calibration::measure()).collect();
        let agree = |two: &[Calibration]| {
            let ratio = f64::from(two[0].speed) / f64::from(two[1].speed);
            (0.9..1.1).contains(&ratio)
        };
        assert!(all.windows(2).any(agree), "{all:?}");
        let first = all[0].clone();
        assert!(first.holds_here());
        let kept = serde_json::to_string(&first).unwrap();
        assert_eq!(serde_json::from_str::<Calibration>(&kept).unwrap(), first);
        let elsewhere = Calibration { kernel: "5.15".to_owned(), ..first.clone() };
        let before = Calibration { work: WORK - 1, ..first };
        assert!(!elsewhere.holds_here() && !before.holds_here());
    }

    #[test]
    fn processors_have_names() {
        let text = "processor\t: 0\nmodel name\t: AMD EPYC\nmodel\t\t: 2\ncpu MHz\t: 2596.1\n\nprocessor\t: 1\nmodel\t: 3\n";
        assert_eq!(processor(text), "AMD EPYC / 2");
        assert_eq!(processor(""), "");
    }

    proptest! {
        #[test]
        fn no_text_can_harm(text in "(model name|model)?[ :a-zé\n]{0,300}") {
            prop_assert!(processor(&text).chars().count() <= LONGEST_NAME);
        }
    }
}
