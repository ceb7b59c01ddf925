//! Measures how many threads run or wait for a CPU on this node, on average since the last reading.
//!
//! For each thread the scheduler counts how long it has run and how long it has waited for a CPU,
//! including waiting for a quota (`schedstat`). The sum, per second, is what the thread would use
//! with a CPU of its own. Unlike instantaneous samples, the counters miss nothing between two
//! readings. Threads that sleep in state D do not count. In a container only the container's own
//! processes count, since its `/proc` has no others.
//!
//! **Ended threads** leave no counters behind. Their CPU time is the difference between the CPU
//! time of the whole node and the CPU time found in living threads. For each second of this time,
//! ended threads are assumed to have waited as long as the living threads. The kernel's own threads
//! are not read one by one but are included in that same difference.
//!
//! **Tern's own programs**, ternd and the shims, start short-lived threads when processes move. If
//! these were assumed to have waited like the others, the node would seem busier just when its load
//! is checked most often. So for these programs only run time counts.
//!
//! **Idle threads** cost as much to read as busy ones. When a reading takes too long, processes
//! that have not run for some readings are read in rotation. This bounds the cost, but a process
//! that wakes may be noticed up to [`MAX_ROTATION`] readings late.

use crate::clock::thread_cpu_time;
use crate::group::{Groups, in_container};
use crate::pressure::CpuTimes;
use crate::procdir::ProcDir;
use crate::task::{SchedStat, TICKS_PER_SECOND};
use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

/// CPU time budget for one reading; there is one a second.
const READING_BUDGET: Duration = Duration::from_millis(4);
/// Idle processes are read at least once in this many readings.
pub const MAX_ROTATION: u32 = 5;
/// A process that has not run for this many readings is idle.
const IDLE_READINGS: u8 = 3;
/// Names of Tern's own programs.
pub const TERN_PROGRAMS: [&str; 2] = ["ternd", "tern-shim"];
/// Upper bound of the time that a thread is assumed to wait for each second of CPU time.
const MAX_WAIT_RATIO: f64 = 16.0;
/// Fraction of a negative difference that is carried to the next reading.
const DEBT_KEPT: f64 = 0.8;
/// Fraction of the threads' recent times that is kept from one reading to the next.
const RECENT_KEPT: f64 = 0.5;

/// Measures the demand of this node.
#[derive(Debug)]
pub struct DemandMeter {
    proc: ProcDir,
    groups: Groups,
    container: bool,
    tracked: HashMap<i32, TrackedProcess>,
    before: Option<Before>,
    /// CPU time that was found in threads before the node's total included it, in seconds; 0 or
    /// negative.
    debt: f64,
    /// Recent run time, and recent run plus wait time, of all threads in seconds.
    recent: (f64, f64),
    /// Number of readings over which idle processes are spread now.
    rotation: u32,
    readings: u32,
}

#[derive(Debug)]
struct Before {
    at: Instant,
    used: Option<Duration>,
}

/// A process as of its last reading.
#[derive(Debug)]
struct TrackedProcess {
    inode: u64,
    is_kernel_thread: bool,
    /// For one of Tern's own programs: its CPU time, including that of its ended threads, in
    /// seconds.
    tern_run: Option<f64>,
    /// Its threads; empty before it is first read.
    threads: Vec<(i32, SchedStat)>,
    read: Instant,
    idle_readings: u8,
    /// The reading in which it last existed.
    last_reading: u32,
}

/// Counted since the last reading, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Counted {
    run: f64,
    /// Run time plus time waiting for a CPU.
    wanted: f64,
    /// Average number of threads that ran or waited.
    demand: f64,
    /// Run time of Tern's own programs, which the other fields do not include.
    tern_run: f64,
}

impl DemandMeter {
    /// For the node limited by these control groups.
    #[must_use]
    pub fn new(groups: Groups) -> Self {
        Self {
            proc: ProcDir::open(),
            groups,
            container: in_container(),
            tracked: HashMap::new(),
            before: None,
            debt: 0.0,
            recent: (0.0, 0.0),
            rotation: 1,
            readings: 0,
        }
    }

