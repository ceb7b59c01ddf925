//! Stalls as reported by the kernel (PSI), and the time lost to paging.

use crate::moving_average::MovingAverage;
use crate::task::{TICKS_PER_SECOND, number_after};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Percent of the last 10 s in which at least one task waited for the resource.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Pressure {
    /// For a CPU.
    pub cpu: f32,
    /// For memory.
    pub memory: f32,
    /// For I/O.
    pub io: f32,
}

/// One line of a pressure file.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Line {
    /// Percent of the last 10 s.
    avg10: f32,
    /// Total stall time since boot, in microseconds.
    total: u64,
}

fn parse_line(text: &str, kind: &str) -> Option<Line> {
    let words = text.lines().find_map(|line| line.strip_prefix(kind))?;
    let of = |key: &str| words.split_whitespace().find_map(|word| word.strip_prefix(key));
    let avg10: f32 = of("avg10=")?.parse().ok()?;
    Some(Line { avg10: avg10.is_finite().then_some(avg10)?, total: of("total=")?.parse().ok()? })
}

/// Time constant of the average of lost time, the same as for the kernel's `avg10`.
const PAGING_TIME_CONSTANT: Duration = Duration::from_secs(10);

/// Measures stalls and paging.
#[derive(Debug)]
pub struct StallMeter {
    /// The pressure files of CPU, memory and I/O; `None` where the kernel has no PSI.
    files: Option<[PathBuf; 3]>,
    before: Option<Paging>,
    lost: MovingAverage,
}

/// Counters from which lost time is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Paging {
    /// Time in which all non-idle tasks waited for memory.
    memory_stall: Duration,
    /// Pages read from swap.
    swapped_in: u64,
    /// Time in which CPUs were busy.
    busy: Duration,
    /// Time in which idle CPUs waited for a disk.
    waiting: Duration,
}

impl StallMeter {
    /// Uses the control group's pressure files if it has them, otherwise the machine's.
    #[must_use]
    pub fn new(group: Option<&Path>) -> Self {
        let of_group =
            group.map(|at| ["cpu", "memory", "io"].map(|kind| at.join(format!("{kind}.pressure"))));
        let of_machine = ["cpu", "memory", "io"].map(|kind| Path::new("/proc/pressure").join(kind));
        let files = [of_group, Some(of_machine)]
            .into_iter()
            .flatten()
            .find(|files| files.iter().all(|file| fs::read_to_string(file).is_ok()));
        Self { files, before: None, lost: MovingAverage::new(PAGING_TIME_CONSTANT) }
    }

    /// Reads what was counted in the `span` since the last call: the pressure, if available, and
    /// the percentage of time that the node can use, which is 100 unless it pages.
    pub fn read(&mut self, span: Duration) -> (Option<Pressure>, u8) {
        let texts = self.files.as_ref().and_then(|files| {
            let mut texts = files.iter().map(|file| fs::read_to_string(file).ok());
            Some([texts.next()??, texts.next()??, texts.next()??])
        });
        let (pressure, now) = match texts {
            Some(texts) => {
                let stall_us = parse_line(&texts[1], "full ").map_or(0, |full| full.total);
                (
                    pressure(&texts),
                    Paging { memory_stall: Duration::from_micros(stall_us), ..Paging::default() },
                )
            }
            None => (None, paging_without_psi()),
        };
        let lost = self.before.map_or(0.0, |before| lost_fraction(&before, &now, span));
        self.before = Some(now);
        (pressure, ((1.0 - self.lost.add(lost, span)) * 100.0).round().clamp(0.0, 100.0) as u8)
    }
}

fn pressure(texts: &[String; 3]) -> Option<Pressure> {
    let some = |at: usize| Some(parse_line(texts.get(at)?, "some ")?.avg10);
    Some(Pressure { cpu: some(0)?, memory: some(1)?, io: some(2)? })
}

/// The machine's counters, for kernels without PSI.
fn paging_without_psi() -> Paging {
    let read = |file| fs::read_to_string(file).unwrap_or_default();
    Paging::of(&read("/proc/vmstat"), &read("/proc/stat"))
}

impl Paging {
    fn of(vmstat: &str, stat: &str) -> Self {
        let times = CpuTimes::parse(stat).unwrap_or_default();
        let swapped_in = number_after(vmstat, "pswpin ").unwrap_or(0);
        Self { memory_stall: Duration::ZERO, swapped_in, busy: times.busy, waiting: times.waiting }
    }
}

