//! A program is frozen at every single system call that it makes away, once asked for and not made, once made and its
//! result not delivered, and comes home there: the same output as without moving.
//!
//! One run of the program for each call and each of the two. A home shim stops at the call by itself, since nobody
//! else could hit each of them: `TERN_FREEZE_FILE` (crates/migrate/src/fault.rs).

use anyhow::{Context, Result};
use std::fs;
use tern_tests::breaking::{await_up, kill_daemon, start_daemon};
use tern_tests::catalogue::movable;
use tern_tests::cluster::Cluster;
use tern_tests::journey::{Journey, frozen_at};
use tern_tests::programs::{Flavour, built, wanted};
use tern_tests::verdict::Verdict;

/// No program makes more calls than this in one round.
const MOST: u64 = 2000;
const FILE: &str = "/tmp/freeze";

/// Pipes, processes, signals, waits.
#[test]
fn of_short_programs() -> Result<()> {
    freeze("every-call", &["pipe", "sigself", "polling", "locks"])
}

/// Hundreds of calls.
#[test]
fn of_a_program_with_files() -> Result<()> {
    freeze("every-file", &["file"])
}

fn freeze(name: &str, programs: &[&str]) -> Result<()> {
    built()?;
    let cluster = Cluster::with_nodes(name, 2)?;
    kill_daemon(&cluster, 1)?;
    start_daemon(&cluster, 1, &[format!("TERN_FREEZE_FILE={FILE}")])?;
    await_up(&cluster, 1)?;
    let file = cluster.lab().node(1).path(FILE)?;
    let mut verdict = Verdict::default();
    for &name in programs.iter().filter(|name| wanted("TERN_PROGRAMS", name)) {
        let entry = movable().find(|e| e.name == name).context("there is no such program")?;
        for when in ["asked", "made"] {
            let mut calls = 0;
            for number in 1..MOST {
                fs::write(&file, format!("{number} {when}"))?;
                let what = format!("{name}, call {number} {when}");
                verdict.each([(what, ())], 1, |()| {
                    frozen_at(&cluster, entry, Flavour::Static, Journey::BornAway)
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
    verdict.pronounce();
    Ok(())
}
