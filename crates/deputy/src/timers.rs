//! Timers that count CPU time, of a process that is away.
//!
//! Home's kernel sees only what the deputy uses. So while a process is away these timers do not run in that kernel but
//! stand in this table: when each is due, by what the process (or thread) has used at home and away together. The
//! guest's shim is told how far that is (`Watch`), and says so when it is reached; then home's kernel is made to raise the
//! signal ([`crate::due`], [`crate::firing`]). From there on it is a signal like any other of home's: blocked, waited for, read from a
//! signalfd, handled where the program runs, or its end, with its siginfo and the right status for the parent; no move
//! loses it. A timer in the guest's kernel would be simpler to set, but its signal would exist in that kernel only: whoever
//! waits at home would not get it, and blocked it would have to be found and carried by each move.
//!
//! What a program is told about its timers follows from the table too; but making and deleting them, which gives and takes
//! their numbers, is done by home's kernel. Home, or in a new program (where those of timer_create end, as in the
//! kernel), they run in the kernel again with what is left.
//!
//! A timer never fires early, but late by the way to home and back. Periods that end meanwhile are one signal and count as
//! overrun, as they do when a signal waits.

use std::collections::BTreeMap;
use tern_ids::HomePid;
use tern_syscall::{Arg, ByteBuf, Call, Outcome};

/// What names a timer in its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Which {
    /// ITIMER_VIRTUAL
    Virtual,
    /// ITIMER_PROF
    Prof,
    /// Of timer_create.
    Posix(i32),
}

/// What a timer counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Clock {
    /// A thread; else all of them.
    pub(crate) thread: Option<HomePid>,
    /// In user mode only.
    pub(crate) user: bool,
}

/// A timer; times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Timer {
    pub(crate) clock: Clock,
    /// What it raises, if anything.
    pub(crate) signal: Option<i32>,
    pub(crate) interval: u64,
    /// When it is due, unless it is not set.
    pub(crate) expires: Option<u64>,
    /// A time to be counted from the next reading of its clock: the one that there is may be old.
    pub(crate) later: Option<u64>,
    /// How often it was due since its signal was delivered.
    pub(crate) fired: u64,
    /// The overrun that was told with the last signal.
    pub(crate) overrun: i32,
}

impl Timer {
    pub(crate) fn new(clock: Clock, signal: Option<i32>) -> Self {
        Self { clock, signal, interval: 0, expires: None, later: None, fired: 0, overrun: 0 }
    }

    pub(crate) fn left(&self, now: u64) -> u64 {
        // Due, but not seen to yet: the kernel says the least that is not nothing. One that raises nothing just ends.
        let least = u64::from(self.signal.is_some());
        let left = self.expires.map(|at| at.saturating_sub(now).max(least));
        left.or(self.later).unwrap_or(0)
    }

    /// Sees whether it is due, and sets it for its next period.
    fn is_due(&mut self, now: u64) -> bool {
        let Some(at) = self.expires.filter(|at| *at <= now) else { return false };
        let periods = (now - at).checked_div(self.interval).map(|more| more + 1);
        match periods {
            Some(periods) => self.expires = Some(at.saturating_add(periods.saturating_mul(self.interval))),
            None if self.signal.is_some() => self.expires = None,
            None => {
                // It raises nothing: nobody need watch for it any more.
                self.expires = None;
                return false;
            }
        }
        self.fired = self.fired.saturating_add(periods.unwrap_or(1));
        self.signal.is_some()
    }
}

/// The timers of a process.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    pub(crate) all: BTreeMap<Which, Timer>,
}

impl Timers {
    /// Those that are due, each set for its next period.
    pub(crate) fn due(&mut self, now: impl Fn(Clock) -> u64) -> Vec<Which> {
        let due = self.all.iter_mut().filter_map(|(which, t)| t.is_due(now(t.clock)).then_some(*which));
        due.collect()
    }

    /// A clock has been read: what was to be counted from there is.
    pub(crate) fn read(&mut self, thread: Option<HomePid>, now: impl Fn(Clock) -> u64) {
        for timer in self.all.values_mut().filter(|timer| timer.clock.thread == thread) {
            if let Some(later) = timer.later.take() {
                timer.expires = Some(now(timer.clock).saturating_add(later));
            }
        }
    }

    /// A thread of the process has ended: its clock stands still for ever.
    pub(crate) fn thread_over(&mut self, tid: HomePid) {
        for timer in self.all.values_mut().filter(|timer| timer.clock.thread == Some(tid)) {
            (timer.expires, timer.later) = (None, None);
        }
    }

    /// The process has executed another program: only interval timers last.
    pub(crate) fn executed(&mut self) {
        self.all.retain(|which, timer| !matches!(which, Which::Posix(_)) && timer.expires.is_some());
    }

