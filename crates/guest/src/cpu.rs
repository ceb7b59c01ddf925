//! CPU time: what home's kernel says of the deputy, and on top of it what the guest has used away.
//!
//! Home answers `times`, `getrusage` and the CPU clocks for the deputy: that is the time before the process left,
//! and what calls cost at home. What this node's kernel counts is added here, where it is known to the nanosecond,
//! to the sum of the lives before. None of the three ever goes back while the process is away, so their sum does not.

use std::time::{Duration, Instant};
use tern_migrate::{CpuTime, usage};
use tern_syscall::{ByteBuf, Outcome};
use tern_tracee::Result;
use tern_tracee::cpu::{Counted, counted, counted_in_all, counted_thread};

/// Counts the CPU time of one guest, or of one of its threads.
#[derive(Debug)]
pub struct Meter {
    process: i32,
    /// A thread of it; else all of them, those that have ended among them.
    thread: Option<i32>,
    /// Used away by the lives before this one.
    before: CpuTime,
    /// What had been counted when this life began: our work, not the program's.
    begun: Counted,
    /// What was said last of this life.
    said: CpuTime,
}

impl Meter {
    /// Begins to count for a guest, which the lives before this one have used so much.
    ///
    /// # Errors
    /// If it is gone.
    pub fn begin(host: i32, before: CpuTime) -> Result<Self> {
        Ok(Self { process: host, thread: None, before, begun: counted(host)?, said: CpuTime::default() })
    }

    /// Begins to count for a thread of a guest, likewise.
    ///
    /// # Errors
    /// If it is gone.
    pub fn of_thread(process: i32, thread: i32, before: CpuTime) -> Result<Self> {
        let begun = counted_thread(process, thread)?;
        Ok(Self { process, thread: Some(thread), before, begun, said: CpuTime::default() })
    }

    /// What has been used away, up to now. If the guest is gone, up to when it was asked last.
    pub fn used(&mut self) -> CpuTime {
        let now = match self.thread {
            Some(thread) => counted_thread(self.process, thread),
            None => counted(self.process),
        };
        if let Ok(now) = now {
            let less = |now: u64, begun: u64| now.saturating_sub(begun);
            let life = Counted {
                total: less(now.total, self.begun.total),
                user: less(now.user, self.begun.user),
                system: less(now.system, self.begun.system),
            };
            self.said = split(life, self.said);
        }
        self.before.and(self.said)
    }

    /// The same, where only the sum of both parts is asked for: all of this life counts as user's.
    pub fn used_in_all(&mut self) -> CpuTime {
        let now = if self.thread.is_some() { None } else { counted_in_all(self.process).ok() };
        let Some(now) = now else { return self.used() };
        let user = now.saturating_sub(self.begun.total).max(self.said.total());
        self.before.and(CpuTime { user, system: 0 })
    }
}

impl Meter {
    /// How many nanoseconds more all of the process has used away than its kernel here has counted; less, if it is negative.
    #[must_use]
    pub fn more_than_counted(&self) -> i64 {
        let signed = |time: u64| i64::try_from(time).unwrap_or(i64::MAX);
        signed(self.before.total()) - signed(self.begun.total)
    }
}

/// Whose CPU time a call asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// All of the process that makes it.
    Process,
    /// Of the thread that makes it.
    Caller,
    /// Of the thread of this number, as the caller sees it, if it is one of its process.
    Thread(i32),
}

/// Whose CPU time `times`, `getrusage` or `clock_gettime` with these arguments asks for; nothing if another process's.
#[must_use]
pub fn whose(nr: u32, args: &[u64; 6], own_pid: i32) -> Option<Whose> {
    match (i64::from(nr), args[0] as i32) {
        (libc::SYS_times, _) | (libc::SYS_getrusage, libc::RUSAGE_SELF) => Some(Whose::Process),
        (libc::SYS_getrusage, libc::RUSAGE_THREAD) => Some(Whose::Caller),
        (libc::SYS_clock_gettime, clock) => whose_clock(clock, own_pid),
        _ => None,
    }
}

/// Whose CPU time a clock counts; nothing if another process's, or none.
#[must_use]
pub fn whose_clock(clock: i32, own_pid: i32) -> Option<Whose> {
    /// In the number of a clock: it is a thread's.
    const THREAD: i32 = 4;
    match clock {
        libc::CLOCK_PROCESS_CPUTIME_ID => return Some(Whose::Process),
        libc::CLOCK_THREAD_CPUTIME_ID => return Some(Whose::Caller),
        // The last two bits say what is counted; with both it is a device.
        _ if clock >= 0 || clock & 3 == 3 => return None,
        _ => {}
    }
    // The number of the process or thread, inverted, and three bits.
    match (clock & THREAD != 0, !(clock >> 3)) {
        (true, 0) => Some(Whose::Caller),
        (true, tid) => Some(Whose::Thread(tid)),
        (false, pid) if pid == 0 || pid == own_pid => Some(Whose::Process),
        (false, _) => None,
    }
}

