//! CPU time: what home's kernel has counted for the deputy, plus what the guest has used while
//! away.
//!
//! Home answers `times`, `getrusage` and the CPU clocks for the deputy: the time before the process
//! left, and the cost of its calls at home. The shim adds the time that this node's kernel has
//! counted, to the nanosecond, and the sum of the earlier epochs away. None of these three terms
//! decreases while the process is away, so their sum does not decrease either.

use std::time::{Duration, Instant};
use tern_migrate::{CpuTime, usage};
use tern_syscall::{ByteBuf, Outcome};
use tern_tracee::Result;
use tern_tracee::cpu::{CpuCounters, cpu_counters, cpu_total_ns, thread_cpu_counters};

/// Measures the CPU time of a guest, or of one of its threads.
#[derive(Debug)]
pub(crate) struct CpuMeter {
    process: i32,
    /// The thread; none for all threads, including those that have ended.
    thread: Option<i32>,
    /// The time used while away in earlier epochs.
    earlier: CpuTime,
    /// The time counted when this epoch began: the shim's work, not the program's.
    baseline: CpuCounters,
    /// The time that was reported last for this epoch.
    reported: CpuTime,
}

impl CpuMeter {
    /// Begins to count for a guest that used `earlier` while it was away in earlier epochs.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn for_process(host: i32, earlier: CpuTime) -> Result<Self> {
        Ok(Self {
            process: host,
            thread: None,
            earlier,
            baseline: cpu_counters(host)?,
            reported: CpuTime::default(),
        })
    }

    /// Begins to count for a thread that used `earlier` while it was away in earlier epochs.
    ///
    /// # Errors
    /// If it is gone.
    pub(crate) fn for_thread(process: i32, thread: i32, earlier: CpuTime) -> Result<Self> {
        let baseline = thread_cpu_counters(process, thread)?;
        Ok(Self { process, thread: Some(thread), earlier, baseline, reported: CpuTime::default() })
    }

    /// The time used while away so far. If the guest is gone, the time at the last measurement.
    pub(crate) fn used(&mut self) -> CpuTime {
        let now = match self.thread {
            Some(thread) => thread_cpu_counters(self.process, thread),
            None => cpu_counters(self.process),
        };
        if let Ok(now) = now {
            let less = |now: u64, baseline: u64| now.saturating_sub(baseline);
            let epoch = CpuCounters {
                total: less(now.total, self.baseline.total),
                user: less(now.user, self.baseline.user),
                system: less(now.system, self.baseline.system),
            };
            self.reported = split_by_samples(epoch, self.reported);
        }
        self.earlier.and(self.reported)
    }

    /// Like [`used`](Self::used), for callers that need only the sum of user and system time: all
    /// time of this epoch counts as user time.
    pub(crate) fn total_used(&mut self) -> CpuTime {
        let now = if self.thread.is_some() { None } else { cpu_total_ns(self.process).ok() };
        let Some(now) = now else { return self.used() };
        let user = now.saturating_sub(self.baseline.total).max(self.reported.total());
        self.earlier.and(CpuTime { user, system: 0 })
    }
}

impl CpuMeter {
    /// The time used by the process while away, minus what this node's kernel has counted, in
    /// nanoseconds. It may be negative.
    #[must_use]
    pub(crate) fn cpu_time_not_counted_here(&self) -> i64 {
        let signed = |time: u64| i64::try_from(time).unwrap_or(i64::MAX);
        signed(self.earlier.total()) - signed(self.baseline.total)
    }
}

/// The object whose CPU time a call asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CpuTimeOf {
    /// The calling process.
    Process,
    /// The calling thread.
    Caller,
    /// The thread with this tid in the caller's namespace, if its process has one.
    Thread(i32),
}

/// The object whose CPU time `times`, `getrusage` or `clock_gettime` with these arguments asks for;
/// none if it is another process's.
#[must_use]
pub(crate) fn call_target(nr: u32, args: &[u64; 6], own_pid: i32) -> Option<CpuTimeOf> {
    match (i64::from(nr), args[0] as i32) {
        (libc::SYS_times, _) | (libc::SYS_getrusage, libc::RUSAGE_SELF) => Some(CpuTimeOf::Process),
        (libc::SYS_getrusage, libc::RUSAGE_THREAD) => Some(CpuTimeOf::Caller),
        (libc::SYS_clock_gettime, clock) => clock_target(clock, own_pid),
        _ => None,
    }
}

/// The object whose CPU time a clock counts; none if another process's, or if it counts no CPU
/// time.
#[must_use]
pub(crate) fn clock_target(clock: i32, own_pid: i32) -> Option<CpuTimeOf> {
    /// The bit in a clock id that selects a thread.
    const THREAD: i32 = 4;
    match clock {
        libc::CLOCK_PROCESS_CPUTIME_ID => return Some(CpuTimeOf::Process),
        libc::CLOCK_THREAD_CPUTIME_ID => return Some(CpuTimeOf::Caller),
        // The last two bits select the time; if both are set it is a device's clock.
        _ if clock >= 0 || clock & 3 == 3 => return None,
        _ => {}
    }
    // The inverted pid or tid, and three bits.
    match (clock & THREAD != 0, !(clock >> 3)) {
        (true, 0) => Some(CpuTimeOf::Caller),
        (true, tid) => Some(CpuTimeOf::Thread(tid)),
        (false, pid) if pid == 0 || pid == own_pid => Some(CpuTimeOf::Process),
        (false, _) => None,
    }
}