    /// The average number of threads that ran or waited for a CPU since the last reading. `None`
    /// the first time, and if no time has passed.
    pub fn read(&mut self) -> Option<f64> {
        let began = thread_cpu_time();
        let now = Instant::now();
        let used = self.used();
        let elapsed = self.before.as_ref().map(|before| now.duration_since(before.at));
        if elapsed.is_some_and(|elapsed| elapsed < Duration::from_millis(1)) {
            return None;
        }
        self.readings = self.readings.wrapping_add(1);
        let (mut found, mut tern_run) = (Counted::default(), 0.0);
        for (pid, inode) in self.proc.numeric_entries(".") {
            let one = self.read_process(pid, inode, now, elapsed);
            tern_run += one.tern_run;
            found.add(one);
        }
        let readings = self.readings;
        self.tracked.retain(|_, tracked| tracked.last_reading == readings);
        let before = self.before.replace(Before { at: now, used });
        self.adapt_rotation(thread_cpu_time().saturating_sub(began));
        let elapsed = elapsed?.as_secs_f64();
        let used =
            used.zip(before.and_then(|before| before.used)).and_then(|(now, then)| now.checked_sub(then));
        let used = used.map_or(found.run, |used| (used.as_secs_f64() - tern_run).max(0.0));
        // Averaged over several readings: at one reading few threads may be alive, and these may so
        // far only have waited.
        let (run, wanted) = self.recent;
        self.recent = (run * RECENT_KEPT + found.run, wanted * RECENT_KEPT + found.wanted);
        let (ended, debt) = split_ended(used - found.run, self.debt);
        self.debt = debt;
        Some(found.demand + (tern_run + ended * wait_ratio(self.recent)) / elapsed)
    }

    /// CPU time of everything on the node so far. `None` in a container without a group of its own;
    /// there, ended threads are not counted.
    fn used(&self) -> Option<Duration> {
        match self.container {
            true => self.groups.cpu_time_used(),
            false => Some(CpuTimes::parse(&fs::read_to_string("/proc/stat").ok()?)?.busy),
        }
    }

    fn read_process(&mut self, pid: i32, inode: u64, now: Instant, elapsed: Option<Duration>) -> Counted {
        let tracked = self.tracked.entry(pid).or_insert_with(|| TrackedProcess::new(now));
        tracked.last_reading = self.readings;
        if tracked.inode != inode {
            let stat = self.proc.stat(pid).map(|(stat, _)| stat);
            // Only a whole machine has the kernel's own threads in its /proc.
            tracked.is_kernel_thread =
                !self.container && stat.as_ref().is_some_and(|stat| stat.is_kernel_thread);
            // If the first reading finds a process, the process has used its CPU time before that
            // reading.
            let before = |ticks: u64| if elapsed.is_none() { seconds(ticks) } else { 0.0 };
            let tern_run = stat.filter(|stat| TERN_PROGRAMS.contains(&&*stat.command));
            tracked.tern_run = tern_run.map(|stat| before(stat.ticks));
            tracked.inode = inode;
            tracked.idle_readings = 0;
        }
        if let Some(before) = &mut tracked.tern_run {
            let Some((stat, _)) = self.proc.stat(pid) else { return Counted::default() };
            // A guest starts as a process of its shim, and changes its name afterwards.
            if TERN_PROGRAMS.contains(&&*stat.command) {
                let tern_run = (seconds(stat.ticks) - *before).max(0.0);
                *before = seconds(stat.ticks);
                return Counted { tern_run, ..Counted::default() };
            }
            tracked.tern_run = None;
        }
        let turn = self.readings.wrapping_add(pid.unsigned_abs()).is_multiple_of(self.rotation);
        if tracked.is_kernel_thread || (tracked.idle_readings >= IDLE_READINGS && !turn) {
            return Counted::default();
        }
        let span = match tracked.threads.is_empty() {
            // A new process was created since the last reading.
            true => elapsed.unwrap_or_default(),
            false => now.duration_since(tracked.read),
        };
        tracked.read = now;
        let fresh = tracked.update(pid, &self.proc);
        tracked.idle_readings = if fresh.is_some() { 0 } else { tracked.idle_readings.saturating_add(1) };
        // The very first reading only sets the starting values of the counters.
        fresh.filter(|_| elapsed.is_some()).map_or_else(Counted::default, |fresh| Counted::over(&fresh, span))
    }

    fn adapt_rotation(&mut self, cost: Duration) {
        if cost > READING_BUDGET {
            self.rotation = (self.rotation + 1).min(MAX_ROTATION);
        } else if self.rotation > 1 && cost * self.rotation < (self.rotation - 1) * READING_BUDGET * 3 / 4 {
            self.rotation -= 1;
        }
    }
}

impl TrackedProcess {
    fn new(now: Instant) -> Self {
        Self {
            inode: 0,
            is_kernel_thread: false,
            tern_run: None,
            threads: Vec::new(),
            read: now,
            idle_readings: 0,
            last_reading: 0,
        }
    }

    /// Reads its threads and returns what they have counted since the last update, in total. `None`
    /// if it has not run, or has ended.
    fn update(&mut self, pid: i32, proc: &ProcDir) -> Option<SchedStat> {
        let alone = match self.threads.as_slice() {
            [] => Some(SchedStat::default()),
            [(_, before)] => Some(*before),
            _ => None,
        };
        if let Some(before) = alone {
            let first = proc.schedstat(pid)?;
            // A process that has not run has created no threads.
            if first == before {
                return None;
            }
            if proc.threads(pid)? == 1 {
                let fresh = first.since(&before);
                self.threads = vec![(pid, first)];
                return Some(fresh);
            }
        }
        let threads = proc.thread_schedstats(pid);
        let fresh = threads.iter().map(|(tid, stat)| stat.since(&self.before(*tid)));
        let fresh = fresh.fold(SchedStat::default(), |sum, one| sum.plus(&one));
        self.threads = threads;
        (fresh != SchedStat::default()).then_some(fresh)
    }