    /// The signal of a timer is delivered: the overrun that it tells.
    pub(crate) fn delivered(&mut self, id: i32) -> Option<i32> {
        let timer = self.all.get_mut(&Which::Posix(id))?;
        let more = std::mem::take(&mut timer.fired).saturating_sub(1);
        timer.overrun = i32::try_from(more).unwrap_or(i32::MAX);
        Some(timer.overrun)
    }

    /// Answers a call, if it is about one of these and needs no kernel. `now` reads a clock; and whether that reading is
    /// fresh.
    pub(crate) fn answer(&mut self, call: &Call, now: impl Fn(Clock) -> (u64, bool)) -> Option<Outcome> {
        let Arg::Value(first) = call.args[0] else { return None };
        let nr = i64::from(call.nr);
        let which = match (nr, first as i32) {
            (libc::SYS_setitimer | libc::SYS_getitimer, libc::ITIMER_VIRTUAL) => Which::Virtual,
            (libc::SYS_setitimer | libc::SYS_getitimer, libc::ITIMER_PROF) => Which::Prof,
            (libc::SYS_timer_settime | libc::SYS_timer_gettime | libc::SYS_timer_getoverrun, id) => {
                Some(Which::Posix(id)).filter(|which| self.all.contains_key(which))?
            }
            _ => return None,
        };
        let timer = self.all.entry(which).or_insert_with(|| which.unset());
        let form = if matches!(which, Which::Posix(_)) { Form::Timespec } else { Form::Timeval };
        let (reading, fresh) = now(timer.clock);
        let old = form.write(timer.interval, timer.left(reading));
        Some(match nr {
            libc::SYS_timer_getoverrun => Outcome { ret: timer.overrun.into(), outs: Vec::new() },
            libc::SYS_getitimer | libc::SYS_timer_gettime => told(&call.args[1], old, libc::EFAULT),
            _ => {
                let posix = nr == libc::SYS_timer_settime;
                let (new, back) =
                    if posix { (&call.args[2], &call.args[3]) } else { (&call.args[1], &call.args[2]) };
                let (interval, value) = match form.read(new, posix) {
                    Ok(times) => times,
                    Err(errno) => return Some(failed(errno)),
                };
                let absolute = posix
                    && matches!(call.args[1], Arg::Value(flags) if flags as i32 & libc::TIMER_ABSTIME != 0);
                let set = value > 0;
                (timer.interval, timer.fired, timer.overrun) = (interval, 0, 0);
                timer.later = Some(value).filter(|_| set && !absolute && !fresh);
                timer.expires = match absolute {
                    true => Some(value),
                    false => Some(reading.saturating_add(value)).filter(|_| fresh),
                };
                timer.expires = timer.expires.filter(|_| set);
                match back {
                    Arg::Value(_) => Outcome { ret: 0, outs: Vec::new() },
                    back => told(back, old, libc::EFAULT),
                }
            }
        })
    }
}

impl Which {
    /// The timer of this name, not set.
    pub(crate) fn unset(self) -> Timer {
        match self {
            Self::Virtual => Timer::new(Clock { thread: None, user: true }, Some(libc::SIGVTALRM)),
            Self::Prof | Self::Posix(_) => {
                Timer::new(Clock { thread: None, user: false }, Some(libc::SIGPROF))
            }
        }
    }
}

/// How a kernel writes times.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Form {
    /// struct itimerval
    Timeval,
    /// struct itimerspec
    Timespec,
}

impl Form {
    /// Parts of a second.
    fn parts(self) -> u64 {
        match self {
            Self::Timeval => 1_000_000,
            Self::Timespec => 1_000_000_000,
        }
    }

