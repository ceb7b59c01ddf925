//! Programs of random system calls (`programs/randomcalls.c`) run on three nodes and are moved at
//! random. Each must have the output of a run without migration.
//!
//! `TERN_CALLS_SECONDS` is the length (an hour), `TERN_SEED=N` the first seed (by default one that
//! depends on the time), `TERN_SEEDS=M` repeats the first M seeds only, and `TERN_STEPS` is the
//! number of calls of a program's first process. A run with fewer steps makes the same calls up to
//! there, so `TERN_SEED=N TERN_SEEDS=1 TERN_STEPS=50` repeats the beginning of one program until
//! the time is over.
#![allow(clippy::unwrap_used, reason = "tests and their helpers fail by panicking")]
#![forbid(unsafe_code)]

use anyhow::{Context, Result, anyhow, bail};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tern_tests::cluster::Cluster;
use tern_tests::moves::random_moves::{Moves, move_randomly};
use tern_tests::programs::{Flavour, named};
use tern_tests::runs::outcome::Outcome;
use tern_tests::runs::running::{ANNOUNCE, Running};

/// Programs that run at the same time.
const RUNNERS: usize = 3;
/// A program may end after this many moves.
const MIN_MOVES: u32 = 8;
/// A program may also end after this time, if most of its moves are refused.
const MAX_LIFE: Duration = Duration::from_secs(8);
const END_TIMEOUT: Duration = Duration::from_secs(120);
/// Failed programs after which the test ends.
const MAX_FAILURES: usize = 20;

/// Seeds and limits of this run.
#[derive(Debug)]
struct Plan {
    first: u64,
    seeds: u64,
    steps: u64,
    end: Instant,
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// The command line of a program, behind these words.
fn words(before: &[&str], seed: u64, steps: u64) -> Result<Vec<String>> {
    let program = named("randomcalls", Flavour::Dynamic)?;
    let words = before.iter().map(ToString::to_string);
    Ok(words.chain([program.display().to_string(), seed.to_string(), steps.to_string()]).collect())
}

/// On node 1 too: some results depend on the file system.
fn without_migration(cluster: &Cluster, seed: u64, steps: u64) -> Result<Outcome> {
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh"]).args(words(&[], seed, steps)?).env("TERN_SECONDS", "0");
    let outcome = Running::start(&mut command, false)?.finish(END_TIMEOUT)?;
    if !outcome.out.ends_with(b"PASS\n") {
        bail!("it fails without migration: {outcome:?}");
    }
    Ok(outcome)
}

/// Runs a program under moves; returns its outcome, and the moves. `number` is that of the run.
fn with_moves(cluster: &Cluster, seed: u64, steps: u64, number: u64) -> Result<(Result<Outcome>, Moves)> {
    let until = format!("/tmp/calls-{number}");
    let mut command = cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh"]).args(words(&["mosrun", "-L"], seed, steps)?);
    command.env("TERN_SECONDS", "0").env("TERN_UNTIL", &until);
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let (pid, stop, begun) = (running.pid, AtomicBool::new(false), Instant::now());
    let enough = || {
        // If this file cannot be created, the program runs for too long, and the test fails.
        let _fails_then = cluster.touch(&until);
    };
    let (end, moves) = std::thread::scope(|scope| {
        let mover = scope.spawn(|| {
            move_randomly(cluster, pid, seed ^ number, &stop, |done| {
                if done == MIN_MOVES {
                    enough();
                }
            })
        });
        while !running.has_ended() && begun.elapsed() < MAX_LIFE {
            std::thread::sleep(Duration::from_millis(50));
        }
        enough();
        let end = running.finish(END_TIMEOUT).with_context(|| cluster.diagnostics(pid));
        stop.store(true, Ordering::Relaxed);
        if end.is_err() {
            // A program that hangs must not disturb the next ones; it may have ended already.
            let _gone = cluster.run(1, &["kill", "-KILL", &pid.to_string()]);
        }
        (end, mover.join())
    });
    Ok((end, moves.map_err(|_panic| anyhow!("the mover failed"))??))
}

/// Compares one program's runs. Counts its moves.
fn check(
    cluster: &Cluster,
    seed: u64,
    steps: u64,
    number: u64,
    counts: &Mutex<BTreeMap<String, u64>>,
) -> Result<()> {
    let native = without_migration(cluster, seed, steps)?;
    let (end, moves) = with_moves(cluster, seed, steps, number)?;
    let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
    *counts.entry("moves".into()).or_default() += u64::from(moves.done);
    for refused in &moves.refused {
        let reason: String = refused.chars().filter(|c| !c.is_ascii_digit()).take(90).collect();
        *counts.entry(format!("refused: {reason}")).or_default() += 1;
    }
    drop(counts);
    let made = || format!("moves: {}\nrefused: {:?}", moves.made.join(", "), moves.refused);
    let outcome = end.with_context(made)?;
    if let Some(difference) = outcome.difference(&native) {
        bail!("{difference}{}\n{}", String::from_utf8_lossy(&outcome.err), made());
    }
    if !moves.broken.is_empty() {
        bail!("moves failed: {:?}\n{}", moves.broken, made());
    }
    Ok(())
}

#[test]
fn random_calls_have_the_same_results_under_moves() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let plan = Plan {
        first: number("TERN_SEED", now.as_secs() % 1_000_000_000),
        seeds: number("TERN_SEEDS", u64::MAX),
        steps: number("TERN_STEPS", 600),
        end: Instant::now() + Duration::from_secs(number("TERN_CALLS_SECONDS", 3600)),
    };
    let cluster = Cluster::without_quotas("calls", 3).unwrap();
    let (next, failures, counts) = (AtomicU64::new(0), Mutex::new(Vec::new()), Mutex::default());
    std::thread::scope(|scope| {
        for _ in 0..RUNNERS {
            scope.spawn(|| {
                loop {
                    let failed = failures.lock().unwrap_or_else(PoisonError::into_inner).len();
                    if Instant::now() >= plan.end || failed >= MAX_FAILURES {
                        return;
                    }
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let seed = plan.first.wrapping_add(number % plan.seeds);
                    if let Err(error) = check(&cluster, seed, plan.steps, number, &counts) {
                        let why = format!(
                            "seed {seed}, {} steps: {error:#}\nrepeat with TERN_SEED={seed} TERN_SEEDS=1 TERN_STEPS={} make test-calls",
                            plan.steps, plan.steps
                        );
                        eprintln!("✗ {why}");
                        failures.lock().unwrap_or_else(PoisonError::into_inner).push(seed);
                    }
                }
            });
        }
    });
    for (what, count) in &*counts.lock().unwrap_or_else(PoisonError::into_inner) {
        eprintln!("{count:8} {what}");
    }
    eprintln!("{:8} programs, from seed {}", next.into_inner(), plan.first);
    let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    assert!(failures.is_empty(), "differences with the seeds {failures:?}");
}
