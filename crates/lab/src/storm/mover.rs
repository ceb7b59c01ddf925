//! The storm itself: each process that is found gets a thread that moves it repeatedly until it
//! ends.
//!
//! The pauses between moves implement the requested rate; nothing relies on them for
//! synchronisation. ternd answers each move when the process runs at the destination, and only such
//! answers are counted as moves.

use super::pause::PauseRange;
use super::ternd::{self, HOME, MoveResult};
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
const STACK_SIZE: usize = 256 << 10;
/// Maximum number of failures of Tern that are reported in full; further ones are only counted.
const MAX_REPORTED_FAILURES: usize = 20;

/// The results of the movers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveStats {
    /// Moves that ternd reported as complete.
    pub moves: u64,
    /// Processes that were found.
    pub processes: u64,
    /// Processes that were moved at least once.
    pub moved: u64,
    /// Move requests that came too late: the process had ended.
    #[serde(rename = "ended")]
    pub too_late: u64,
    /// Reasons for refused moves, with their counts; numbers in a reason are replaced by `#`.
    pub refused: BTreeMap<String, u64>,
    /// Failures of Tern, though the program continued.
    #[serde(rename = "broken")]
    pub failures: Vec<String>,
    /// The moves by the name of the program that was moved.
    pub programs: BTreeMap<String, ProgramMoves>,
}

/// The moves of the processes of one program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramMoves {
    /// Complete moves.
    pub moves: u64,
    /// Refused moves.
    pub refused: u64,
}

impl MoveStats {
    /// Adds the results of another run.
    pub(crate) fn add(&mut self, other: Self) {
        self.moves += other.moves;
        self.processes += other.processes;
        self.moved += other.moved;
        self.too_late += other.too_late;
        for (reason, count) in other.refused {
            *self.refused.entry(reason).or_default() += count;
        }
        self.failures.extend(other.failures);
        for (program, more) in other.programs {
            let all = self.programs.entry(program).or_default();
            *all = ProgramMoves { moves: all.moves + more.moves, refused: all.refused + more.refused };
        }
    }

    /// The moves of the program of this name.
    fn program(&mut self, name: String) -> &mut ProgramMoves {
        self.programs.entry(name).or_default()
    }
}

/// The name of the program that a process executes.
fn program_name(process: Process) -> String {
    let name = tern_control::procfs::read_text(format!("/proc/{}/comm", process.pid));
    name.unwrap_or_default().trim_end().to_owned()
}

/// The parameters of a storm.
#[derive(Debug, Clone, Copy)]
pub(super) struct StormParams {
    /// Number of nodes, home included.
    pub(super) nodes: u16,
    /// Pauses between two moves of one process.
    pub(super) pause: PauseRange,
    /// Seed for pauses and destinations.
    pub(super) seed: u64,
}

/// State shared by the movers of a run.
#[derive(Debug)]
struct Shared {
    params: StormParams,
    stats: Mutex<MoveStats>,
    ended: Mutex<bool>,
    end_signal: Condvar,
}