    /// Interval and value, in nanoseconds. Not less is told than is left.
    pub(crate) fn write(self, interval: u64, value: u64) -> Vec<u8> {
        let unit = 1_000_000_000 / self.parts();
        let words = [interval, value]
            .map(|time| time.div_ceil(unit))
            .map(|time| [time / self.parts(), time % self.parts()]);
        words.as_flattened().iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Takes them from what a program gave, which the kernel judges like this. Without any, interval timers are unset.
    fn read(self, new: &Arg, needed: bool) -> Result<(u64, u64), i32> {
        match new {
            Arg::Bytes(bytes) => self.parse(bytes).ok_or(libc::EINVAL),
            Arg::Value(0) if !needed => Ok((0, 0)),
            Arg::Value(0) => Err(libc::EINVAL),
            _ => Err(libc::EFAULT),
        }
    }

    /// Interval and value, in nanoseconds.
    pub(crate) fn parse(self, bytes: &[u8]) -> Option<(u64, u64)> {
        let (words, []) = bytes.as_chunks::<8>() else { return None };
        let [a, b, c, d] = *words else { return None };
        let time = |seconds: [u8; 8], part: [u8; 8]| {
            let (seconds, part) = (i64::from_le_bytes(seconds), i64::from_le_bytes(part));
            let (seconds, part) = (u64::try_from(seconds).ok()?, u64::try_from(part).ok()?);
            // The kernel cuts what is beyond its own count of nanoseconds too.
            let whole = seconds.saturating_mul(1_000_000_000);
            (part < self.parts()).then(|| whole.saturating_add(part * (1_000_000_000 / self.parts())))
        };
        Some((time(a, b)?, time(c, d)?))
    }
}

fn told(room: &Arg, times: Vec<u8>, otherwise: i32) -> Outcome {
    match room {
        Arg::Room => Outcome { ret: 0, outs: vec![ByteBuf::from(times)] },
        _ => failed(otherwise),
    }
}

fn failed(errno: i32) -> Outcome {
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

    fn times(form: Form, interval: u64, value: u64) -> Arg {
        Arg::Bytes(ByteBuf::from(form.write(interval, value)))
    }

    fn set_prof(timers: &mut Timers, interval: u64, value: u64, now: u64) -> Outcome {
        let args = [Arg::Value(2), times(Form::Timeval, interval, value), Arg::Room, Arg::Value(0)];
        timers.answer(&call(libc::SYS_setitimer, args), |_| (now, true)).unwrap()
    }

    #[test]
    fn an_interval_timer_is_due_again_and_again_and_never_early() {
        let mut timers = Timers::default();
        assert_eq!(set_prof(&mut timers, 10 * MS, 30 * MS, 100 * MS).outs[0].as_slice(), [0; 32]);
        assert_eq!(timers.due(|_| 130 * MS - 1), []);
        assert_eq!(timers.due(|_| 130 * MS), [Which::Prof]);
        assert_eq!(timers.due(|_| 139 * MS), []);
        assert_eq!(timers.due(|_| 165 * MS), [Which::Prof], "once for three periods");
        let get = call(libc::SYS_getitimer, [Arg::Value(2), Arg::Room, Arg::Value(0), Arg::Value(0)]);
        let told = timers.answer(&get, |_| (166 * MS, true)).unwrap();
        assert_eq!(Form::Timeval.parse(&told.outs[0]), Some((10 * MS, 4 * MS)));
        let old = set_prof(&mut timers, 0, 0, 168 * MS);
        assert_eq!(Form::Timeval.parse(&old.outs[0]), Some((10 * MS, 2 * MS)));
        assert_eq!(timers.due(|_| u64::MAX), []);
    }

    #[test]
    fn a_timer_of_timer_create_tells_its_overruns() {
        let clock = Clock { thread: Some(HomePid(7)), user: false };
        let mut timers = Timers::default();
        timers.all.insert(Which::Posix(3), Timer::new(clock, Some(libc::SIGUSR1)));
        let set = |flags: i32, interval, value| {
            call(
                libc::SYS_timer_settime,
                [
                    Arg::Value(3),
                    Arg::Value(flags as u64),
                    times(Form::Timespec, interval, value),
                    Arg::Value(0),
                ],
            )
        };
        assert_eq!(
            timers.answer(&set(libc::TIMER_ABSTIME, 5 * MS, 20 * MS), |_| (50 * MS, false)).unwrap().ret,
            0
        );
        assert_eq!(timers.due(|_| 50 * MS), [Which::Posix(3)]);
        assert_eq!(timers.due(|_| 61 * MS), [Which::Posix(3)]);
        assert_eq!(timers.delivered(3), Some(8), "at 20, 25 and so on to 60");
        let over =
            call(libc::SYS_timer_getoverrun, [Arg::Value(3), Arg::Value(0), Arg::Value(0), Arg::Value(0)]);
        assert_eq!(timers.answer(&over, |_| (0, true)).unwrap().ret, 8);
        // Counted from a reading that is old, it would be early.
        timers.answer(&set(0, 0, 5 * MS), |_| (70 * MS, false)).unwrap();
        assert_eq!(timers.due(|_| u64::MAX), []);
        timers.read(Some(HomePid(7)), |_| 90 * MS);
        assert_eq!(timers.due(|_| 95 * MS - 1), []);
        assert_eq!(timers.due(|_| 95 * MS), [Which::Posix(3)]);
        assert_eq!(timers.due(|_| u64::MAX), [], "once");
        timers.answer(&set(0, 5 * MS, 5 * MS), |_| (0, true)).unwrap();
        timers.thread_over(HomePid(7));
        assert_eq!(timers.due(|_| u64::MAX), []);
        timers.executed();
        assert!(timers.all.is_empty());
        assert!(timers.answer(&over, |_| (0, true)).is_none(), "the kernel's affair");
    }

    #[test]
    fn what_the_kernel_refuses_is_refused() {
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
        assert_eq!(set(Arg::Bad, Arg::Value(0)), efault);
        assert_eq!(set(Arg::Value(0), Arg::Bad), efault);
        assert_eq!(set(Arg::Bytes(ByteBuf::new()), Arg::Value(0)), einval, "a guest that means harm");
        let real = call(libc::SYS_setitimer, [Arg::Value(0), Arg::Value(0), Arg::Value(0), Arg::Value(0)]);
        assert!(timers.answer(&real, |_| (0, true)).is_none());
    }
}
