//! CPU-time timers of a process that is away.
//!
//! Home's kernel sees only the CPU time of the deputy. So while a process is away these timers are
//! disarmed in that kernel and kept in this table, with the expiry of each as CPU time used at home
//! and away together. The guest shim is sent the threshold that corresponds to this expiry
//! (`WatchUsage`) and reports when the threshold is reached. Then home's kernel is made to raise
//! the signal ([`crate::time::expiry`], [`crate::time::fire`]). From there on it is a signal like
//! any other at home: blocked, waited for, read from a signalfd, handled at the guest, or fatal,
//! with its siginfo and the right wait status. No move loses it. A timer in the guest's kernel
//! would be simpler to set, but its signal would exist in that kernel only: a wait at home would
//! not receive it, and a blocked one would have to be carried along by each move.
//!
//! Calls that set or query timers are answered from the table. Creating and deleting timers, which
//! assigns and frees their ids, is done by home's kernel. After a return home or an exec, the
//! timers run in the kernel again with the time left. An exec deletes those of timer_create, as in
//! the kernel.
//!
//! A timer never fires early, but late by the round trip home. Periods that end meanwhile are one
//! signal and count as overrun, as they do while a signal is pending.

use std::collections::BTreeMap;
use tern_ids::HomePid;
use tern_syscall::{Arg, ByteBuf, Call, Outcome};

/// Identifies a timer within its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum TimerId {
    /// ITIMER_VIRTUAL
    Virtual,
    /// ITIMER_PROF
    Prof,
    /// Made by timer_create.
    Posix(i32),
}

/// The clock of a timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CpuClock {
    /// The thread that it counts; none for the whole process.
    pub(crate) thread: Option<HomePid>,
    /// Counts time in user mode only.
    pub(crate) user: bool,
}

/// A timer; times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Timer {
    pub(crate) clock: CpuClock,
    /// The signal that it raises, if any.
    pub(crate) signal: Option<i32>,
    pub(crate) interval: u64,
    /// When it expires, unless it is disarmed.
    pub(crate) expires: Option<u64>,
    /// A relative time to be armed at the next reading of its clock, since the last one may be old.
    pub(crate) relative: Option<u64>,
    /// Expirations since its signal was delivered.
    pub(crate) expirations: u64,
    /// The overrun reported with the last signal.
    pub(crate) overrun: i32,
}

impl Timer {
    pub(crate) fn new(clock: CpuClock, signal: Option<i32>) -> Self {
        Self { clock, signal, interval: 0, expires: None, relative: None, expirations: 0, overrun: 0 }
    }

    pub(crate) fn time_left(&self, now: u64) -> u64 {
        // Expired but not handled yet: the kernel reports the smallest value above zero. A timer
        // without a signal just ends.
        let least = u64::from(self.signal.is_some());
        let left = self.expires.map(|at| at.saturating_sub(now).max(least));
        left.or(self.relative).unwrap_or(0)
    }

    /// Checks whether it has expired, and arms it for its next period.
    fn expire(&mut self, now: u64) -> bool {
        let Some(at) = self.expires.filter(|at| *at <= now) else { return false };
        let periods = (now - at).checked_div(self.interval).map(|more| more + 1);
        match periods {
            Some(periods) => self.expires = Some(at.saturating_add(periods.saturating_mul(self.interval))),
            None if self.signal.is_some() => self.expires = None,
            None => {
                // It raises nothing, so no threshold is needed for it.
                self.expires = None;
                return false;
            }
        }
        self.expirations = self.expirations.saturating_add(periods.unwrap_or(1));
        self.signal.is_some()
    }
}

/// Whether [`Timers::answer`] may answer this call.
pub(crate) fn is_timer_call(nr: u32) -> bool {
    let calls = [
        libc::SYS_setitimer,
        libc::SYS_getitimer,
        libc::SYS_timer_settime,
        libc::SYS_timer_gettime,
        libc::SYS_timer_getoverrun,
    ];
    calls.contains(&i64::from(nr))
}

/// The timers of a process.
#[derive(Debug, Default)]
pub(super) struct Timers {
    all: BTreeMap<TimerId, Timer>,
}

impl Timers {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Timer> {
        self.all.values()
    }

    pub(super) fn insert(&mut self, timer_id: TimerId, timer: Timer) {
        self.all.insert(timer_id, timer);
    }

    pub(super) fn remove(&mut self, timer_id: TimerId) {
        self.all.remove(&timer_id);
    }

