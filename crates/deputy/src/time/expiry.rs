//! Checks the CPU-time timers and RLIMIT_CPU of a process that is away, and reacts to their expiry.
//!
//! Home can measure the deputy's CPU time and has the guest's as of its last report. It asks the
//! guest shim to report as soon as the remainder has been used there (`WatchUsage`), and updates
//! that threshold with each report, since the deputy uses CPU time as well. It also checks when a
//! call of the deputy finishes: a program that mostly makes calls uses its time at home.

use crate::process::Process;
use crate::shim::Shim;
use crate::time::fire::DueSignal;
use crate::time::timers::{CpuClock, Timer, TimerId};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tern_ids::HomePid;
use tern_migrate::message::Message;
use tern_syscall::{Arg, Call, Outcome};
use tern_tracee::{cpu, timers};

const SECOND: u64 = 1_000_000_000;

/// A timer is not checked more often than the kernel does it.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(4);

/// How long limits that were read are used.
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

impl Process {
    /// The reading of one of its clocks, as its program sees it, as of the guest's last report. If
    /// the thread or process is gone at home, the home part is zero.
    pub(crate) fn read_clock(&self, clock: CpuClock) -> u64 {
        let pid = self.pid.0;
        let away = match clock.thread {
            Some(tid) => self.thread_usage.get(&tid).copied().unwrap_or_default(),
            None => self.usage_away,
        };
        let home = match (clock.thread, clock.user) {
            (Some(tid), user) => cpu::thread_cpu_counters(pid, tid.0)
                .map(|counted| if user { counted.user.saturating_mul(SECOND / 100) } else { counted.total }),
            (None, true) => cpu::user_cpu_ns(pid),
            (None, false) => cpu::cpu_counters(pid).map(|counted| counted.total),
        };
        home.unwrap_or_default().saturating_add(if clock.user { away.user } else { away.total() })
    }

    /// The clock that this process means by a clock id, if it is one of its own that counts CPU
    /// time.
    pub(crate) fn resolve_clock(&self, number: i32, caller: Option<HomePid>) -> Option<CpuClock> {
        const THREAD: i32 = 4;
        let whole = CpuClock { thread: None, user: number < 0 && number & 3 == 1 };
        match number {
            libc::CLOCK_PROCESS_CPUTIME_ID => Some(whole),
            libc::CLOCK_THREAD_CPUTIME_ID => caller.map(|tid| CpuClock { thread: Some(tid), ..whole }),
            _ if !cpu::is_cpu_clock(number) => None,
            // The pid or tid, inverted, followed by three bits.
            _ if number & THREAD == 0 => Some(whole).filter(|_| [0, self.own_pid].contains(&!(number >> 3))),
            _ => {
                let own_tid = !(number >> 3);
                let named = self.threads.values().find(|thread| thread.own_tid == own_tid);
                let thread = if own_tid == 0 { caller } else { named.map(|thread| thread.tid) };
                thread.map(|tid| CpuClock { thread: Some(tid), ..whole })
            }
        }
    }

    /// Its soft and hard limit on CPU time. Cached, but not for long, since other processes may set
    /// them too.
    fn cpu_limits(&mut self) -> [Option<u64>; 2] {
        if self.cpu_limits.is_none_or(|(_, read)| read.elapsed() > MAX_LIMITS_AGE) {
            self.cpu_limits = Some((timers::cpu_limits(self.pid.0).unwrap_or_default(), Instant::now()));
        }
        self.cpu_limits.map(|(limits, _)| limits).unwrap_or_default()
    }