/// Divides the exact time as the samples are divided, as the kernel does it, and so that neither part goes back
/// behind what was said of it before.
fn split(counted: Counted, said: CpuTime) -> CpuTime {
    let total = counted.total.max(said.total());
    let samples = u128::from(counted.user) + u128::from(counted.system);
    let share = (u128::from(total) * u128::from(counted.system)).checked_div(samples).unwrap_or(0);
    let most = total - said.user;
    let system = u64::try_from(share).unwrap_or(most).clamp(said.system, most);
    CpuTime { user: total - system, system }
}

/// Adds what was used away to what home's kernel has answered for it ([`whose`]) to this call.
pub fn add(nr: u32, args: &[u64; 6], used: CpuTime, outcome: &mut Outcome) {
    let Some(out) = outcome.outs.first_mut() else { return };
    match i64::from(nr) {
        // Those of the children, behind it, home has answered for.
        libc::SYS_times => usage::add_ticks(out, 0, used),
        libc::SYS_getrusage => usage::add_to(out, used),
        libc::SYS_clock_gettime => {
            let clock = args[0] as i32;
            // PROF, VIRT, SCHED: user and system, user, the exact sum.
            let part = if clock < 0 && clock & 3 == 1 { used.user } else { used.total() };
            usage::add_nanoseconds(out, part);
        }
        _ => {}
    }
}

/// What home has said last of the CPU time of a process, as long as nobody asks it for anything but errands. These cost the
/// deputy little, and for a quarter of a second that is not told: programs like to ask often (`clock`).
#[derive(Debug, Default)]
pub struct AtHome(Option<(ByteBuf, Instant)>);

impl AtHome {
    /// How long it is believed.
    const TERM: Duration = Duration::from_millis(250);

    /// Takes home's answer to a call that was asked then, if it is of this kind.
    pub fn hear(&mut self, nr: u32, args: &[u64; 6], outcome: &Outcome, asked: Instant) {
        if Self::is_asked_for(nr, args) && outcome.ret == 0 {
            self.0 = outcome.outs.first().map(|time| (time.clone(), asked));
        }
    }

    /// Home is asked for something else: its time goes on.
    pub fn forget(&mut self) {
        self.0 = None;
    }

    /// The answer to a call, if it is this that it asks for, and is known: what was used away comes on top.
    #[must_use]
    pub fn answer(&self, nr: u32, args: &[u64; 6]) -> Option<Outcome> {
        let (time, _) = self.0.as_ref().filter(|(_, asked)| asked.elapsed() < Self::TERM)?;
        Self::is_asked_for(nr, args).then(|| Outcome { ret: 0, outs: vec![time.clone()] })
    }