    /// Removes all timers.
    pub(super) fn take(&mut self) -> BTreeMap<TimerId, Timer> {
        std::mem::take(&mut self.all)
    }

    /// The signal of a timer is pending. Returns false if the timer is not in the table.
    pub(super) fn set_pending(&mut self, id: i32) -> bool {
        let timer = self.all.get_mut(&TimerId::Posix(id));
        timer.is_some_and(|timer| {
            timer.expirations = 1;
            true
        })
    }

    /// The timers that have expired, each armed for its next period.
    pub(super) fn take_expired(&mut self, now: impl Fn(CpuClock) -> u64) -> Vec<TimerId> {
        let due = self.all.iter_mut().filter_map(|(timer_id, t)| t.expire(now(t.clock)).then_some(*timer_id));
        due.collect()
    }

    /// A clock has been read: arms the timers that wait for that.
    pub(super) fn clock_read(&mut self, thread: Option<HomePid>, now: impl Fn(CpuClock) -> u64) {
        for timer in self.all.values_mut().filter(|timer| timer.clock.thread == thread) {
            if let Some(relative) = timer.relative.take() {
                timer.expires = Some(now(timer.clock).saturating_add(relative));
            }
        }
    }

    /// A thread has exited, so its clock will not advance any more.
    pub(super) fn thread_exited(&mut self, tid: HomePid) {
        for timer in self.all.values_mut().filter(|timer| timer.clock.thread == Some(tid)) {
            (timer.expires, timer.relative) = (None, None);
        }
    }

    /// The process has executed another program: only interval timers survive.
    pub(super) fn handle_exec(&mut self) {
        self.all.retain(|timer_id, timer| !matches!(timer_id, TimerId::Posix(_)) && timer.expires.is_some());
    }

    /// The signal of a timer is delivered. Returns the overrun to report with it.
    pub(super) fn delivered(&mut self, id: i32) -> Option<i32> {
        let timer = self.all.get_mut(&TimerId::Posix(id))?;
        let more = std::mem::take(&mut timer.expirations).saturating_sub(1);
        timer.overrun = i32::try_from(more).unwrap_or(i32::MAX);
        Some(timer.overrun)
    }

    /// Answers a call about one of these timers, if that does not need the kernel. `now` reads a
    /// clock and returns whether the reading is fresh.
    pub(super) fn answer(&mut self, call: &Call, now: impl Fn(CpuClock) -> (u64, bool)) -> Option<Outcome> {
        let Arg::Value(first) = call.args[0] else { return None };
        let nr = i64::from(call.nr);
        let timer_id = match (nr, first as i32) {
            (libc::SYS_setitimer | libc::SYS_getitimer, libc::ITIMER_VIRTUAL) => TimerId::Virtual,
            (libc::SYS_setitimer | libc::SYS_getitimer, libc::ITIMER_PROF) => TimerId::Prof,
            (libc::SYS_timer_settime | libc::SYS_timer_gettime | libc::SYS_timer_getoverrun, id) => {
                Some(TimerId::Posix(id)).filter(|timer_id| self.all.contains_key(timer_id))?
            }
            _ => return None,
        };
        let timer = self.all.entry(timer_id).or_insert_with(|| timer_id.disarmed());
        let format =
            if matches!(timer_id, TimerId::Posix(_)) { TimeFormat::Timespec } else { TimeFormat::Timeval };
        let (reading, fresh) = now(timer.clock);
        let old = format.write(timer.interval, timer.time_left(reading));
        Some(match nr {
            libc::SYS_timer_getoverrun => Outcome { ret: timer.overrun.into(), outs: Vec::new() },
            libc::SYS_getitimer | libc::SYS_timer_gettime => times_reply(&call.args[1], old, libc::EFAULT),
            _ => {
                let posix = nr == libc::SYS_timer_settime;
                let (new, back) =
                    if posix { (&call.args[2], &call.args[3]) } else { (&call.args[1], &call.args[2]) };
                let (interval, value) = match format.decode(new, posix) {
                    Ok(times) => times,
                    Err(errno) => return Some(error_reply(errno)),
                };
                let absolute = posix
                    && matches!(call.args[1], Arg::Value(flags) if flags as i32 & libc::TIMER_ABSTIME != 0);
                let set = value > 0;
                (timer.interval, timer.expirations, timer.overrun) = (interval, 0, 0);
                timer.relative = Some(value).filter(|_| set && !absolute && !fresh);
                timer.expires = match absolute {
                    true => Some(value),
                    false => Some(reading.saturating_add(value)).filter(|_| fresh),
                };
                timer.expires = timer.expires.filter(|_| set);
                match back {
                    Arg::Value(_) => Outcome { ret: 0, outs: Vec::new() },
                    back => times_reply(back, old, libc::EFAULT),
                }
            }
        })
    }
}

