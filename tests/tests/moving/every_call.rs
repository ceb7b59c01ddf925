//! A program is frozen at each system call that it makes away and comes home there, once before the
//! call is made and once after it was made but before its result is delivered. The output must be
//! that of a run without migration.
//!
//! Each call and each of the two moments takes one run of the program. A freeze that a test
//! requests could not hit every call. Therefore the home shim itself fetches the process home at
//! the call that `TERN_FREEZE_FILE` names (crates/migrate/src/fault.rs).

use anyhow::{Context, Result};
use std::fs;
use tern_tests::cluster::Cluster;
use tern_tests::cluster::fault_injection::{await_up, kill_daemon, start_daemon};
use tern_tests::moves::journey::{Journey, frozen_at};
use tern_tests::programs::catalogue::migratable;
use tern_tests::programs::{Flavour, built, wanted};
use tern_tests::runs::verdict::Verdict;

/// Upper bound for the calls that a program makes in one round.
const MAX_CALLS: u64 = 2000;
const FREEZE_FILE: &str = "/tmp/freeze";

/// Pipes, processes, signals, waits.
#[test]
fn short_programs_survive_a_freeze_at_every_call() -> Result<()> {
    freeze_at_every_call("every-call", &["pipe", "sigself", "polling", "locks"])
}

/// Hundreds of calls.
#[test]
fn file_program_survives_a_freeze_at_every_call() -> Result<()> {
    freeze_at_every_call("every-file", &["file"])
}

fn freeze_at_every_call(name: &str, programs: &[&str]) -> Result<()> {
    built()?;
    let cluster = Cluster::without_quotas(name, 2)?;
    kill_daemon(&cluster, 1)?;
    start_daemon(&cluster, 1, &[format!("TERN_FREEZE_FILE={FREEZE_FILE}")])?;
    await_up(&cluster, 1)?;
    let file = cluster.lab().node(1).path(FREEZE_FILE)?;
    let mut verdict = Verdict::default();
    for &name in programs.iter().filter(|name| wanted("TERN_PROGRAMS", name)) {
        let entry = migratable().find(|e| e.name == name).context("there is no such program")?;
        for when in ["asked", "made"] {
            let mut calls = 0;
            for number in 1..MAX_CALLS {
                fs::write(&file, format!("{number} {when}"))?;
                let what = format!("{name}, call {number} {when}");
                verdict.each([(what, ())], 1, |()| {
                    frozen_at(&cluster, entry, Flavour::Static, Journey::StartedAway)
                });
                if !fs::read_to_string(&file)?.is_empty() {
                    break;
                }
                calls = number;
            }
            eprintln!("{name}: {calls} calls, {when}");
            if calls < 10 {
                verdict.each([(name.to_owned(), ())], 1, |()| Err(format!("it made {calls} calls away")));
            }
        }
    }
    verdict.conclude();
    Ok(())
}
