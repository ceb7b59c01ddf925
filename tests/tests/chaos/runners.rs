//! Runs programs of the catalogue, one after the other, and compares their outcomes.

use crate::{Chaos, lock};
use anyhow::{Context, Result};
use std::time::Duration;
use tern_tests::cluster::fault_injection::LOST_STATUS;
use tern_tests::moves::journey::{Journey, native, title};
use tern_tests::programs::catalogue::{Entry, Input, migratable};
use tern_tests::programs::generated_input::Sequence;
use tern_tests::programs::{Flavour, executable, wanted};
use tern_tests::runs::outcome::Outcome;
use tern_tests::runs::running::{ANNOUNCE, Running};

/// How long a program may take to end: a cut, a stopped shim, and a busy machine.
const END_TIMEOUT: Duration = Duration::from_secs(240);

/// Programs that check that a wait takes no longer than some seconds, which a stopped shim or a cut
/// may delay for longer.
const TIMED: [&str; 6] = ["alarms", "epolls", "polling", "sigmask", "sleep", "waiting"];

/// Seconds that a program runs, before it is asked to end.
const MIN_LIFE: u64 = 3;
const MAX_LIFE: u64 = 30;

/// Starts programs until the run is over. `runner` is the number of this thread.
pub(crate) fn run_programs(chaos: &Chaos, runner: u64) {
    let is_used = |entry: &&Entry| {
        entry.input == Input::None
            && entry.name != "ending"
            && !TIMED.contains(&entry.name)
            && wanted("TERN_PROGRAMS", entry.name)
    };
    let entries: Vec<&'static Entry> = migratable().filter(is_used).collect();
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

fn run_one(
    chaos: &Chaos,
    entry: &'static Entry,
    flavour: Flavour,
    until: &str,
    life: Duration,
) -> Result<()> {
    // Not each program exists in each flavour.
    let Some(program) = executable(entry, flavour)? else { return Ok(()) };
    // A program that needs a longer time without Tern's help is of no use here.
    let expected = native(entry, flavour, Journey::PingPong)?;
    let mut command = chaos.cluster.command(1, "sh");
    command.args(["-c", ANNOUNCE, "sh"]).arg(program).args(entry.args);
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
    let end = end.with_context(|| {
        let state = chaos.cluster.diagnostics(pid);
        // It must not keep the run from ending.
        let _gone = chaos.cluster.run(1, &["kill", "-KILL", &pid.to_string()]);
        format!("pid {pid}\n{state}")
    })?;
    judge(chaos, &end, &expected, was_endangered).with_context(|| format!("pid {pid}"))
}

/// Whether a program that may have been endangered has ended as it should.
fn judge(chaos: &Chaos, end: &Outcome, expected: &Outcome, was_endangered: bool) -> Result<()> {
    let Some(difference) = end.difference(expected) else {
        chaos.count("programs ended as without Tern");
        return Ok(());
    };
    // If a process of its family was lost, it reports that in its own way.
    if was_endangered {
        let lost = if end.status == LOST_STATUS { "lost" } else { "lost a relative" };
        chaos.count(&format!("programs {lost} when a shim was killed"));
        return Ok(());
    }
    anyhow::bail!("{difference}")
}
