//! A watch on the turns of a main loop, in test builds.
//!
//! A loop that serves others must not wait. In a build with debug assertions each step of a turn
//! that takes longer than [`MAX_STEP`] is reported in the loop's log and in `RUN/slow-turns`, where
//! the tests find it. The time for which the thread was runnable but had no CPU does not count. The
//! report has two times: the duration of the step, and the part of it for which the thread slept
//! without waiting for a tracee to stop. In that part it waited for something else, such as a file
//! system. In other builds nothing is measured.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest time that a step may take.
pub const MAX_STEP: Duration = Duration::from_millis(50);

/// The name of the file of reports in the run directory.
pub const REPORTS: &str = "slow-turns";

/// The watch of one loop. It belongs to the loop's thread.
#[derive(Debug)]
pub struct TurnWatch {
    name: &'static str,
    reports: PathBuf,
    /// `/proc/thread-self/schedstat`; none if nothing is measured.
    schedstat: Option<File>,
    /// Returns how long the thread has slept in all its waits for tracees to stop.
    time_slept: fn() -> Duration,
    began: Instant,
    before: Times,
}

/// Times of a thread since it was created.
#[derive(Debug, Clone, Copy, Default)]
struct Times {
    /// On a CPU.
    running: Duration,
    /// Runnable, without a CPU.
    waiting: Duration,
    /// Asleep in waits for tracees to stop.
    slept: Duration,
}

impl TurnWatch {
    /// The watch of the loop of this name in the calling thread. `time_slept` returns how long this
    /// thread has slept in all its waits for tracees to stop.
    #[must_use]
    pub fn new(name: &'static str, run_dir: &Path, time_slept: fn() -> Duration) -> Self {
        let schedstat = cfg!(debug_assertions).then(|| File::open("/proc/thread-self/schedstat").ok());
        let (reports, schedstat) = (run_dir.join(REPORTS), schedstat.flatten());
        let (began, before) = (Instant::now(), Times::default());
        let mut watch = Self { name, reports, schedstat, time_slept, began, before };
        watch.begin();
        watch
    }

    /// A turn begins: the loop has waited for events until now.
    pub fn begin(&mut self) {
        if self.schedstat.is_some() {
            self.before = self.times();
            self.began = Instant::now();
        }
    }

    /// A step of the turn has ended. Reports it and returns the time that it took, if that was too
    /// long.
    pub fn step(&mut self, what: &str) -> Option<Duration> {
        self.schedstat.as_ref()?;
        let now = Instant::now();
        let elapsed = now.duration_since(self.began);
        self.began = now;
        if elapsed <= MAX_STEP {
            return None;
        }
        let (before, times) = (self.before, self.times());
        self.before = times;
        let took = elapsed.saturating_sub(times.waiting.saturating_sub(before.waiting));
        if took <= MAX_STEP {
            return None;
        }
        let known = times.running.saturating_sub(before.running) + times.slept.saturating_sub(before.slept);
        let (pid, ms, blocked) =
            (std::process::id(), took.as_millis(), took.saturating_sub(known).as_millis());
        tracing::warn!(step = what, ?took, "a step of the main loop took long");
        let line = format!("{} {pid} {what} {ms} ms, blocked {blocked} ms\n", self.name);
        let reports = File::options().append(true).create(true).open(&self.reports);
        // The report serves tests only.
        let _unreported = reports.and_then(|mut file| file.write_all(line.as_bytes()));
        Some(took)
    }

    fn times(&self) -> Times {
        let mut text = [0; 96];
        let length = self.schedstat.as_ref().and_then(|file| file.read_at(&mut text, 0).ok());
        let text = std::str::from_utf8(&text[..length.unwrap_or(0)]).unwrap_or_default();
        let mut words = text.split_ascii_whitespace().map(|word| word.parse().unwrap_or(0));
        let mut next = || Duration::from_nanos(words.next().unwrap_or(0));
        Times { running: next(), waiting: next(), slept: (self.time_slept)() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_step_is_reported_with_its_name() {
        let folder = std::env::temp_dir().join(format!("tern-turns-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut watch = TurnWatch::new("loop", &folder, || Duration::ZERO);
        assert_eq!(watch.step("quick"), None);
        std::thread::sleep(2 * MAX_STEP);
        assert!(watch.step("slow").is_some_and(|took| took >= 2 * MAX_STEP));
        assert_eq!(watch.step("next"), None);
        let reports = std::fs::read_to_string(folder.join(REPORTS)).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(reports.starts_with("loop ") && reports.contains(" slow "), "{reports}");
        let blocked = reports.trim_end().rsplit(' ').nth(1).and_then(|ms| ms.parse::<u128>().ok());
        assert!(blocked.is_some_and(|ms| ms >= MAX_STEP.as_millis()), "{reports}");
        assert_eq!(reports.lines().count(), 1);
    }
}