    /// The timers and limits that have expired.
    fn take_expired(&mut self, of: ClockScope) -> Vec<DueSignal> {
        self.timers_checked = Instant::now();
        let mut timers = std::mem::take(&mut self.timers);
        let due =
            timers.take_expired(|clock| if of.includes(clock.thread) { self.read_clock(clock) } else { 0 });
        self.timers = timers;
        let fires = due.into_iter().map(|timer_id| match timer_id {
            TimerId::Posix(id) => DueSignal::Timer(id),
            TimerId::Prof => DueSignal::Signal(libc::SIGPROF),
            TimerId::Virtual => DueSignal::Signal(libc::SIGVTALRM),
        });
        let again = std::mem::take(&mut self.to_refire).into_iter().map(DueSignal::Timer);
        let mut due: Vec<DueSignal> = again.chain(fires).collect();
        if !of.includes(None) {
            return due;
        }
        let used = self.read_clock(CpuClock { thread: None, user: false });
        match self.cpu_limits() {
            [_, Some(hard)] if used >= hard.saturating_mul(SECOND) => {
                due.push(DueSignal::Signal(libc::SIGKILL));
            }
            [Some(soft), hard] if used >= soft.max(1).saturating_mul(SECOND) => {
                // As in the kernel, which raises the soft limit each time, the signal comes once a
                // second.
                let next =
                    Rlimit { current: Some(used / SECOND + 1).min(hard.or(Some(u64::MAX))), maximum: hard };
                self.cpu_limits = None;
                let moved = Pid::from_raw(self.pid.0).map(|pid| prlimit(Some(pid), Resource::Cpu, next));
                if matches!(moved, Some(Ok(_))) {
                    due.push(DueSignal::Signal(libc::SIGXCPU));
                }
            }
            _ => {}
        }
        due
    }

    /// The thresholds that its guest is to report, of the process (key none) and of threads: the
    /// CPU time used away at which something expires.
    fn thresholds(&mut self, of: ClockScope) -> BTreeMap<Option<HomePid>, u64> {
        let mut thresholds = BTreeMap::new();
        let limit = self.cpu_limits().into_iter().flatten().min();
        let limit = limit
            .map(|limit| (CpuClock { thread: None, user: false }, Some(limit.max(1).saturating_mul(SECOND))));
        let timers = self.timers.all.values().map(|timer| match timer.relative {
            Some(_) => (timer.clock, Some(0)),
            None => (timer.clock, timer.expires),
        });
        for (clock, expires) in timers.chain(limit).filter(|(clock, _)| of.includes(clock.thread)) {
            let used = match clock.thread {
                Some(tid) => self.thread_usage.get(&tid).copied().unwrap_or_default(),
                None => self.usage_away,
            };
            let left = expires.map(|at| at.saturating_sub(self.read_clock(clock)));
            let at = left.map_or(u64::MAX, |left| used.total().saturating_add(left));
            if at < u64::MAX {
                let watch = thresholds.entry(clock.thread).or_insert(at);
                *watch = at.min(*watch);
            }
        }
        thresholds
    }
}

impl Shim {
    /// Answers a call about timers that home's kernel does not have. The guest has sent the CPU
    /// time of the calling thread and of the process right before it.
    pub(crate) fn answer_timer_call(&mut self, pid: HomePid, tid: HomePid, call: &Call) -> Option<Outcome> {
        let process = self.processes.get_mut(&pid)?;
        let mut timers = std::mem::take(&mut process.timers);
        let answer =
            timers.answer(call, |clock| (process.read_clock(clock), clock.thread.is_none_or(|of| of == tid)));
        process.timers = timers;
        answer
    }

