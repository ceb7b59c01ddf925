//! How many threads run or wait for a CPU in this node, on average since the last reading.
//!
//! The scheduler counts for each thread how long it has run and how long it has waited for a CPU, that of waiting for
//! a quota included (`schedstat`); both together, per second, are what it would use with a CPU of its own. Nothing is
//! missed between two readings, as instants would, nothing that sleeps in state D counts, and in a container only the
//! container's own processes do, which are those in its `/proc`.
//!
//! **What has ended** since the last reading has taken its counters along. What it has used is the difference between
//! what the whole node has used and what is found in threads; it is taken to have waited as much for it as the others.
//! The kernel's own threads are not read one by one but come in by that same difference.
//!
//! **Our own programs**, ternd and the shims, work in short threads when processes move, and would be taken to have waited
//! as the others: the node would seem busier just when its load is looked at most. Of them only what they have run counts.
//!
//! **What rests** costs as much to read as what works. When a reading takes too long, threads that have not run for
//! some readings are read in turns. So the cost is bounded, and the price is that they are noticed later when they
//! wake: after [`MOST_TURNS`] readings at most.

use crate::clock::own_time;
use crate::group::{Groups, in_container};
use crate::pressure::Times;
use crate::procdir::ProcDir;
use crate::task::{TICKS, Turns};
use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

/// CPU time for one reading; it comes once a second.
const BUDGET: Duration = Duration::from_millis(4);
/// In how many turns resting processes are read at most.
pub const MOST_TURNS: u32 = 5;
/// Who has not run for so many readings rests.
const RESTS: u8 = 3;
/// Our own programs.
pub const OURS: [&str; 2] = ["ternd", "tern-shim"];
/// Nobody waits longer, for what he uses, than this.
const MOST_WAIT: f64 = 16.0;
/// What is left of a debt after a reading.
const OWED_KEPT: f64 = 0.8;
/// What of the threads' times is kept from one reading to the next: a few count.
const LATELY_KEPT: f64 = 0.5;

/// Watches it.
#[derive(Debug)]
pub struct Demand {
    proc: ProcDir,
    groups: Groups,
    container: bool,
    known: HashMap<i32, Known>,
    before: Option<Before>,
    /// CPU time found in threads that had not been in the node's, less than nothing, in seconds.
    owed: f64,
    /// Seconds that threads have run and wanted to run lately.
    lately: (f64, f64),
    /// In how many turns resting processes are read now.
    turns: u32,
    readings: u32,
}

#[derive(Debug)]
struct Before {
    at: Instant,
    used: Option<Duration>,
}

/// A process as it was when it was last read.
#[derive(Debug)]
struct Known {
    inode: u64,
    of_kernel: bool,
    /// Of one of our own: what it had run, with all that has ended in it, in seconds.
    ours: Option<f64>,
    /// Its threads; nothing before it is first read.
    threads: Vec<(i32, Turns)>,
    read: Instant,
    rested: u8,
    /// The reading in which it was last there.
    there: u32,
}

/// What came since the last reading, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Found {
    run: f64,
    wanted: f64,
    /// Threads' worth of demand.
    demand: f64,
    /// What one of our own has run; it is in none of the others.
    ours: f64,
}

impl Demand {
    /// Of this node.
    #[must_use]
    pub fn new(groups: Groups) -> Self {
        Self {
            proc: ProcDir::open(),
            groups,
            container: in_container(),
            known: HashMap::new(),
            before: None,
            owed: 0.0,
            lately: (0.0, 0.0),
            turns: 1,
            readings: 0,
        }
    }