/// The fraction of time in which tasks could only wait for pages. Without PSI: if pages were read
/// from swap, the fraction of the CPUs' busy and waiting time that was spent waiting for a disk;
/// otherwise 0.
fn lost_fraction(before: &Paging, now: &Paging, span: Duration) -> f64 {
    let span = span.as_secs_f64().max(1e-3);
    let stalled = now.memory_stall.saturating_sub(before.memory_stall).as_secs_f64() / span;
    let busy = now.busy.saturating_sub(before.busy).as_secs_f64();
    let waiting = now.waiting.saturating_sub(before.waiting).as_secs_f64();
    let paged = now.swapped_in > before.swapped_in && waiting > 0.0;
    stalled.max(if paged { waiting / (busy + waiting) } else { 0.0 }).clamp(0.0, 1.0)
}

/// The machine's CPU time, from the first line of `/proc/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CpuTimes {
    /// Time of processes: user, nice and system.
    pub(crate) busy: Duration,
    /// Idle time with a disk request pending.
    pub(crate) waiting: Duration,
}

impl CpuTimes {
    pub(crate) fn parse(stat: &str) -> Option<Self> {
        let mut ticks = stat.strip_prefix("cpu ")?.lines().next()?.split_whitespace().map(str::parse::<u64>);
        let mut next = || ticks.next()?.ok();
        let (user, nice, system, _idle, waiting) = (next()?, next()?, next()?, next()?, next()?);
        let time = |ticks: u64| Duration::from_millis(ticks.saturating_mul(1000 / TICKS_PER_SECOND));
        Some(Self { busy: time(user.saturating_add(nice).saturating_add(system)), waiting: time(waiting) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CPU: &str = "some avg10=39.26 avg60=26.48 avg300=17.89 total=8983332117\n\
                       full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
    const MEMORY: &str = "some avg10=0.02 avg60=0.34 avg300=0.30 total=197034873\n\
                          full avg10=0.01 avg60=0.18 avg300=0.13 total=98703303\n";

    #[test]
    fn kernel_lines_are_parsed() {
        let all = pressure(&[CPU.to_owned(), MEMORY.to_owned(), MEMORY.to_owned()]).unwrap();
        assert_eq!(all, Pressure { cpu: 39.26, memory: 0.02, io: 0.02 });
        assert_eq!(parse_line(MEMORY, "full ").unwrap().total, 98_703_303);
        assert_eq!(parse_line("some avg10=NaN total=1", "some "), None);
        // Kernels before 5.13 have no "full" line for CPUs.
        assert_eq!(parse_line("some avg10=1.00 avg60=0.00 avg300=0.00 total=5\n", "full "), None);
        let times =
            CpuTimes::parse("cpu  1376556 359191 794650 2491997 15939 0 60730 18449 0 0\ncpu0 1\n").unwrap();
        assert_eq!(times.busy, Duration::from_millis((1_376_556 + 359_191 + 794_650) * 10));
        assert_eq!(times.waiting, Duration::from_millis(159_390));
    }

    #[test]
    fn only_paging_reduces_usable_time() {
        let second = Duration::from_secs(1);
        let rest = Paging::default();
        let stalled = Paging { memory_stall: second / 4, ..rest };
        assert_eq!(lost_fraction(&rest, &stalled, second), 0.25);
        let disk = Paging { busy: second, waiting: second * 3, ..rest };
        assert_eq!(lost_fraction(&rest, &disk, second), 0.0, "an ordinary disk is no paging");
        let swap = Paging { swapped_in: 1, ..disk };
        assert_eq!(lost_fraction(&rest, &swap, second), 0.75);
        assert_eq!(lost_fraction(&swap, &rest, second), 0.0, "counters that fell");
        assert_eq!(Paging::of("nr_free 1\npswpin 7\npswpout 9\n", "cpu  1 1 1 1 100 0\n").swapped_in, 7);
    }

    #[test]
    fn this_machine_can_be_read() {
        let mut stalls = StallMeter::new(Some(Path::new("/nowhere")));
        assert_eq!(stalls.read(Duration::from_secs(1)).1, 100, "nothing is known yet");
        let (pressure, usable) = stalls.read(Duration::from_secs(1));
        assert_eq!(pressure.is_some(), Path::new("/proc/pressure/io").exists());
        assert!(usable <= 100);
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_harmless(text in "(some |full |cpu )?[a-z=0-9. \n]{0,120}") {
            let _ = (parse_line(&text, "some "), parse_line(&text, "full "), CpuTimes::parse(&text));
        }
    }
}
