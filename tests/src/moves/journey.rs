//! A journey: where a program is moved while it runs, and the check that it ran there.

use crate::cluster::Cluster;
use crate::programs::catalogue::{Entry, Input, Kind};
use crate::programs::{Flavour, executable};
use crate::runs::native_outcomes;
use crate::runs::outcome::Outcome;
use crate::runs::running::{ANNOUNCE, Running};
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Limit for a run, including all its moves.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);
/// CPU seconds that a computing program must use on the node it was moved to.
const MIN_CPU_SECONDS: f64 = 0.05;
/// Lines sent to a program that reads lines; the moves happen between them.
const LINES: [&str; 5] = ["one", "two words", "", "four", "five"];

/// Where a program is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Journey {
    /// Nowhere: started with `mosrun -h`.
    Home,
    /// 1 → 2, where it ends.
    Out,
    /// 1 → 2 → 1.
    OutAndHome,
    /// 1 → 2 → 3 → 1.
    Onward,
    /// 1 ↔ 2, at most twenty times a second.
    PingPong,
    /// Started with `mosrun -2`.
    StartedAway,
}

impl Journey {
    /// Its name, used for the lab.
    pub fn name(self) -> &'static str {
        match self {
            Self::Home => "home",
            Self::Out => "out",
            Self::OutAndHome => "out-and-home",
            Self::Onward => "onward",
            Self::PingPong => "ping-pong",
            Self::StartedAway => "born-away",
        }
    }

    fn start(self) -> &'static [&'static str] {
        match self {
            Self::Home => &["-h"],
            Self::StartedAway => &["-2"],
            // Locked: on a busy machine the balancer would move it too.
            _ => &["-L"],
        }
    }

    fn stops(self) -> Vec<&'static str> {
        match self {
            Self::Home | Self::StartedAway => vec![],
            Self::Out => vec!["2"],
            Self::OutAndHome => vec!["2", "home"],
            Self::Onward => vec!["2", "3", "home"],
            Self::PingPong => ["2", "home"].repeat(15),
        }
    }

    /// MiB of heap for the program that allocates one.
    fn heap_mib(self) -> &'static str {
        if self == Self::PingPong { "16" } else { "256" }
    }
}

/// The outcome of the program without migration. One run serves all test programs of a `cargo
/// nextest run`.
///
/// # Errors
/// If it is not built, cannot be run, or fails.
pub fn native(entry: &'static Entry, flavour: Flavour, journey: Journey) -> Result<Outcome> {
    let key = format!("{}, {} MiB", title(entry, flavour), journey.heap_mib());
    native_outcomes::get_or_run(&key, || run_without_migration(None, entry, flavour, journey))
}

/// Runs a program without Tern, on this machine or on node 1 of a lab.
///
/// # Errors
/// If it is not built, cannot be run, or fails.
pub fn run_without_migration(
    place: Option<&Cluster>,
    entry: &Entry,
    flavour: Flavour,
    journey: Journey,
) -> Result<Outcome> {
    let words = words(entry, flavour, None)?;
    let (program, args) = words.split_first().context("no words")?;
    let mut command = match place {
        Some(cluster) => cluster.command(1, &program.to_string_lossy()),
        None => Command::new(program),
    };
    command.args(args).current_dir("/");
    let mut running = Running::start(environment(&mut command, journey, None), is_terminal(entry))?;
    exchange_lines(&mut running, entry, &mut |_| Ok(()))?;
    let outcome = running.finish(RUN_TIMEOUT)?;
    let passed = outcome.out.ends_with(b"PASS\n") || outcome.out.ends_with(b"PASS\r\n");
    if !passed && entry.name != "ending" && entry.input != Input::Interrupted {
        bail!("it fails without migration: {}", String::from_utf8_lossy(&outcome.err));
    }
    Ok(outcome)
}

/// `name arguments (flavour)`.
pub fn title(entry: &Entry, flavour: Flavour) -> String {
    let mut text = entry.name.to_owned();
    for arg in entry.args {
        text += " ";
        text += arg;
    }
    match entry.input {
        Input::None => {}
        Input::Pipe => text += " <pipe",
        Input::Terminal => text += " <tty",
        Input::Interrupted => text += " <tty ^C",
    }
    format!("{text} ({})", flavour.name())
}