impl TimerId {
    /// A disarmed timer with this id.
    pub(crate) fn disarmed(self) -> Timer {
        match self {
            Self::Virtual => Timer::new(CpuClock { thread: None, user: true }, Some(libc::SIGVTALRM)),
            Self::Prof | Self::Posix(_) => {
                Timer::new(CpuClock { thread: None, user: false }, Some(libc::SIGPROF))
            }
        }
    }
}

/// How the kernel represents times.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TimeFormat {
    /// struct itimerval
    Timeval,
    /// struct itimerspec
    Timespec,
}

impl TimeFormat {
    /// Units per second.
    fn per_second(self) -> u64 {
        match self {
            Self::Timeval => 1_000_000,
            Self::Timespec => 1_000_000_000,
        }
    }

    /// Encodes interval and value, given in nanoseconds, rounded up.
    pub(crate) fn write(self, interval: u64, value: u64) -> Vec<u8> {
        let unit = 1_000_000_000 / self.per_second();
        let words = [interval, value]
            .map(|time| time.div_ceil(unit))
            .map(|time| [time / self.per_second(), time % self.per_second()]);
        words.as_flattened().iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Decodes and checks a program's argument as the kernel does. A null argument disarms an
    /// interval timer.
    fn decode(self, new: &Arg, needed: bool) -> Result<(u64, u64), i32> {
        match new {
            Arg::Bytes(bytes) => self.parse(bytes).ok_or(libc::EINVAL),
            Arg::Value(0) if !needed => Ok((0, 0)),
            Arg::Value(0) => Err(libc::EINVAL),
            _ => Err(libc::EFAULT),
        }
    }

    /// Decodes interval and value, in nanoseconds.
    pub(crate) fn parse(self, bytes: &[u8]) -> Option<(u64, u64)> {
        let (words, []) = bytes.as_chunks::<8>() else { return None };
        let [a, b, c, d] = *words else { return None };
        let time = |seconds: [u8; 8], part: [u8; 8]| {
            let (seconds, part) = (i64::from_le_bytes(seconds), i64::from_le_bytes(part));
            let (seconds, part) = (u64::try_from(seconds).ok()?, u64::try_from(part).ok()?);
            // The kernel limits the value to its own range of nanoseconds too.
            let whole = seconds.saturating_mul(1_000_000_000);
            (part < self.per_second())
                .then(|| whole.saturating_add(part * (1_000_000_000 / self.per_second())))
        };
        Some((time(a, b)?, time(c, d)?))
    }
}

fn times_reply(out: &Arg, times: Vec<u8>, otherwise: i32) -> Outcome {
    match out {
        Arg::Output => Outcome { ret: 0, outs: vec![ByteBuf::from(times)] },
        _ => error_reply(otherwise),
    }
}

fn error_reply(errno: i32) -> Outcome {
    Outcome { ret: -i64::from(errno), outs: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn call(nr: i64, args: [Arg; 4]) -> Call {
        let [a, b, c, d] = args;
        Call { nr: nr as u32, args: [a, b, c, d, Arg::Value(0), Arg::Value(0)] }
    }

    fn times(format: TimeFormat, interval: u64, value: u64) -> Arg {
        Arg::Bytes(ByteBuf::from(format.write(interval, value)))
    }

    fn set_prof(timers: &mut Timers, interval: u64, value: u64, now: u64) -> Outcome {
        let args = [Arg::Value(2), times(TimeFormat::Timeval, interval, value), Arg::Output, Arg::Value(0)];
        timers.answer(&call(libc::SYS_setitimer, args), |_| (now, true)).unwrap()
    }

    #[test]
    fn interval_timer_expires_repeatedly_and_never_early() {
        let mut timers = Timers::default();
        assert_eq!(set_prof(&mut timers, 10 * MS, 30 * MS, 100 * MS).outs[0].as_slice(), [0; 32]);
        assert_eq!(timers.take_expired(|_| 130 * MS - 1), []);
        assert_eq!(timers.take_expired(|_| 130 * MS), [TimerId::Prof]);
        assert_eq!(timers.take_expired(|_| 139 * MS), []);
        assert_eq!(timers.take_expired(|_| 165 * MS), [TimerId::Prof], "once for three periods");
        let get = call(libc::SYS_getitimer, [Arg::Value(2), Arg::Output, Arg::Value(0), Arg::Value(0)]);
        let answer = timers.answer(&get, |_| (166 * MS, true)).unwrap();
        assert_eq!(TimeFormat::Timeval.parse(&answer.outs[0]), Some((10 * MS, 4 * MS)));
        let old = set_prof(&mut timers, 0, 0, 168 * MS);
        assert_eq!(TimeFormat::Timeval.parse(&old.outs[0]), Some((10 * MS, 2 * MS)));
        assert_eq!(timers.take_expired(|_| u64::MAX), []);
    }

    #[test]
    fn posix_timer_reports_its_overruns() {
        let clock = CpuClock { thread: Some(HomePid(7)), user: false };
        let mut timers = Timers::default();
        timers.all.insert(TimerId::Posix(3), Timer::new(clock, Some(libc::SIGUSR1)));
        let set = |flags: i32, interval, value| {
            call(
                libc::SYS_timer_settime,
                [
                    Arg::Value(3),
                    Arg::Value(flags as u64),
                    times(TimeFormat::Timespec, interval, value),
                    Arg::Value(0),
                ],
            )
        };
        assert_eq!(
            timers.answer(&set(libc::TIMER_ABSTIME, 5 * MS, 20 * MS), |_| (50 * MS, false)).unwrap().ret,
            0
        );
        assert_eq!(timers.take_expired(|_| 50 * MS), [TimerId::Posix(3)]);
        assert_eq!(timers.take_expired(|_| 61 * MS), [TimerId::Posix(3)]);
        assert_eq!(timers.delivered(3), Some(8), "at 20, 25 and so on to 60");
        let overrun_call =
            call(libc::SYS_timer_getoverrun, [Arg::Value(3), Arg::Value(0), Arg::Value(0), Arg::Value(0)]);
        assert_eq!(timers.answer(&overrun_call, |_| (0, true)).unwrap().ret, 8);
        // Armed from an old reading it would expire early.
        timers.answer(&set(0, 0, 5 * MS), |_| (70 * MS, false)).unwrap();
        assert_eq!(timers.take_expired(|_| u64::MAX), []);
        timers.clock_read(Some(HomePid(7)), |_| 90 * MS);
        assert_eq!(timers.take_expired(|_| 95 * MS - 1), []);
        assert_eq!(timers.take_expired(|_| 95 * MS), [TimerId::Posix(3)]);
        assert_eq!(timers.take_expired(|_| u64::MAX), [], "once");
        timers.answer(&set(0, 5 * MS, 5 * MS), |_| (0, true)).unwrap();
        timers.thread_exited(HomePid(7));
        assert_eq!(timers.take_expired(|_| u64::MAX), []);
        timers.handle_exec();
        assert!(timers.all.is_empty());
        assert!(timers.answer(&overrun_call, |_| (0, true)).is_none(), "left to the kernel");
    }

    #[test]
    fn invalid_times_are_refused_as_by_the_kernel() {
        let mut timers = Timers::default();
        let mut set = |new: Arg, back: Arg| {
            let call = call(libc::SYS_setitimer, [Arg::Value(1), new, back, Arg::Value(0)]);
            timers.answer(&call, |_| (0, true)).unwrap().ret
        };
        let bytes = |words: [i64; 4]| {
            Arg::Bytes(ByteBuf::from(words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>()))
        };
        let (einval, efault) = (-i64::from(libc::EINVAL), -i64::from(libc::EFAULT));
        assert_eq!(set(bytes([0, 0, 1, 999_999]), Arg::Value(0)), 0);
        assert_eq!(set(bytes([0, 0, 1, 1_000_000]), Arg::Value(0)), einval);
        assert_eq!(set(bytes([0, 0, -1, 0]), Arg::Value(0)), einval);
        assert_eq!(set(bytes([i64::MAX, 0, i64::MAX, 0]), Arg::Value(0)), 0);
        assert_eq!(set(Arg::BadPointer, Arg::Value(0)), efault);
        assert_eq!(set(Arg::Value(0), Arg::BadPointer), efault);
        assert_eq!(set(Arg::Bytes(ByteBuf::new()), Arg::Value(0)), einval, "a malicious guest");
        let real = call(libc::SYS_setitimer, [Arg::Value(0), Arg::Value(0), Arg::Value(0), Arg::Value(0)]);
        assert!(timers.answer(&real, |_| (0, true)).is_none());
    }
}
