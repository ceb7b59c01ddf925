//! The storm itself: each process that is found gets a thread that moves it repeatedly until it
//! ends.
//!
//! The pauses between moves implement the requested rate; nothing relies on them for
//! synchronisation. ternd answers each move when the process runs at the destination, and only such
//! answers are counted as moves.

use super::every::Every;
use super::ternd::{self, Answer, HOME};
use crate::process::Process;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tern_ids::NodeId;

/// Stack size of a mover thread. There may be hundreds of them.
const STACK: usize = 256 << 10;
/// Maximum number of failures of Tern that are reported in full; further ones are only counted.
const MAX_REPORTED: usize = 20;

/// The results of the movers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moves {
    /// Moves that ternd reported as complete.
    pub moves: u64,
    /// Processes that were found.
    pub processes: u64,
    /// Processes that were moved at least once.
    pub moved: u64,
    /// Move requests that came too late: the process had ended.
    pub ended: u64,
    /// Reasons for refused moves, with their counts; numbers in a reason are replaced by `#`.
    pub refused: BTreeMap<String, u64>,
    /// Failures of Tern, though the program continued.
    pub broken: Vec<String>,
}

impl Moves {
    /// Adds the results of another run.
    pub(crate) fn add(&mut self, other: Self) {
        self.moves += other.moves;
        self.processes += other.processes;
        self.moved += other.moved;
        self.ended += other.ended;
        for (reason, count) in other.refused {
            *self.refused.entry(reason).or_default() += count;
        }
        self.broken.extend(other.broken);
    }
}

/// The parameters of a storm.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weather {
    /// Number of nodes, home included.
    pub(super) nodes: u16,
    /// Pauses between two moves of one process.
    pub(super) every: Every,
    /// Seed for pauses and destinations.
    pub(super) seed: u64,
}

/// State shared by the movers of a run.
#[derive(Debug)]
struct Shared {
    weather: Weather,
    tally: Mutex<Moves>,
    over: Mutex<bool>,
    news: Condvar,
}

impl Shared {
    fn tally(&self) -> MutexGuard<'_, Moves> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps for the pause; returns true if the storm ends before that.
    fn over_within(&self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        let mut over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if *over || left.is_zero() {
                return *over;
            }
            over = self.news.wait_timeout(over, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The mover threads of one run.
#[derive(Debug)]
pub(super) struct Movers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    known: HashSet<Process>,
}

impl Movers {
    /// Starts without any mover.
    pub(super) fn new(weather: Weather) -> Self {
        let shared =
            Shared { weather, tally: Mutex::default(), over: Mutex::new(false), news: Condvar::new() };
        Self { shared: Arc::new(shared), threads: Vec::new(), known: HashSet::new() }
    }

    /// Starts a mover for each new process. If no thread can be created, the next call tries again.
    pub(super) fn see(&mut self, living: &[Process]) {
        self.threads.retain(|thread| !thread.is_finished());
        for &process in living {
            if self.known.contains(&process) {
                continue;
            }
            let shared = Arc::clone(&self.shared);
            let number = self.known.len() as u64;
            let mover = thread::Builder::new().stack_size(STACK);
            if let Ok(thread) = mover.spawn(move || drive(&shared, process, number)) {
                self.known.insert(process);
                self.threads.push(thread);
            }
        }
    }

    /// Ends the storm. Returns when all pending moves are answered.
    pub(super) fn end(self) -> Moves {
        *self.shared.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.news.notify_all();
        for thread in self.threads {
            // A panic of a mover has been reported already.
            let _ = thread.join();
        }
        let mut moves = std::mem::take(&mut *self.shared.tally());
        moves.processes = self.known.len() as u64;
        moves
    }
}

/// Moves one process repeatedly until it ends.
fn drive(shared: &Shared, process: Process, number: u64) {
    let Weather { nodes, every, seed } = shared.weather;
    let mut random = StdRng::seed_from_u64(seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let (mut at, mut moved) = (None, false);
    while !shared.over_within(every.pick(&mut random)) && process.alive() {
        let mut to = elsewhere(&mut random, nodes, at);
        let mut answer = ternd::migrate(process.pid, to);
        if matches!(answer, Answer::There) {
            // Only ternd knows where a process starts, and where a call has moved it.
            to = elsewhere(&mut random, nodes, Some(to));
            answer = ternd::migrate(process.pid, to);
        }
        let mut tally = shared.tally();
        match answer {
            Answer::Moved => {
                tally.moves += 1;
                tally.moved += u64::from(!moved);
                (at, moved) = (Some(to), true);
            }
            Answer::Gone => {
                tally.ended += 1;
                return;
            }
            Answer::There => {
                *tally.refused.entry("it was there already".to_owned()).or_default() += 1;
                at = Some(to);
            }
            // A process that is ending refuses moves for many reasons.
            Answer::Refused(_) | Answer::Broken(_) if !process.alive() => {
                tally.ended += 1;
                return;
            }
            Answer::Refused(why) => {
                *tally.refused.entry(without_numbers(&why)).or_default() += 1;
                at = None;
            }
            Answer::Broken(why) => {
                if tally.broken.len() < MAX_REPORTED {
                    tally.broken.push(format!("{} to node {to}: {why}", process.pid));
                }
                at = None;
            }
        }
    }
}

/// A random node other than `but`.
fn elsewhere(random: &mut StdRng, nodes: u16, but: Option<NodeId>) -> NodeId {
    let all = HOME.0..HOME.0 + nodes;
    match but.filter(|but| all.contains(&but.0)) {
        None => NodeId(random.random_range(all)),
        Some(NodeId(but)) => {
            let nth = random.random_range(all.start..all.end - 1);
            NodeId(if nth >= but { nth + 1 } else { nth })
        }
    }
}

/// Replaces numbers, so that the same reason is counted as one for all processes.
fn without_numbers(text: &str) -> String {
    let mut out = String::new();
    for letter in text.chars() {
        if !letter.is_ascii_digit() {
            out.push(letter);
        } else if !out.ends_with('#') {
            out.push('#');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elsewhere_is_everywhere_but_here() {
        let mut random = StdRng::seed_from_u64(1);
        let mut seen = |but| {
            let all: std::collections::BTreeSet<u16> =
                (0..200).map(|_| elsewhere(&mut random, 3, but).0).collect();
            all.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(seen(None), [1, 2, 3]);
        assert_eq!(seen(Some(NodeId(1))), [2, 3]);
        assert_eq!(seen(Some(NodeId(2))), [1, 3]);
        assert_eq!(seen(Some(NodeId(3))), [1, 2]);
    }

    #[test]
    fn reasons_are_counted_together() {
        assert_eq!(without_numbers("threads: it has 12 threads"), "threads: it has # threads");
        assert_eq!(without_numbers("a1b23"), "a#b#");
    }

    #[test]
    fn runs_add_up() {
        let one = || Moves {
            moves: 2,
            refused: BTreeMap::from([("busy".to_owned(), 1)]),
            broken: vec!["x".to_owned()],
            ..Moves::default()
        };
        let mut all = one();
        all.add(one());
        assert_eq!((all.moves, all.refused["busy"], all.broken.len()), (4, 2, 2));
    }

    #[test]
    fn a_storm_that_is_over_does_not_pause() {
        let movers = Movers::new(Weather { nodes: 3, every: Every::default(), seed: 0 });
        let shared = Arc::clone(&movers.shared);
        assert!(!shared.over_within(Duration::ZERO));
        assert_eq!(movers.end(), Moves::default());
        assert!(shared.over_within(Duration::from_secs(1000)));
    }
}