/// Runs a program in the cluster along a journey, and compares it with the run without migration.
/// Returns remarks.
///
/// # Errors
/// A difference between the runs, a refused move, or a program that did not run where it was moved;
/// with diagnostics.
pub fn run_journey(
    cluster: &Cluster,
    entry: &'static Entry,
    flavour: Flavour,
    journey: Journey,
) -> Result<Vec<String>, String> {
    let wanted = native(entry, flavour, journey).map_err(|e| format!("{e:#}"))?;
    let mut run = JourneyRun::begin(cluster, entry, flavour, journey)
        .map_err(|e| format!("{e:#}\n{}", cluster.diagnostics(0)))?;
    let end = run.complete();
    let pid = run.running.pid;
    let fail = |what: String| {
        format!("{what}\nmoves: {}\n{}\n{}", run.moved, run.running.output_so_far(), cluster.diagnostics(pid))
    };
    match end {
        Err(error) => {
            let text = fail(format!("{error:#}"));
            // A failed run must not disturb the next ones; it may have ended already.
            let _ = cluster.run(1, &["kill", "-KILL", &pid.to_string()]);
            Err(text)
        }
        Ok(outcome) => match outcome.difference(&wanted) {
            Some(difference) => Err(fail(difference)),
            None => Ok(run.notes),
        },
    }
}

/// Runs a program that home's shim fetches home at one of its calls (`TERN_FREEZE_FILE`), and
/// compares it with the run without migration.
///
/// # Errors
/// A difference between the runs; with diagnostics.
pub fn frozen_at(
    cluster: &Cluster,
    entry: &'static Entry,
    flavour: Flavour,
    journey: Journey,
) -> Result<Vec<String>, String> {
    let wanted = native(entry, flavour, journey).map_err(|e| format!("{e:#}"))?;
    let run = || -> Result<(Outcome, i32)> {
        let words = words(entry, flavour, Some(journey.start()))?;
        let (program, args) = words.split_first().context("no words")?;
        let mut command = cluster.command(1, &program.to_string_lossy());
        command.args(args);
        let mut running = Running::start(environment(&mut command, journey, None), false)?;
        running.close_input();
        let pid = running.pid;
        Ok((running.finish(RUN_TIMEOUT).with_context(|| cluster.diagnostics(pid))?, pid))
    };
    let (outcome, pid) = run().map_err(|e| format!("{e:#}"))?;
    match outcome.difference(&wanted) {
        Some(difference) => Err(format!("{difference}\n{}", cluster.diagnostics(pid))),
        None => Ok(Vec::new()),
    }
}

struct JourneyRun<'a> {
    cluster: &'a Cluster,
    entry: &'static Entry,
    journey: Journey,
    running: Running,
    until: String,
    moved: String,
    notes: Vec<String>,
}

impl<'a> JourneyRun<'a> {
    fn begin(
        cluster: &'a Cluster,
        entry: &'static Entry,
        flavour: Flavour,
        journey: Journey,
    ) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let until = format!("/tmp/tern-until-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let words = words(entry, flavour, Some(journey.start()))?;
        let (program, args) = words.split_first().context("no words")?;
        let mut command = cluster.command(1, &program.to_string_lossy());
        command.args(args);
        let running = Running::start(environment(&mut command, journey, Some(&until)), is_terminal(entry))?;
        Ok(Self { cluster, entry, journey, running, until, moved: String::new(), notes: Vec::new() })
    }

    fn complete(&mut self) -> Result<Outcome> {
        let stops = self.journey.stops();
        if self.entry.input == Input::None {
            if self.journey == Journey::StartedAway {
                self.check_location(2, self.cluster.cpu_seconds(2)?)?;
            }
            // Let the program begin, by a delay that varies with the pid.
            sleep(Duration::from_millis(20 + u64::from(self.running.pid.unsigned_abs() % 7) * 15));
            for stop in stops {
                self.go(stop)?;
            }
            self.cluster.touch(&self.until)?;
            self.running.close_input();
        } else {
            let mut legs = stops.chunks(stops.len().div_ceil(LINES.len()).max(1));
            // Borrowed separately: `exchange_lines` needs the program, the moves only its pid.
            let (cluster, pid, moved) = (self.cluster, self.running.pid, &mut self.moved);
            exchange_lines(&mut self.running, self.entry, &mut |_| {
                for stop in legs.next().unwrap_or_default() {
                    step(cluster, pid, stop, moved)?;
                }
                Ok(())
            })?;
        }
        self.running.finish(RUN_TIMEOUT)
    }

    /// One move, and then time to compute there.
    fn go(&mut self, stop: &str) -> Result<()> {
        let begun = Instant::now();
        let node = stop.parse().unwrap_or(1);
        let before = self.cluster.cpu_seconds(node)?;
        step(self.cluster, self.running.pid, stop, &mut self.moved)?;
        if self.journey == Journey::PingPong {
            sleep(Duration::from_millis(50).saturating_sub(begun.elapsed()));
            return Ok(());
        }
        self.check_location(node, before)
    }

