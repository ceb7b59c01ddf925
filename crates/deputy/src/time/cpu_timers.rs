//! The CPU-time timers and limits of one process that is away, and the thresholds that its guest is
//! to report.

use crate::time::timers::{CpuClock, Timer, TimerId, Timers};
use crate::time::usage::AwayUsage;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_syscall::{Call, Outcome};
use tern_tracee::timers;

const SECOND: u64 = 1_000_000_000;

/// A timer is not checked more often than the kernel does it.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(4);

/// Maximum age of cached limits.
const MAX_LIMITS_AGE: Duration = Duration::from_secs(1);

/// Which clocks are checked.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ClockScope {
    All,
    Thread(HomePid),
}

impl ClockScope {
    fn includes(self, thread: Option<HomePid>) -> bool {
        match self {
            Self::All => true,
            Self::Thread(tid) => thread == Some(tid),
        }
    }
}

/// A signal to be raised.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DueSignal {
    Timer(i32),
    Signal(i32),
}

/// CPU-time thresholds, of the process (key none) and of threads.
type Thresholds = BTreeMap<Option<HomePid>, u64>;

/// The timers and limits of a process that count CPU time, while it is away.
#[derive(Debug)]
pub(crate) struct CpuTimers {
    table: Timers,
    /// The thresholds that its guest was asked to report.
    thresholds: Thresholds,
    /// Its soft and hard limit on CPU time, and when they were read.
    limits: Option<([Option<u64>; 2], Instant)>,
    /// When its timers were last checked.
    checked_at: Instant,
    /// Expired timers and limits that are to be fired as soon as a thread can be stopped.
    unfired: Vec<DueSignal>,
    /// POSIX timers whose signals may have been lost when they were taken from the kernel.
    to_refire: Vec<i32>,
}

impl CpuTimers {
    pub(crate) fn new() -> Self {
        Self {
            table: Timers::default(),
            thresholds: Thresholds::new(),
            limits: None,
            checked_at: Instant::now(),
            unfired: Vec::new(),
            to_refire: Vec::new(),
        }
    }

    /// Those of a new child: it inherits the limits only.
    pub(crate) fn for_child(&self) -> Self {
        Self { limits: self.limits, ..Self::new() }
    }

    /// Whether it has no timers, and nothing that is to be fired.
    pub(crate) fn is_empty(&self) -> bool {
        self.table.is_empty() && self.unfired.is_empty()
    }

    /// Whether it has timers and they were not checked just now.
    pub(super) fn need_check(&self) -> bool {
        !self.is_empty() && self.checked_at.elapsed() > MIN_CHECK_INTERVAL
    }

    /// Whether nothing can expire.
    pub(super) fn are_unused(&mut self, pid: HomePid) -> bool {
        self.is_empty() && self.thresholds.is_empty() && self.limits(pid) == [None; 2]
    }

    pub(super) fn add(&mut self, timer_id: TimerId, timer: Timer) {
        self.table.insert(timer_id, timer);
    }

    pub(super) fn remove(&mut self, timer_id: TimerId) {
        self.table.remove(timer_id);
    }

    /// Removes all timers: the kernel has them again.
    pub(super) fn take(&mut self) -> BTreeMap<TimerId, Timer> {
        self.thresholds.clear();
        self.to_refire.clear();
        self.table.take()
    }

    /// The signal of this timer was pending when the timer was taken from the kernel.
    pub(super) fn was_pending(&mut self, id: i32) {
        if self.table.set_pending(id) {
            self.to_refire.push(id);
        }
    }

    /// The process has executed another program.
    pub(crate) fn handle_exec(&mut self) {
        self.table.handle_exec();
        self.thresholds.clear();
        self.to_refire.clear();
        self.unfired.retain(|due| matches!(due, DueSignal::Signal(_)));
    }

    pub(crate) fn thread_exited(&mut self, tid: HomePid) {
        self.table.thread_exited(tid);
    }

    /// The signal of a timer is delivered. Returns the overrun to report with it.
    pub(super) fn delivered(&mut self, id: i32) -> Option<i32> {
        self.table.delivered(id)
    }

    /// Answers a call by a thread about one of the timers, if that does not need the kernel.
    pub(super) fn answer(
        &mut self,
        call: &Call,
        (pid, tid): (HomePid, HomePid),
        usage: &AwayUsage,
    ) -> Option<Outcome> {
        let is_fresh = |clock: CpuClock| clock.thread.is_none_or(|of| of == tid);
        self.table.answer(call, |clock| (usage.read_clock(pid, clock), is_fresh(clock)))
    }

    /// Its soft and hard limit on CPU time. Cached, but not for long, since other processes may set
    /// them too.
    fn limits(&mut self, pid: HomePid) -> [Option<u64>; 2] {
        if self.limits.is_none_or(|(_, read)| read.elapsed() > MAX_LIMITS_AGE) {
            self.limits = Some((timers::cpu_limits(pid.0).unwrap_or_default(), Instant::now()));
        }
        self.limits.map(|(limits, _)| limits).unwrap_or_default()
    }