    /// The same in nanoseconds, and until when it is believed.
    #[must_use]
    pub fn known(&self) -> Option<(u64, Instant)> {
        let (time, asked) = self.0.as_ref()?;
        let word =
            |at: usize| time.get(at..at + 8).and_then(|word| Some(u64::from_le_bytes(word.try_into().ok()?)));
        Some((word(0)?.checked_mul(1_000_000_000)?.checked_add(word(8)?)?, *asked + Self::TERM))
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
    fn neither_part_ever_goes_back() {
        let said = CpuTime { user: 90, system: 10 };
        // The samples now say that more of it was spent in the kernel.
        let now = split(Counted { total: 104, user: 1, system: 3 }, said);
        assert_eq!(now, CpuTime { user: 90, system: 14 });
        let now = split(Counted { total: 200, user: 1, system: 0 }, now);
        assert_eq!(now, CpuTime { user: 186, system: 14 });
        assert_eq!(split(Counted { total: 5, user: 9, system: 9 }, now), now, "what cannot be");
        assert_eq!(split(Counted { total: 7, ..Counted::default() }, CpuTime::default()).user, 7);
        let huge = Counted { total: u64::MAX, user: u64::MAX, system: u64::MAX };
        assert_eq!(split(huge, said).total(), u64::MAX);
    }

    fn answered(nr: i64, first: u64, words: &[u64]) -> Vec<u64> {
        let used = CpuTime { user: 2 * SECOND + 700_000_000, system: 300_000_000 };
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let mut outcome = Outcome { ret: 0, outs: vec![ByteBuf::from(bytes)] };
        let args = [first, 0, 0, 0, 0, 0];
        if whose(nr as u32, &args, 4711).is_some() {
            add(nr as u32, &args, used, &mut outcome);
        }
        outcome.outs[0].chunks(8).map(|w| u64::from_le_bytes(w.try_into().unwrap())).collect()
    }

    #[test]
    fn home_s_answers_grow_by_what_was_used_away() {
        assert_eq!(answered(libc::SYS_times, 1, &[10, 20, 30, 40]), [280, 50, 30, 40]);
        let usage = [1, 400_000, 0, 900_000, 77];
        assert_eq!(answered(libc::SYS_getrusage, 0, &usage), [4, 100_000, 1, 200_000, 77]);
        let children = libc::RUSAGE_CHILDREN as u64;
        assert_eq!(answered(libc::SYS_getrusage, children, &usage), usage);
        assert_eq!(answered(libc::SYS_clock_gettime, 2, &[1, 999_999_999]), [4, 999_999_999]);
        assert_eq!(answered(libc::SYS_clock_gettime, 3, &[0, 1]), [3, 1]);
        assert_eq!(answered(libc::SYS_times, 1, &[10]), [280], "a home that writes less than it should");
    }

    #[test]
    fn what_home_has_said_is_believed_until_it_is_asked_for_something() {
        let nr = libc::SYS_clock_gettime as u32;
        let (process, caller) = ([2, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0]);
        let said = Outcome { ret: 0, outs: vec![ByteBuf::from(vec![7; 16])] };
        let mut home = AtHome::default();
        home.hear(nr, &caller, &said, Instant::now());
        assert_eq!(home.answer(nr, &process), None, "that was a thread's");
        home.hear(nr, &process, &said, Instant::now());
        assert_eq!(home.answer(nr, &process), Some(said.clone()));
        assert_eq!(home.answer(nr, &caller), None);
        home.forget();
        assert_eq!(home.answer(nr, &process), None);
        home.hear(nr, &process, &said, Instant::now() - AtHome::TERM);
        assert_eq!(home.answer(nr, &process), None, "long ago");
    }

    #[test]
    fn clocks_of_others_are_left_alone() {
        let clock = |pid: i32, kind: i32| whose_clock((!pid << 3) | kind, 4711);
        assert_eq!(clock(4711, 2), Some(Whose::Process));
        assert_eq!(clock(0, 2), Some(Whose::Process));
        assert_eq!(clock(4711, 1), Some(Whose::Process));
        assert_eq!(clock(4712, 2), None);
        assert_eq!(clock(4711, 3), None, "a device");
        assert_eq!(clock(0, 6), Some(Whose::Caller));
        assert_eq!(clock(4712, 6), Some(Whose::Thread(4712)));
        assert_eq!(clock(4712, 7), None, "a device");
        assert_eq!(whose_clock(libc::CLOCK_MONOTONIC, 4711), None);
        let usage = |of: i32| whose(libc::SYS_getrusage as u32, &[of as u64, 0, 0, 0, 0, 0], 4711);
        assert_eq!(usage(libc::RUSAGE_THREAD), Some(Whose::Caller));
        assert_eq!(usage(libc::RUSAGE_CHILDREN), None);
    }

    #[test]
    fn a_clock_of_user_time_grows_by_that_alone() {
        let used = CpuTime { user: 5, system: 2 };
        let grown = |kind: i32| {
            let mut outcome = Outcome { ret: 0, outs: vec![ByteBuf::from(vec![0; 16])] };
            let clock = (!4711 << 3) | kind;
            add(libc::SYS_clock_gettime as u32, &[clock as u64, 0, 0, 0, 0, 0], used, &mut outcome);
            outcome.outs[0][8]
        };
        assert_eq!([0, 1, 2, 5, 6].map(grown), [7, 5, 7, 5, 7]);
    }

    #[test]
    fn a_thread_s_time_is_part_of_its_process() {
        let me = std::process::id() as i32;
        let mut process = Meter::begin(me, CpuTime::default()).unwrap();
        let before = CpuTime { user: SECOND, system: 0 };
        let used = std::thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            let mut own = Meter::of_thread(me, tid, before).unwrap();
            let mut sum = 0u64;
            while own.used().total() < SECOND + 20_000_000 {
                sum = (0..10_000).fold(sum, std::hint::black_box(u64::wrapping_add));
            }
            own.used().total() - SECOND
        });
        let used = used.join().unwrap();
        assert!(process.used().total() >= used, "it has ended, and counts");
    }
}