    /// Checks that the program runs there: it uses CPU time, or mps reports the node.
    fn check_location(&mut self, node: u16, before: f64) -> Result<()> {
        match self.entry.kind {
            Kind::Computes => self.cluster.await_cpu(node, before, MIN_CPU_SECONDS)?,
            Kind::Execs => {}
            Kind::Calls | Kind::Refused(_) => {
                // Time to make calls there, some dozens; mps may lag a little.
                sleep(Duration::from_millis(60));
                let until = Instant::now() + Duration::from_secs(10);
                loop {
                    match self.cluster.location(self.running.pid)? {
                        Some((at, _)) if at == node => break,
                        Some((1, why)) if !why.is_empty() => {
                            self.notes.push(format!("came home from {node}: {why}"));
                            break;
                        }
                        None if node == 1 => break,
                        None if self.running.has_ended() => {
                            bail!("it has ended on its way to node {node}: {}", self.running.output_so_far())
                        }
                        other if Instant::now() > until => {
                            bail!("it should be on node {node}, but mps reports {other:?}")
                        }
                        _ => sleep(Duration::from_millis(50)),
                    }
                }
            }
        }
        Ok(())
    }
}

fn step(cluster: &Cluster, pid: i32, stop: &str, moved: &mut String) -> Result<()> {
    match cluster.migrate(pid, stop) {
        Ok(report) => {
            *moved += &format!(" {}→{} {:.1} ms", report.from, report.to, report.freeze_ms);
            Ok(())
        }
        // It came home by itself, for a reason that mps reports.
        Err(refused) if stop == "home" && refused.message.contains("at home already") => {
            match cluster.location(pid)? {
                Some((1, why)) if !why.is_empty() => *moved += &format!(" →1 by itself: {why}"),
                other => bail!("migrate {pid} home: {}; and mps reports {other:?}", refused.message),
            }
            Ok(())
        }
        Err(refused) => bail!("migrate {pid} {stop} (exit {}): {}", refused.code, refused.message),
    }
}

/// Sends the lines to a program that reads them, and calls `between` after each.
fn exchange_lines(
    running: &mut Running,
    entry: &Entry,
    between: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<()> {
    if entry.input == Input::None {
        return Ok(());
    }
    // A line typed too early would be echoed before the program's first output.
    running.await_output("terminal")?;
    let mut answers = 0;
    let mut say = |running: &mut Running, line: &str| {
        answers += 1;
        running.send_input(&format!("{line}\n"))?;
        running.await_output(&format!("line {answers}: "))
    };
    for (number, line) in LINES.iter().enumerate() {
        say(running, line)?;
        between(number)?;
    }
    match entry.input {
        Input::Interrupted => return running.send_input("\x03"),
        Input::Terminal => say(running, "raw")?,
        _ => {}
    }
    say(running, "end")
}

fn is_terminal(entry: &Entry) -> bool {
    matches!(entry.input, Input::Terminal | Input::Interrupted)
}

/// Sets the variables that the programs read. Without `until`, a program makes each of its checks
/// once or a few times.
fn environment<'a>(command: &'a mut Command, journey: Journey, until: Option<&str>) -> &'a mut Command {
    let home = if journey == Journey::Home { "0.1" } else { "0" };
    command.env("TERN_SECONDS", home).env("TERN_HEAP_MIB", journey.heap_mib()).env("LC_ALL", "C");
    if let Some(until) = until {
        command.env("TERN_UNTIL", until);
    }
    command
}

/// The command line of a program; `start` are the options of mosrun, `None` runs it natively.
fn words(entry: &Entry, flavour: Flavour, start: Option<&[&str]>) -> Result<Vec<OsString>> {
    let program = executable(entry, flavour)?.context("there is no such program in this flavour")?;
    let mut inner: Vec<OsString> = ["sh", "-c", ANNOUNCE, "sh"].map(OsString::from).to_vec();
    if let Some(start) = start {
        inner.push("mosrun".into());
        inner.extend(start.iter().map(OsString::from));
    }
    inner.push(program.into());
    inner.extend(entry.args.iter().map(OsString::from));
    if !is_terminal(entry) {
        return Ok(inner);
    }
    // A terminal on the program's node; `-e` passes the exit status on.
    let quoted: Vec<String> =
        inner.iter().map(|w| format!("'{}'", w.to_string_lossy().replace('\'', r"'\''"))).collect();
    Ok(["script", "-qec", &quoted.join(" "), "/dev/null"].map(OsString::from).to_vec())
}