    fn before(&self, tid: i32) -> SchedStat {
        let tracked = self.threads.iter().find(|(one, _)| *one == tid);
        tracked.map_or_else(SchedStat::default, |(_, stat)| *stat)
    }
}

impl Counted {
    /// Converts counters that grew within `span`.
    fn over(fresh: &SchedStat, span: Duration) -> Self {
        let run = fresh.run_ns as f64 / 1e9;
        let wanted = fresh.demand_ns() as f64 / 1e9;
        Self { run, wanted, demand: wanted / span.as_secs_f64().max(1e-3), tern_run: 0.0 }
    }

    fn add(&mut self, other: Self) {
        self.run += other.run;
        self.wanted += other.wanted;
        self.demand += other.demand;
    }
}

fn seconds(ticks: u64) -> f64 {
    ticks as f64 / TICKS_PER_SECOND as f64
}

/// Returns the CPU time of ended threads, in seconds, and the new debt. `more` is the CPU time used
/// on the node minus the CPU time found in threads.
///
/// Both counts cover the same time, but are not taken at the same instant, and an idle process may
/// be read later than its time is counted in the node's total. So time found in threads in excess
/// of the node's total is carried to the next reading as a debt, which decays.
fn split_ended(more: f64, debt: f64) -> (f64, f64) {
    let missing = more + debt;
    (missing.max(0.0), missing.clamp(-1.0, 0.0) * DEBT_KEPT)
}

/// Seconds of run plus wait time for each second of run time.
fn wait_ratio((run, wanted): (f64, f64)) -> f64 {
    if run > 1e-6 { (wanted / run).clamp(1.0, MAX_WAIT_RATIO) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_threads_count_with_the_wait_ratio_of_the_others() {
        assert_eq!(split_ended(0.5, 0.0), (0.5, 0.0));
        assert_eq!((wait_ratio((0.5, 1.0)), wait_ratio((0.0, 0.0)), wait_ratio((1.0, 0.9))), (2.0, 1.0, 1.0));
        assert_eq!(wait_ratio((1e-3, 1e9)), MAX_WAIT_RATIO);
        // Time counted in threads before the node's total includes it is not counted a second time.
        let (none, debt) = split_ended(-0.2, 0.0);
        assert!(none == 0.0 && (-0.2..-0.1).contains(&debt), "{debt}");
        assert!(split_ended(0.2, debt).0 < 0.05);
        // Whatever the counts, the debt is at most a second.
        assert!(split_ended(-1e9, -1e9).1 >= -1.0);
    }

    #[test]
    fn slow_readings_use_rotation_only_as_long_as_needed() {
        let mut demand = DemandMeter::new(Groups::default());
        for _ in 0..20 {
            demand.adapt_rotation(READING_BUDGET * 2);
        }
        assert_eq!(demand.rotation, MAX_ROTATION);
        demand.adapt_rotation(READING_BUDGET * 9 / 10);
        assert_eq!(demand.rotation, MAX_ROTATION, "with one turn less it would take too long");
        for _ in 0..20 {
            demand.adapt_rotation(READING_BUDGET / 10);
        }
        assert_eq!(demand.rotation, 1);
    }

    #[test]
    fn counters_are_converted_to_threads() {
        let second = Duration::from_secs(1);
        let fresh = SchedStat { run_ns: 500_000_000, wait_ns: 1_500_000_000, timeslices: 9 };
        assert_eq!(
            Counted::over(&fresh, second * 2),
            Counted { run: 0.5, wanted: 2.0, demand: 1.0, tern_run: 0.0 }
        );
    }

    /// The counters of a busy thread increase, and those of a sleeping one do not.
    #[test]
    fn only_runnable_threads_are_counted() {
        let proc = ProcDir::open();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        let mut tracked = TrackedProcess::new(Instant::now());
        assert!(tracked.update(pid, &proc).is_some(), "it was started");
        // It may not be asleep yet.
        let end = Instant::now() + Duration::from_secs(20);
        while tracked.update(pid, &proc).is_some() {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(20));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(tracked.update(pid, &proc), None);

        let own = std::process::id() as i32;
        let mut tracked = TrackedProcess::new(Instant::now());
        tracked.update(own, &proc).unwrap();
        let began = thread_cpu_time();
        while thread_cpu_time() - began < Duration::from_millis(50) {}
        let fresh = tracked.update(own, &proc).unwrap();
        assert!(fresh.run_ns >= 40_000_000, "{fresh:?}");
    }
}