/// Divides the exact time in the ratio of the samples, as the kernel does, and such that neither
/// part decreases below what was reported before.
fn split_by_samples(counted: CpuCounters, reported: CpuTime) -> CpuTime {
    let total = counted.total.max(reported.total());
    let samples = u128::from(counted.user) + u128::from(counted.system);
    let share = (u128::from(total) * u128::from(counted.system)).checked_div(samples).unwrap_or(0);
    let max_system = total - reported.user;
    let system = u64::try_from(share).unwrap_or(max_system).clamp(reported.system, max_system);
    CpuTime { user: total - system, system }
}

/// Adds the time used while away to home's result of a call about CPU time (see [`call_target`]).
pub(crate) fn add_to_result(nr: u32, args: &[u64; 6], used: CpuTime, outcome: &mut Outcome) {
    let Some(out) = outcome.outs.first_mut() else { return };
    match i64::from(nr) {
        // Home has added the times of children, which follow.
        libc::SYS_times => usage::add_tms(out, 0, used),
        libc::SYS_getrusage => usage::add_rusage(out, used),
        libc::SYS_clock_gettime => {
            let clock = args[0] as i32;
            // CPU clocks have three types: PROF (user and system time), VIRT (user time) and SCHED
            // (the exact sum).
            let part = if clock < 0 && clock & 3 == 1 { used.user } else { used.total() };
            usage::add_timespec(out, part);
        }
        _ => {}
    }
}

/// The cache of home's last report of a process's CPU time, valid as long as home makes only
/// internal calls for the process, and for a quarter of a second at most. Internal calls cost the
/// deputy little CPU time, and the term limits the error. Programs often ask repeatedly (`clock`).
#[derive(Debug, Default)]
pub(crate) struct HomeCpuTime(Option<(ByteBuf, Instant)>);

impl HomeCpuTime {
    /// For how long it is valid.
    const TTL: Duration = Duration::from_millis(250);

    /// Stores home's result for a call that was sent at `sent_at`, if it is about this time.
    pub(crate) fn store(&mut self, nr: u32, args: &[u64; 6], outcome: &Outcome, sent_at: Instant) {
        if Self::is_asked_for(nr, args) && outcome.ret == 0 {
            self.0 = outcome.outs.first().map(|time| (time.clone(), sent_at));
        }
    }

    /// Drops it: home makes another call, which uses CPU time.
    pub(crate) fn invalidate(&mut self) {
        self.0 = None;
    }

    /// The cached result of a call, if it asks for this time. The caller adds the time used while
    /// away.
    #[must_use]
    pub(crate) fn reply(&self, nr: u32, args: &[u64; 6]) -> Option<Outcome> {
        let (time, _) = self.0.as_ref().filter(|(_, sent_at)| sent_at.elapsed() < Self::TTL)?;
        Self::is_asked_for(nr, args).then(|| Outcome { ret: 0, outs: vec![time.clone()] })
    }

    /// The cached time in nanoseconds, and until when it is valid.
    #[must_use]
    pub(crate) fn nanoseconds(&self) -> Option<(u64, Instant)> {
        let (time, sent_at) = self.0.as_ref()?;
        let word =
            |at: usize| time.get(at..at + 8).and_then(|word| Some(u64::from_le_bytes(word.try_into().ok()?)));
        Some((word(0)?.checked_mul(1_000_000_000)?.checked_add(word(8)?)?, *sent_at + Self::TTL))
    }

