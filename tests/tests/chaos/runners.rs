//! Runs programs of the catalogue, one after the other, and compares their outcomes.

use crate::{Chaos, lock};
use anyhow::{Context, Result};
use std::time::Duration;
use tern_tests::cluster::fault_injection::LOST_STATUS;
use tern_tests::cluster::stalling_files;
use tern_tests::moves::journey::{Journey, native, title};
use tern_tests::programs::catalogue::{Entry, Input, migratable};
use tern_tests::programs::generated_input::Sequence;
use tern_tests::programs::{Flavour, executable, wanted};
use tern_tests::runs::outcome::Outcome;
use tern_tests::runs::running::{ANNOUNCE, Running};

/// How long a program may take to end: a cut, a stopped shim, and a busy machine.
const END_TIMEOUT: Duration = Duration::from_secs(240);

/// Programs that check that a wait ends within some seconds. A stopped shim or a cut may delay the
/// end of that wait for longer.
const TIMED: [&str; 6] = ["alarms", "epolls", "polling", "sigmask", "sleep", "waiting"];

/// Programs with a known defect: a transfer whose move is cancelled may return a short count
/// (docs/reference/limits.md). Faults cancel many moves.
const DEFECTIVE: [&str; 2] = ["pipe_big", "socketpair"];

/// How a program reports ENOMEM.
const NO_MEMORY: &str = "(errno 12:";

/// Seconds that a program runs, before it is asked to end.
const MIN_LIFE: u64 = 3;
const MAX_LIFE: u64 = 30;

/// The program that uses the file system that can stall. One of every `STALLING_EACH` runners runs
/// only this program.
const STALLING: &str = "stalling";
const STALLING_EACH: u64 = 8;

/// The programs that are started, without the one that uses the file system that can stall.
fn entries() -> Vec<&'static Entry> {
    let is_used = |entry: &&Entry| {
        entry.input == Input::None
            && !["ending", STALLING].contains(&entry.name)
            && !TIMED.contains(&entry.name)
            && !DEFECTIVE.contains(&entry.name)
            && wanted("TERN_PROGRAMS", entry.name)
    };
    migratable().filter(is_used).collect()
}

/// Starts programs until the run is over. `runner` is the number of this thread.
pub(crate) fn run_programs(chaos: &Chaos, runner: u64) {
    let mut entries = entries();
    if entries.is_empty() || runner.is_multiple_of(STALLING_EACH) && wanted("TERN_PROGRAMS", STALLING) {
        entries = migratable().filter(|entry| entry.name == STALLING).collect();
    }
    let mut random = Sequence(chaos.seed.wrapping_add(runner));
    let mut number = 0;
    while !chaos.is_over() {
        let entry = entries[random.below(entries.len() as u64) as usize];
        let flavour = Flavour::ALL[random.below(3) as usize];
        let life = Duration::from_secs(MIN_LIFE + random.below(MAX_LIFE - MIN_LIFE));
        number += 1;
        let until = format!("/tmp/chaos-{runner}-{number}");
        let what = title(entry, flavour);
        if let Err(error) = run_one(chaos, entry, flavour, &until, life) {
            chaos.fail(format!("{what}: {error:#}"));
        }
    }
}

/// Runs one program that does not use the file system that can stall.
pub(crate) fn run_another(chaos: &Chaos, chance: u64, when: &str) {
    let entries = entries();
    let mut random = Sequence(chance);
    let Some(entry) = entries.get(random.below(entries.len().max(1) as u64) as usize) else { return };
    let until = format!("/tmp/chaos-another-{chance}");
    if let Err(error) = run_one(chaos, entry, Flavour::Static, &until, Duration::from_secs(MIN_LIFE)) {
        chaos.fail(format!("{when}: {}: {error:#}", title(entry, Flavour::Static)));
    }
}

fn run_one(
    chaos: &Chaos,
    entry: &'static Entry,
    flavour: Flavour,
    until: &str,
    life: Duration,
) -> Result<()> {
    // Not each program exists in each flavour.
    let Some(program) = executable(entry, flavour)? else { return Ok(()) };
    // Fails if the program does not end in time even without Tern.
    let expected = native(entry, flavour, Journey::PingPong)?;
    let mut command = chaos.cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh"]).arg(program).args(entry.args);
    if entry.name == STALLING {
        command.arg(stalling_files::FILE);
    }
    command.env("TERN_SECONDS", "0").env("TERN_UNTIL", until).env("TERN_HEAP_MIB", "16").env("LC_ALL", "C");
    let mut running = Running::start(&mut command, false)?;
    running.close_input();
    let pid = running.pid;
    lock(&chaos.running).insert(pid);
    chaos.sleep(life);
    chaos.cluster.touch(until)?;
    let end = running.finish(END_TIMEOUT);
    lock(&chaos.running).remove(&pid);
    let was_endangered = lock(&chaos.endangered).remove(&pid);
    let was_limited = lock(&chaos.scarcity).remove(pid);
    let end = end.with_context(|| {
        let state = chaos.cluster.diagnostics(pid);
        // A program that hangs must not keep the run from ending.
        let _gone = chaos.cluster.run(1, &["kill", "-KILL", &pid.to_string()]);
        format!("pid {pid}\n{state}")
    })?;
    judge(chaos, &end, &expected, was_endangered, was_limited)
        .with_context(|| format!("pid {pid}, limited {was_limited}\n{}", chaos.cluster.shim_logs(pid)))
}

/// Whether a program has ended as it should. It may have been endangered, or on a node whose memory
/// was limited.
fn judge(
    chaos: &Chaos,
    end: &Outcome,
    expected: &Outcome,
    was_endangered: bool,
    was_limited: bool,
) -> Result<()> {
    let Some(difference) = end.difference(expected) else {
        chaos.count("programs ended as without Tern");
        return Ok(());
    };
    // A program that has lost a process of its family reports that in its own way.
    let lost = if end.status == LOST_STATUS { "lost" } else { "lost a relative" };
    if was_endangered {
        chaos.count(&format!("programs {lost} when a shim was killed"));
        return Ok(());
    }
    if was_limited && lock(&chaos.scarcity).claim(chaos)? {
        chaos.count(&format!("programs {lost} because of the limit on memory"));
        return Ok(());
    }
    if was_limited && String::from_utf8_lossy(&end.err).contains(NO_MEMORY) {
        chaos.count("programs refused memory because of the limit");
        return Ok(());
    }
    anyhow::bail!("{difference}")
}