impl Shared {
    fn stats(&self) -> MutexGuard<'_, MoveStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps for the pause; returns true if the storm ends before that.
    fn ends_within(&self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if *ended || left.is_zero() {
                return *ended;
            }
            ended = self.end_signal.wait_timeout(ended, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The mover threads of one run.
#[derive(Debug)]
pub(super) struct Movers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    seen: HashSet<Process>,
}

impl Movers {
    /// Starts without any mover.
    pub(super) fn new(params: StormParams) -> Self {
        let shared =
            Shared { params, stats: Mutex::default(), ended: Mutex::new(false), end_signal: Condvar::new() };
        Self { shared: Arc::new(shared), threads: Vec::new(), seen: HashSet::new() }
    }

    /// Starts a mover for each new process. If no thread can be created, the next call tries again.
    pub(super) fn add_new(&mut self, living: &[Process]) {
        self.threads.retain(|thread| !thread.is_finished());
        for &process in living {
            if self.seen.contains(&process) {
                continue;
            }
            let shared = Arc::clone(&self.shared);
            let number = self.seen.len() as u64;
            let mover = thread::Builder::new().stack_size(STACK_SIZE);
            if let Ok(thread) = mover.spawn(move || move_until_end(&shared, process, number)) {
                self.seen.insert(process);
                self.threads.push(thread);
            }
        }
    }

    /// Ends the storm. Returns when all pending moves are answered.
    pub(super) fn end(self) -> MoveStats {
        *self.shared.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.end_signal.notify_all();
        for thread in self.threads {
            // A panic of a mover has been reported already.
            let _ = thread.join();
        }
        let mut moves = std::mem::take(&mut *self.shared.stats());
        moves.processes = self.seen.len() as u64;
        moves
    }
}

/// Moves one process repeatedly until it ends.
fn move_until_end(shared: &Shared, process: Process, number: u64) {
    let StormParams { nodes, pause, seed } = shared.params;
    let mut random = StdRng::seed_from_u64(seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let (mut at, mut moved) = (None, false);
    while !shared.ends_within(pause.pick(&mut random)) && process.is_alive() {
        let mut to = random_node_except(&mut random, nodes, at);
        // Read before the move, since the process may end after it.
        let program = program_name(process);
        let mut result = ternd::migrate(process.pid, to);
        if matches!(result, MoveResult::AlreadyThere) {
            // Only ternd knows where a process starts, and where a call has moved it.
            to = random_node_except(&mut random, nodes, Some(to));
            result = ternd::migrate(process.pid, to);
        }
        let mut stats = shared.stats();
        match result {
            MoveResult::Moved => {
                stats.moves += 1;
                stats.program(program).moves += 1;
                stats.moved += u64::from(!moved);
                (at, moved) = (Some(to), true);
            }
            MoveResult::ProcessEnded => {
                stats.too_late += 1;
                return;
            }
            MoveResult::AlreadyThere => {
                *stats.refused.entry("it was there already".to_owned()).or_default() += 1;
                at = Some(to);
            }
            // A process that is ending refuses moves for many reasons.
            MoveResult::Refused(_) | MoveResult::Failed(_) if !process.is_alive() => {
                stats.too_late += 1;
                return;
            }
            MoveResult::Refused(why) => {
                *stats.refused.entry(without_numbers(&why)).or_default() += 1;
                stats.program(program).refused += 1;
                at = None;
            }
            MoveResult::Failed(why) => {
                if stats.failures.len() < MAX_REPORTED_FAILURES {
                    stats.failures.push(format!("{} to node {to}: {why}", process.pid));
                }
                at = None;
            }
        }
    }
}

/// A random node other than `except`.
fn random_node_except(random: &mut StdRng, nodes: u16, except: Option<NodeId>) -> NodeId {
    let all = HOME.0..HOME.0 + nodes;
    match except.filter(|except| all.contains(&except.0)) {
        None => NodeId(random.random_range(all)),
        Some(NodeId(except)) => {
            let nth = random.random_range(all.start..all.end - 1);
            NodeId(if nth >= except { nth + 1 } else { nth })
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
    fn random_node_is_any_node_except_the_given_one() {
        let mut random = StdRng::seed_from_u64(1);
        let mut seen = |except| {
            let all: std::collections::BTreeSet<u16> =
                (0..200).map(|_| random_node_except(&mut random, 3, except).0).collect();
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
        let one = || MoveStats {
            moves: 2,
            refused: BTreeMap::from([("busy".to_owned(), 1)]),
            failures: vec!["x".to_owned()],
            programs: BTreeMap::from([("make".to_owned(), ProgramMoves { moves: 2, refused: 1 })]),
            ..MoveStats::default()
        };
        let mut all = one();
        all.add(one());
        assert_eq!((all.moves, all.refused["busy"], all.failures.len()), (4, 2, 2));
        assert_eq!(all.programs["make"], ProgramMoves { moves: 4, refused: 2 });
    }

    #[test]
    fn a_storm_that_is_over_does_not_pause() {
        let movers = Movers::new(StormParams { nodes: 3, pause: PauseRange::default(), seed: 0 });
        let shared = Arc::clone(&movers.shared);
        assert!(!shared.ends_within(Duration::ZERO));
        assert_eq!(movers.end(), MoveStats::default());
        assert!(shared.ends_within(Duration::from_secs(1000)));
    }
}
