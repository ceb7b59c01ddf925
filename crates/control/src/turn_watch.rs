//! A watch on the turns of a main loop, in test builds.
//!
//! A loop that serves others must not wait. In a build with debug assertions each step of a turn
//! that takes longer than [`MAX_STEP`] is reported in the loop's log and in `RUN/slow-turns`, where
//! the tests find it. The time for which the thread was runnable but had no CPU does not count. The
//! report has two times: the duration of the step, and the part of it for which the thread slept
//! without waiting for a tracee to stop. In that part it waited for something else, such as a file
//! system. A second thread looks where the loop's thread sleeps, and the report ends with that
//! place in the kernel. In other builds nothing is measured.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The longest time that a step may take.
pub const MAX_STEP: Duration = Duration::from_millis(50);

/// A loop's thread that has been in one step for two of these is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

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
    place: Arc<Place>,
}

/// Where the thread of a loop sleeps.
#[derive(Debug, Default)]
struct Place {
    /// Number of steps so far.
    steps: AtomicU32,
    /// The kernel's functions that it was last seen in, innermost first, and the step.
    seen: Mutex<(u32, String)>,
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
        let place = Arc::new(Place::default());
        if schedstat.is_some() {
            // Without the thread the reports have no place.
            let weak = Arc::downgrade(&place);
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            let _none = std::thread::Builder::new().name("turn-watch".into()).spawn(move || look(tid, &weak));
        }
        let mut watch = Self { name, reports, schedstat, time_slept, began, before, place };
        watch.begin();
        watch
    }

    /// A turn begins: the loop has waited for events until now.
    pub fn begin(&mut self) {
        if self.schedstat.is_some() {
            self.before = self.times();
            self.began = Instant::now();
            self.place.steps.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A step of the turn has ended. Reports it and returns the time that it took, if that was too
    /// long.
    pub fn step(&mut self, what: &str) -> Option<Duration> {
        self.schedstat.as_ref()?;
        let now = Instant::now();
        let elapsed = now.duration_since(self.began);
        self.began = now;
        let step = self.place.steps.fetch_add(1, Ordering::Relaxed);
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
        let place = self.place.of(step).map(|place| format!(" at {place}")).unwrap_or_default();
        let line = format!("{} {pid} {what} {ms} ms, blocked {blocked} ms{place}\n", self.name);
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

impl Place {
    fn of(&self, step: u32) -> Option<String> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        (seen.0 == step && !seen.1.is_empty()).then(|| seen.1.clone())
    }
}

/// Looks where this thread sleeps when it has been in one step for long, until its loop has ended.
fn look(tid: i32, place: &Weak<Place>) {
    let mut last = 0;
    loop {
        std::thread::sleep(LOOK_INTERVAL);
        let Some(place) = place.upgrade() else { return };
        let step = place.steps.load(Ordering::Relaxed);
        if std::mem::replace(&mut last, step) == step {
            // The stack takes privileges, the innermost function does not.
            let read = |file: &str| std::fs::read_to_string(format!("/proc/self/task/{tid}/{file}"));
            let text = read("stack").or_else(|_| read("wchan")).unwrap_or_default();
            let names = text.lines().filter_map(|line| line.rsplit("] ").next()?.split('+').next());
            let names: Vec<&str> = names.filter(|name| *name != "0").take(8).collect();
            *place.seen.lock().unwrap_or_else(PoisonError::into_inner) = (step, names.join(" < "));
        }
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
        // On a busy machine the other thread may get its CPU late.
        let (begun, step) = (Instant::now(), watch.place.steps.load(Ordering::Relaxed));
        while begun.elapsed() < 2 * MAX_STEP || watch.place.of(step).is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60), "its place is not found");
            std::thread::sleep(LOOK_INTERVAL);
        }
        assert!(watch.step("slow").is_some_and(|took| took >= 2 * MAX_STEP));
        assert_eq!(watch.step("next"), None);
        let reports = std::fs::read_to_string(folder.join(REPORTS)).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(reports.starts_with("loop ") && reports.contains(" slow "), "{reports}");
        let blocked = reports.split_once(", blocked ").and_then(|(_, rest)| rest.split_once(" ms"));
        let blocked = blocked.and_then(|(ms, _)| ms.parse::<u128>().ok());
        assert!(blocked.is_some_and(|ms| ms >= MAX_STEP.as_millis()), "{reports}");
        assert!(reports.contains(" at "), "{reports}");
        assert_eq!(reports.lines().count(), 1);
    }
}
