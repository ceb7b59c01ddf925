//! Programs of the catalogue run on three nodes, are moved at random, and meet faults all the time:
//! cut cables, killed and stopped daemons and shims, a greedy stranger on the node, a file system
//! that stalls, and limits on the tasks of a shim and on the memory of a node's guests.
//! Each program must end as it does without Tern. It may be lost only if a shim that it needed was
//! killed, or if the kernel killed it because of the limit on memory. At the end nothing is left on
//! any node.
//!
//! `TERN_CHAOS_SECONDS` is the length (an hour), `TERN_CHAOS_PROGRAMS` how many programs run at the
//! same time (40), `TERN_SEED=N` repeats a run's choices as far as its timing allows,
//! `TERN_PROGRAMS=file,pipe` and `TERN_FAULTS=cut,kill-shim` select programs and faults.
#![allow(clippy::unwrap_used, reason = "tests and their helpers fail by panicking")]
#![forbid(unsafe_code)]

mod faults;
mod moves;
mod runners;
mod scarcity;

use scarcity::Scarcity;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::await_nothing_left;
use tern_tests::cluster::stalling_files::{StallingFiles, Waiting};

/// The nodes; programs are started on the first.
const NODES: u16 = 3;

/// How long the remains of the last programs may stay on a node.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(120);

/// The state that the threads of a run share.
#[derive(Debug)]
struct Chaos {
    /// A file system of node 1.
    files: StallingFiles,
    cluster: Cluster,
    seed: u64,
    end: Instant,
    /// Pids of the programs that run, in the numbering of node 1.
    running: Mutex<BTreeSet<i32>>,
    /// The running programs that may be lost: a shim that they may have needed was killed.
    endangered: Mutex<BTreeSet<i32>>,
    /// All programs that were ever in `endangered`.
    ever_endangered: Mutex<BTreeSet<i32>>,
    /// Grows by one before ternd of node 1 is killed, and by one when another has started.
    restarts: AtomicU64,
    /// The running programs that are being moved.
    moving: Mutex<BTreeSet<i32>>,
    scarcity: Mutex<Scarcity>,
    /// How often each thing has happened.
    counts: Mutex<BTreeMap<String, u64>>,
    failures: Mutex<Vec<String>>,
}

impl Chaos {
    fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }

    fn count(&self, what: &str) {
        self.count_all(what, 1);
    }

    fn count_all(&self, what: &str, number: u64) {
        *lock(&self.counts).entry(what.to_owned()).or_default() += number;
    }

    fn fail(&self, why: String) {
        eprintln!("✗ {why}");
        lock(&self.failures).push(why);
    }

    /// Sleeps, but not beyond the end of the run.
    fn sleep(&self, time: Duration) {
        std::thread::sleep(time.min(self.end.saturating_duration_since(Instant::now())));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

#[test]
fn programs_survive_faults_of_all_kinds() {
    let seconds = number("TERN_CHAOS_SECONDS", 3600);
    let seed = number("TERN_SEED", std::process::id().into());
    let programs = number("TERN_CHAOS_PROGRAMS", 40);
    eprintln!("{programs} programs for {seconds} s; repeat with TERN_SEED={seed}");
    let cluster = Cluster::without_quotas("chaos", NODES).unwrap();
    cluster.expect_blocked_loops();
    let chaos = Chaos {
        files: StallingFiles::mount(&cluster, 1, Waiting::All).unwrap(),
        cluster,
        seed,
        end: Instant::now() + Duration::from_secs(seconds),
        running: Mutex::default(),
        endangered: Mutex::default(),
        ever_endangered: Mutex::default(),
        restarts: AtomicU64::default(),
        moving: Mutex::default(),
        scarcity: Mutex::default(),
        counts: Mutex::default(),
        failures: Mutex::default(),
    };
    std::thread::scope(|scope| {
        for runner in 0..programs {
            let chaos = &chaos;
            scope.spawn(move || runners::run_programs(chaos, runner));
        }
        for mover in 0..moves::MOVERS {
            let chaos = &chaos;
            scope.spawn(move || moves::move_at_random(chaos, mover));
        }
        scope.spawn(|| faults::inject(&chaos));
    });
    for (what, count) in &*lock(&chaos.counts) {
        eprintln!("{count:8} {what}");
    }
    if let Err(left) = await_nothing_left(&chaos.cluster, &[1, 2, 3], CLEAN_UP_TIMEOUT) {
        chaos.fail(format!("{left:#}"));
    }
    let failures = lock(&chaos.failures);
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}