    fn is_asked_for(nr: u32, args: &[u64; 6]) -> bool {
        i64::from(nr) == libc::SYS_clock_gettime && args[0] as i32 == libc::CLOCK_PROCESS_CPUTIME_ID
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn cpu_time_never_decreases() {
        let reported = CpuTime { user: 90, system: 10 };
        // The samples now show a larger share of system time.
        let now = split_by_samples(CpuCounters { total: 104, user: 1, system: 3 }, reported);
        assert_eq!(now, CpuTime { user: 90, system: 14 });
        let now = split_by_samples(CpuCounters { total: 200, user: 1, system: 0 }, now);
        assert_eq!(now, CpuTime { user: 186, system: 14 });
        assert_eq!(
            split_by_samples(CpuCounters { total: 5, user: 9, system: 9 }, now),
            now,
            "inconsistent samples"
        );
        assert_eq!(
            split_by_samples(CpuCounters { total: 7, ..CpuCounters::default() }, CpuTime::default()).user,
            7
        );
        let huge = CpuCounters { total: u64::MAX, user: u64::MAX, system: u64::MAX };
        assert_eq!(split_by_samples(huge, reported).total(), u64::MAX);
    }

    fn answered(nr: i64, first: u64, words: &[u64]) -> Vec<u64> {
        let used = CpuTime { user: 2 * SECOND + 700_000_000, system: 300_000_000 };
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let mut outcome = Outcome { ret: 0, outs: vec![ByteBuf::from(bytes)] };
        let args = [first, 0, 0, 0, 0, 0];
        if call_target(nr as u32, &args, 4711).is_some() {
            add_to_result(nr as u32, &args, used, &mut outcome);
        }
        outcome.outs[0].chunks(8).map(|w| u64::from_le_bytes(w.try_into().unwrap())).collect()
    }

    #[test]
    fn results_include_time_used_away() {
        assert_eq!(answered(libc::SYS_times, 1, &[10, 20, 30, 40]), [280, 50, 30, 40]);
        let usage = [1, 400_000, 0, 900_000, 77];
        assert_eq!(answered(libc::SYS_getrusage, 0, &usage), [4, 100_000, 1, 200_000, 77]);
        let children = libc::RUSAGE_CHILDREN as u64;
        assert_eq!(answered(libc::SYS_getrusage, children, &usage), usage);
        assert_eq!(answered(libc::SYS_clock_gettime, 2, &[1, 999_999_999]), [4, 999_999_999]);
        assert_eq!(answered(libc::SYS_clock_gettime, 3, &[0, 1]), [3, 1]);
        assert_eq!(answered(libc::SYS_times, 1, &[10]), [280], "a short result");
    }

    #[test]
    fn home_cpu_time_is_valid_until_the_next_call() {
        let nr = libc::SYS_clock_gettime as u32;
        let (process, caller) = ([2, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0]);
        let reported = Outcome { ret: 0, outs: vec![ByteBuf::from(vec![7; 16])] };
        let mut home = HomeCpuTime::default();
        home.store(nr, &caller, &reported, Instant::now());
        assert_eq!(home.reply(nr, &process), None, "that was the time of a thread");
        home.store(nr, &process, &reported, Instant::now());
        assert_eq!(home.reply(nr, &process), Some(reported.clone()));
        assert_eq!(home.reply(nr, &caller), None);
        home.invalidate();
        assert_eq!(home.reply(nr, &process), None);
        home.store(nr, &process, &reported, Instant::now() - HomeCpuTime::TTL);
        assert_eq!(home.reply(nr, &process), None, "it has expired");
    }

    #[test]
    fn clocks_of_other_processes_are_not_changed() {
        let clock = |pid: i32, kind: i32| clock_target((!pid << 3) | kind, 4711);
        assert_eq!(clock(4711, 2), Some(CpuTimeOf::Process));
        assert_eq!(clock(0, 2), Some(CpuTimeOf::Process));
        assert_eq!(clock(4711, 1), Some(CpuTimeOf::Process));
        assert_eq!(clock(4712, 2), None);
        assert_eq!(clock(4711, 3), None, "a device");
        assert_eq!(clock(0, 6), Some(CpuTimeOf::Caller));
        assert_eq!(clock(4712, 6), Some(CpuTimeOf::Thread(4712)));
        assert_eq!(clock(4712, 7), None, "a device");
        assert_eq!(clock_target(libc::CLOCK_MONOTONIC, 4711), None);
        let usage = |of: i32| call_target(libc::SYS_getrusage as u32, &[of as u64, 0, 0, 0, 0, 0], 4711);
        assert_eq!(usage(libc::RUSAGE_THREAD), Some(CpuTimeOf::Caller));
        assert_eq!(usage(libc::RUSAGE_CHILDREN), None);
    }

    #[test]
    fn user_time_clock_excludes_system_time() {
        let used = CpuTime { user: 5, system: 2 };
        let grown = |kind: i32| {
            let mut outcome = Outcome { ret: 0, outs: vec![ByteBuf::from(vec![0; 16])] };
            let clock = (!4711 << 3) | kind;
            add_to_result(libc::SYS_clock_gettime as u32, &[clock as u64, 0, 0, 0, 0, 0], used, &mut outcome);
            outcome.outs[0][8]
        };
        assert_eq!([0, 1, 2, 5, 6].map(grown), [7, 5, 7, 5, 7]);
    }

    #[test]
    fn thread_time_is_part_of_its_process() {
        let me = std::process::id() as i32;
        let mut process = CpuMeter::for_process(me, CpuTime::default()).unwrap();
        let earlier = CpuTime { user: SECOND, system: 0 };
        let used = std::thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            let mut own = CpuMeter::for_thread(me, tid, earlier).unwrap();
            let mut sum = 0u64;
            while own.used().total() < SECOND + 20_000_000 {
                sum = (0..10_000).fold(sum, std::hint::black_box(u64::wrapping_add));
            }
            own.used().total() - SECOND
        });
        let used = used.join().unwrap();
        assert!(process.used().total() >= used, "an ended thread counts");
    }
}