    /// A call of the deputy has finished. Returns whether the timers must be checked: the call may
    /// have changed them, and every call uses CPU time at home.
    pub(crate) fn note_timer_call(
        &mut self,
        pid: HomePid,
        tid: HomePid,
        call: &Call,
        outcome: &Outcome,
    ) -> bool {
        let Some(process) = self.processes.get_mut(&pid) else { return false };
        let long_ago =
            !process.timers.all.is_empty() && process.timers_checked.elapsed() > MIN_CHECK_INTERVAL;
        match (i64::from(call.nr), &call.args[0]) {
            (libc::SYS_timer_create, Arg::Value(clock)) if outcome.ret == 0 => {
                let Some(clock) = process.resolve_clock(*clock as i32, Some(tid)) else { return false };
                let number =
                    |bytes: &[u8], at: usize| Some(i32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
                let (notify, signal) = match &call.args[1] {
                    Arg::Bytes(event) => (number(event, 12), number(event, 8).unwrap_or_default()),
                    _ => (None, libc::SIGALRM),
                };
                let signal = Some(signal).filter(|_| notify != Some(libc::SIGEV_NONE));
                if let Some(id) = outcome.outs.first().and_then(|out| number(out, 0)) {
                    process.timers.all.insert(TimerId::Posix(id), Timer::new(clock, signal));
                }
            }
            (libc::SYS_timer_delete, Arg::Value(id)) if outcome.ret == 0 => {
                process.timers.all.remove(&TimerId::Posix(*id as i32));
            }
            (libc::SYS_setrlimit | libc::SYS_prlimit64, _) => process.cpu_limits = None,
            _ => return long_ago,
        }
        true
    }

    /// Fires expired timers and limits and sends the next thresholds. Not while job control has
    /// stopped the process: it uses no CPU time then.
    pub(crate) fn check_timers(&mut self, pid: HomePid, of: ClockScope) {
        let Some(process) =
            self.processes.get_mut(&pid).filter(|process| process.is_away() && !process.job_stopped)
        else {
            return;
        };
        let untimed = process.timers.all.is_empty() && process.cpu_thresholds.is_empty();
        if untimed && process.cpu_limits() == [None; 2] {
            return;
        }
        let new = process.take_expired(of);
        process.unfired.extend(new);
        self.fire_expired(pid);
        self.send_thresholds(pid, of);
    }

    /// Fires the timers and limits of a process that have expired. If all its threads are in calls
    /// that cannot be interrupted, that is done when the first of these calls has ended.
    fn fire_expired(&mut self, pid: HomePid) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let due = std::mem::take(&mut process.unfired);
        if due.is_empty() {
            return;
        }
        // The first thread if possible: only it can signal the whole process.
        let fired = self.with_any_thread(pid, Some(pid), |process, stopped| process.fire(stopped, &due));
        match (fired, self.processes.get_mut(&pid)) {
            (Ok(None), Some(process)) => process.unfired = due,
            (Err(error), _) => self.handle_error(pid, &error),
            _ => {}
        }
    }

    /// Fires what could not be fired before.
    pub(crate) fn fire_late(&mut self) {
        let is_late = |process: &&Process| !process.unfired.is_empty();
        let late: Vec<HomePid> = self.processes.values().filter(is_late).map(|process| process.pid).collect();
        late.into_iter().for_each(|pid| self.fire_expired(pid));
    }

    /// A new guest holds a process, or its link is back: sends all thresholds again.
    pub(crate) fn resend_thresholds(&mut self, pid: HomePid) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.cpu_thresholds.clear();
        }
        self.check_timers(pid, ClockScope::All);
    }

    /// Sends the guest of a process the thresholds that have changed.
    fn send_thresholds(&mut self, pid: HomePid, of: ClockScope) {
        let Some(process) = self.processes.get_mut(&pid).filter(|process| process.is_away()) else { return };
        let now = process.thresholds(of);
        let mut before = process.cpu_thresholds.clone();
        before.retain(|thread, _| of.includes(*thread));
        process.cpu_thresholds.retain(|thread, _| !of.includes(*thread));
        process.cpu_thresholds.extend(&now);
        let removed = before.keys().filter(|thread| !now.contains_key(thread)).map(|thread| (*thread, None));
        let new = now
            .iter()
            .filter(|(thread, at)| before.get(thread) != Some(at))
            .map(|(thread, at)| (*thread, Some(*at)));
        let changed: Vec<_> = removed.chain(new).collect();
        for (thread, at) in changed {
            match thread {
                Some(tid) => self.send(tid, &Message::WatchThreadUsage(at)),
                None => self.send(pid, &Message::WatchUsage(at)),
            }
        }
    }

    /// The guest has reported the CPU time used by a process, or by a thread. A threshold that was
    /// reached is not active there any more.
    pub(crate) fn usage_reported(&mut self, pid: HomePid, thread: Option<HomePid>) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let used = thread
            .map_or(process.usage_away, |tid| process.thread_usage.get(&tid).copied().unwrap_or_default());
        if process.cpu_thresholds.get(&thread).is_some_and(|at| used.total() >= *at) {
            process.cpu_thresholds.remove(&thread);
        }
        let mut timers = std::mem::take(&mut process.timers);
        timers.clock_read(thread, |clock| process.read_clock(clock));
        process.timers = timers;
        self.check_timers(pid, thread.map_or(ClockScope::All, ClockScope::Thread));
    }
}