    /// The process has set its limits.
    pub(super) fn forget_limits(&mut self) {
        self.limits = None;
    }

    /// Checks which timers and limits have expired.
    pub(super) fn check(&mut self, pid: HomePid, usage: &AwayUsage, of: ClockScope) {
        self.checked_at = Instant::now();
        let due = self
            .table
            .take_expired(|clock| if of.includes(clock.thread) { usage.read_clock(pid, clock) } else { 0 });
        let fires = due.into_iter().map(|timer_id| match timer_id {
            TimerId::Posix(id) => DueSignal::Timer(id),
            TimerId::Prof => DueSignal::Signal(libc::SIGPROF),
            TimerId::Virtual => DueSignal::Signal(libc::SIGVTALRM),
        });
        let again = std::mem::take(&mut self.to_refire).into_iter().map(DueSignal::Timer);
        self.unfired.extend(again.chain(fires));
        if of.includes(None) {
            let used = usage.read_clock(pid, CpuClock { thread: None, user: false });
            let limit = self.check_limits(pid, used);
            self.unfired.extend(limit.map(DueSignal::Signal));
        }
    }

    /// The signal for a limit on CPU time that was reached.
    fn check_limits(&mut self, pid: HomePid, used: u64) -> Option<i32> {
        match self.limits(pid) {
            [_, Some(hard)] if used >= hard.saturating_mul(SECOND) => Some(libc::SIGKILL),
            [Some(soft), hard] if used >= soft.max(1).saturating_mul(SECOND) => {
                // As in the kernel, which raises the soft limit each time, the signal comes once a
                // second.
                let next =
                    Rlimit { current: Some(used / SECOND + 1).min(hard.or(Some(u64::MAX))), maximum: hard };
                self.limits = None;
                let moved = Pid::from_raw(pid.0).map(|pid| prlimit(Some(pid), Resource::Cpu, next));
                matches!(moved, Some(Ok(_))).then_some(libc::SIGXCPU)
            }
            _ => None,
        }
    }

    /// Whether something has expired and was not fired yet.
    pub(super) fn has_unfired(&self) -> bool {
        !self.unfired.is_empty()
    }

    /// The expired timers and limits, to be fired now.
    pub(super) fn take_unfired(&mut self) -> Vec<DueSignal> {
        std::mem::take(&mut self.unfired)
    }

    /// These could not be fired: no thread can be stopped now.
    pub(super) fn not_fired(&mut self, due: Vec<DueSignal>) {
        self.unfired = due;
    }

    /// The thresholds that its guest is to report: the CPU time used away at which something
    /// expires.
    fn needed_thresholds(&mut self, pid: HomePid, usage: &AwayUsage, of: ClockScope) -> Thresholds {
        let mut thresholds = Thresholds::new();
        let limit = self.limits(pid).into_iter().flatten().min();
        let limit = limit
            .map(|limit| (CpuClock { thread: None, user: false }, Some(limit.max(1).saturating_mul(SECOND))));
        let timers = self.table.iter().map(|timer| match timer.relative {
            Some(_) => (timer.clock, Some(0)),
            None => (timer.clock, timer.expires),
        });
        for (clock, expires) in timers.chain(limit).filter(|(clock, _)| of.includes(clock.thread)) {
            let left = expires.map(|at| at.saturating_sub(usage.read_clock(pid, clock)));
            let at = left.map_or(u64::MAX, |left| usage.of(clock.thread).total().saturating_add(left));
            if at < u64::MAX {
                let watch = thresholds.entry(clock.thread).or_insert(at);
                *watch = at.min(*watch);
            }
        }
        thresholds
    }

    /// Updates the thresholds. Returns those that must be sent to its guest, with none for a
    /// threshold that was removed.
    pub(super) fn update_thresholds(
        &mut self,
        pid: HomePid,
        usage: &AwayUsage,
        of: ClockScope,
    ) -> Vec<(Option<HomePid>, Option<u64>)> {
        let now = self.needed_thresholds(pid, usage, of);
        let mut before = self.thresholds.clone();
        before.retain(|thread, _| of.includes(*thread));
        self.thresholds.retain(|thread, _| !of.includes(*thread));
        self.thresholds.extend(&now);
        let removed = before.keys().filter(|thread| !now.contains_key(thread)).map(|thread| (*thread, None));
        let new = now
            .iter()
            .filter(|(thread, at)| before.get(thread) != Some(at))
            .map(|(thread, at)| (*thread, Some(*at)));
        removed.chain(new).collect()
    }

    /// Its guest has no thresholds.
    pub(super) fn forget_thresholds(&mut self) {
        self.thresholds.clear();
    }

    /// The guest has reported the CPU time used by a thread, or by the process. A threshold that was
    /// reached is not active there any more.
    pub(super) fn usage_reported(&mut self, pid: HomePid, usage: &AwayUsage, thread: Option<HomePid>) {
        if self.thresholds.get(&thread).is_some_and(|at| usage.of(thread).total() >= *at) {
            self.thresholds.remove(&thread);
        }
        self.table.clock_read(thread, |clock| usage.read_clock(pid, clock));
    }
}