    /// The average number of threads that ran or waited for a CPU since the last reading. Nothing the first time, and
    /// when no time has passed.
    pub fn read(&mut self) -> Option<f64> {
        let began = own_time();
        let now = Instant::now();
        let used = self.used();
        let elapsed = self.before.as_ref().map(|before| now.duration_since(before.at));
        if elapsed.is_some_and(|elapsed| elapsed < Duration::from_millis(1)) {
            return None;
        }
        self.readings = self.readings.wrapping_add(1);
        let (mut found, mut ours) = (Found::default(), 0.0);
        for (pid, inode) in self.proc.numbers(".") {
            let one = self.visit(pid, inode, now, elapsed);
            ours += one.ours;
            found.add(one);
        }
        let readings = self.readings;
        self.known.retain(|_, known| known.there == readings);
        let before = self.before.replace(Before { at: now, used });
        self.keep_to_budget(own_time().saturating_sub(began));
        let elapsed = elapsed?.as_secs_f64();
        let used =
            used.zip(before.and_then(|before| before.used)).and_then(|(now, then)| now.checked_sub(then));
        let used = used.map_or(found.run, |used| (used.as_secs_f64() - ours).max(0.0));
        // Of a while: few may be alive at a reading, and be looked at when they have only waited.
        let (run, wanted) = self.lately;
        self.lately = (run * LATELY_KEPT + found.run, wanted * LATELY_KEPT + found.wanted);
        let (unseen, owed) = unseen(used - found.run, self.owed);
        self.owed = owed;
        Some(found.demand + (ours + unseen * waited(self.lately)) / elapsed)
    }

    /// CPU time of everything in the node so far. A container without a group of its own does not know: there, what has
    /// ended is not counted.
    fn used(&self) -> Option<Duration> {
        match self.container {
            true => self.groups.used(),
            false => Some(Times::parse(&fs::read_to_string("/proc/stat").ok()?)?.busy),
        }
    }

    fn visit(&mut self, pid: i32, inode: u64, now: Instant, elapsed: Option<Duration>) -> Found {
        let known = self.known.entry(pid).or_insert_with(|| Known::new(now));
        known.there = self.readings;
        if known.inode != inode {
            let stat = self.proc.stat(pid).map(|(stat, _)| stat);
            // The kernel's own threads are only among those of a whole machine.
            known.of_kernel = !self.container && stat.as_ref().is_some_and(|stat| stat.of_kernel);
            // Who was there before the first reading has run before it.
            let before = |ticks: u64| if elapsed.is_none() { seconds(ticks) } else { 0.0 };
            let ours = stat.filter(|stat| OURS.contains(&&*stat.command));
            known.ours = ours.map(|stat| before(stat.ticks));
            known.inode = inode;
            known.rested = 0;
        }
        if let Some(before) = &mut known.ours {
            let Some((stat, _)) = self.proc.stat(pid) else { return Found::default() };
            // A guest begins as a part of its shim, and then takes a name of its own.
            if OURS.contains(&&*stat.command) {
                let ours = (seconds(stat.ticks) - *before).max(0.0);
                *before = seconds(stat.ticks);
                return Found { ours, ..Found::default() };
            }
            known.ours = None;
        }
        let turn = self.readings.wrapping_add(pid.unsigned_abs()).is_multiple_of(self.turns);
        if known.of_kernel || (known.rested >= RESTS && !turn) {
            return Found::default();
        }
        let span = match known.threads.is_empty() {
            // Who is new was born since the last reading.
            true => elapsed.unwrap_or_default(),
            false => now.duration_since(known.read),
        };
        known.read = now;
        let fresh = known.reread(pid, &self.proc);
        known.rested = if fresh.is_some() { 0 } else { known.rested.saturating_add(1) };
        // The first reading of all only says where the counters are.
        fresh.filter(|_| elapsed.is_some()).map_or_else(Found::default, |fresh| Found::over(&fresh, span))
    }

    fn keep_to_budget(&mut self, cost: Duration) {
        if cost > BUDGET {
            self.turns = (self.turns + 1).min(MOST_TURNS);
        } else if self.turns > 1 && cost * self.turns < (self.turns - 1) * BUDGET * 3 / 4 {
            self.turns -= 1;
        }
    }
}

impl Known {
    fn new(now: Instant) -> Self {
        Self { inode: 0, of_kernel: false, ours: None, threads: Vec::new(), read: now, rested: 0, there: 0 }
    }

    /// Reads its threads; what came since, of all of them. Nothing if it has not run, or has ended.
    fn reread(&mut self, pid: i32, proc: &ProcDir) -> Option<Turns> {
        let alone = match self.threads.as_slice() {
            [] => Some(Turns::default()),
            [(_, before)] => Some(*before),
            _ => None,
        };
        if let Some(before) = alone {
            let first = proc.turns(pid)?;
            // Who has not run has made no threads.
            if first == before {
                return None;
            }
            if proc.threads(pid)? == 1 {
                let fresh = first.since(&before);
                self.threads = vec![(pid, first)];
                return Some(fresh);
            }
        }
        let threads = proc.turns_of_threads(pid);
        let fresh = threads.iter().map(|(tid, turns)| turns.since(&self.before(*tid)));
        let fresh = fresh.fold(Turns::default(), |sum, one| sum.plus(&one));
        self.threads = threads;
        (fresh != Turns::default()).then_some(fresh)
    }

    fn before(&self, tid: i32) -> Turns {
        let known = self.threads.iter().find(|(one, _)| *one == tid);
        known.map_or_else(Turns::default, |(_, turns)| *turns)
    }
}

impl Found {
    /// Counters that grew within the span.
    fn over(fresh: &Turns, span: Duration) -> Self {
        let run = fresh.run as f64 / 1e9;
        let wanted = fresh.wanted() as f64 / 1e9;
        Self { run, wanted, demand: wanted / span.as_secs_f64().max(1e-3), ours: 0.0 }
    }

    fn add(&mut self, other: Self) {
        self.run += other.run;
        self.wanted += other.wanted;
        self.demand += other.demand;
    }
}

fn seconds(ticks: u64) -> f64 {
    ticks as f64 / TICKS as f64
}

/// What those have used who are not found any more, in seconds, and what is owed from now on, when so much more was used
/// than was found.
///
/// Both counts are of the same time, but not made at the same instant, and who rests may be read later than he is
/// counted in the node's. So what is found too much now is set against what is missing next, and is forgotten by and by.
fn unseen(more: f64, owed: f64) -> (f64, f64) {
    let missing = more + owed;
    (missing.max(0.0), missing.clamp(-1.0, 0.0) * OWED_KEPT)
}

/// How long they wanted a CPU for each second that they had one.
fn waited((run, wanted): (f64, f64)) -> f64 {
    if run > 1e-6 { (wanted / run).clamp(1.0, MOST_WAIT) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_ended_is_taken_to_have_waited_like_the_others() {
        assert_eq!(unseen(0.5, 0.0), (0.5, 0.0));
        assert_eq!((waited((0.5, 1.0)), waited((0.0, 0.0)), waited((1.0, 0.9))), (2.0, 1.0, 1.0));
        assert_eq!(waited((1e-3, 1e9)), MOST_WAIT);
        // Counted in threads before it is in the node's time: it is not counted again then.
        let (none, owed) = unseen(-0.2, 0.0);
        assert!(none == 0.0 && (-0.2..-0.1).contains(&owed), "{owed}");
        assert!(unseen(0.2, owed).0 < 0.05);
        // However wrong the counts are, a second is owed at most.
        assert!(unseen(-1e9, -1e9).1 >= -1.0);
    }

    #[test]
    fn readings_that_take_long_are_made_in_turns_and_no_longer_than_needed() {
        let mut demand = Demand::new(Groups::default());
        for _ in 0..20 {
            demand.keep_to_budget(BUDGET * 2);
        }
        assert_eq!(demand.turns, MOST_TURNS);
        demand.keep_to_budget(BUDGET * 9 / 10);
        assert_eq!(demand.turns, MOST_TURNS, "with one turn less it would take too long");
        for _ in 0..20 {
            demand.keep_to_budget(BUDGET / 10);
        }
        assert_eq!(demand.turns, 1);
    }

    #[test]
    fn counters_become_threads() {
        let second = Duration::from_secs(1);
        let fresh = Turns { run: 500_000_000, wait: 1_500_000_000, turns: 9 };
        assert_eq!(Found::over(&fresh, second * 2), Found { run: 0.5, wanted: 2.0, demand: 1.0, ours: 0.0 });
    }

    /// The counters of a thread that works go on, and those of one that sleeps do not.
    #[test]
    fn only_who_wants_a_cpu_is_counted() {
        let proc = ProcDir::open();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        let mut known = Known::new(Instant::now());
        assert!(known.reread(pid, &proc).is_some(), "it was started");
        // It may still be on its way into its sleep.
        let end = Instant::now() + Duration::from_secs(20);
        while known.reread(pid, &proc).is_some() {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(20));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(known.reread(pid, &proc), None);

        let own = std::process::id() as i32;
        let mut known = Known::new(Instant::now());
        known.reread(own, &proc).unwrap();
        let began = own_time();
        while own_time() - began < Duration::from_millis(50) {}
        let fresh = known.reread(own, &proc).unwrap();
        assert!(fresh.run >= 40_000_000, "{fresh:?}");
    }
}
