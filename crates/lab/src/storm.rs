//! `tern lab storm`: runs a command natively, then in a storm of migrations, and compares the
//! results.
//!
//! ```text
//!  machine                     node 1 of a lab
//!  start ── tern lab storm ──▶ inside ── run natively ─▶ what it leaves ┐
//!           --inside …            └───── mosrun, moved ─▶ what it leaves ┴ left ─▶ report
//!                                         by mover, on processes found by kin
//! ```
//!
//! The part in the node sees processes under the same pids as they and ternd do. It is the
//! subreaper of all processes that the command starts, so that none of them escapes the storm or
//! outlives it. The command is locked (`mosrun -L`): the balancer does not move it or its children,
//! so that the storm makes all moves, and the counts are exact.

mod every;
mod kin;
mod left;
mod mover;
mod report;
mod run;
mod ternd;

pub use left::Difference;
pub use mover::Moves;
pub use report::Report;

use crate::command::run_in;
use crate::enter::{self, How};
use crate::error::{LabError, Result, Tried};
use crate::lab::Lab;
use crate::options::{Name, Options};
use crate::signals;
use crate::state::State;
use clap::Args;
use every::Every;
use mover::Weather;
use run::End;
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Maximum number of consecutive runs without a move; after that the command counts as too quick
/// for a storm.
const CALM: u32 = 5;

/// The options of a storm.
#[derive(Debug, Args)]
pub struct StormArgs {
    /// The lab to use; if none of that name is up, one is created and taken down again.
    #[arg(long, value_name = "NAME")]
    lab: Option<Name>,
    /// Number of nodes if a lab is created; default 3.
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=64))]
    nodes: Option<u16>,
    /// Pause between two moves of a process.
    #[arg(long, value_name = "MS..MS", default_value_t)]
    every: Every,
    /// Seed for pauses and destinations. The command's own timing still makes runs differ.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Run the command again until this many moves have been made.
    #[arg(long, value_name = "N", default_value_t = 1)]
    moves: u64,
    /// Begin each run in a copy of this folder instead of an empty one.
    #[arg(long, value_name = "DIR")]
    copy: Option<PathBuf>,
    /// Seconds after which a run counts as hung and is killed.
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Print the result as one line of JSON.
    #[arg(long)]
    json: bool,
    /// Run the part of the storm that is inside the node.
    #[arg(long, hide = true)]
    inside: bool,
    /// The command to run.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs a storm and returns the exit code. The caller must be single-threaded.
///
/// # Errors
/// Those of the lab; the command cannot be run; or a signal interrupts the storm.
pub(crate) fn start(args: &StormArgs) -> Result<u8> {
    if args.inside {
        return inside(args);
    }
    let name = args.lab.clone().unwrap_or_default();
    let up = match Lab::open(&name) {
        Ok(lab) => Some(lab),
        Err(LabError::NotUp(_)) => None,
        Err(error) => return Err(error),
    };
    let copy = args
        .copy
        .as_ref()
        .map(|copy| copy.canonicalize().tried(|| format!("find the folder {}", copy.display())));
    let copy = copy.transpose()?;
    let Some(lab) = up else {
        let name = args.lab.clone().map_or_else(|| Name::unique("storm"), Ok)?;
        let nodes = args.nodes.unwrap_or(3);
        let options = Options { name, nodes, daemon: true, ..Options::default() };
        return run_in(&options, &args.words(nodes, copy));
    };
    let state = State::load(lab.name())?;
    let nodes = state.count();
    if !state.daemon || nodes < 2 {
        let said = format!("lab {name} does not have two nodes with ternd; give another name with --lab");
        return Err(LabError::BadOption(said));
    }
    if args.nodes.is_some_and(|asked| asked != nodes) {
        let said =
            format!("lab {name} is up with {nodes} nodes; omit --nodes, or give another name with --lab");
        return Err(LabError::BadOption(said));
    }
    signals::expect_children();
    let words = args.words(nodes, copy);
    let (program, arguments) =
        words.split_first().ok_or_else(|| LabError::BadOption("no command".to_owned()))?;
    enter::enter(lab.name(), 1, How::Attached, program, arguments)
}

impl StormArgs {
    /// The command line for the part in the node.
    fn words(&self, nodes: u16, copy: Option<PathBuf>) -> Vec<OsString> {
        let mut words: Vec<OsString> = ["tern", "lab", "storm", "--inside"].map(OsString::from).into();
        let mut option = |name: &str, value: String| words.extend([name.into(), value.into()]);
        option("--nodes", nodes.to_string());
        option("--every", self.every.to_string());
        option("--moves", self.moves.to_string());
        option("--limit", self.limit.to_string());
        if let Some(seed) = self.seed {
            option("--seed", seed.to_string());
        }
        if let Some(copy) = copy {
            words.extend(["--copy".into(), copy.into_os_string()]);
        }
        if self.json {
            words.push("--json".into());
        }
        words.push("--".into());
        words.extend_from_slice(&self.command);
        words
    }
}

/// The part of the storm that runs inside the node.
fn inside(args: &StormArgs) -> Result<u8> {
    signals::expect_children();
    signals::note_interrupts();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .tried(|| "adopt what the command leaves behind".to_owned())?;
    let bed = Bed::make(args)?;
    let report = bed.compare(args)?;
    let text = if args.json {
        let mut text = serde_json::to_string(&report).tried(|| "write the report".to_owned())?;
        text.push('\n');
        text
    } else {
        report.text()
    };
    std::io::stdout().write_all(text.as_bytes()).tried(|| "write to standard output".to_owned())?;
    Ok(report.exit_code())
}

/// The folder where the command runs, and the results of its runs. Removed on drop.
///
/// All runs use the same path, so that a path in the output does not depend on the run.
#[derive(Debug)]
struct Bed {
    place: PathBuf,
    limit: Duration,
    copy: Option<PathBuf>,
}

impl Bed {
    fn make(args: &StormArgs) -> Result<Self> {
        // The pid is unique in the node.
        let place = std::env::temp_dir().join(format!("tern-storm-{}", std::process::id()));
        let _ = fs::remove_dir_all(&place);
        fs::create_dir_all(&place).tried(|| format!("make {}", place.display()))?;
        Ok(Self { place, limit: Duration::from_secs(args.limit), copy: args.copy.clone() })
    }

    /// Runs the command, and keeps its results under the name `as_`: its folder, with the output
    /// files beside it.
    fn run(&self, as_: &str, words: &[OsString], storm: Option<Weather>) -> Result<(End, PathBuf)> {
        let (work, kept) = (self.place.join("work"), self.place.join(as_));
        for folder in [&work, &kept] {
            let _ = fs::remove_dir_all(folder);
            fs::create_dir_all(folder).tried(|| format!("make {}", folder.display()))?;
        }
        if let Some(from) = &self.copy {
            copy(from, &work)?;
        }
        let end = run::run(words, &work, &kept, self.limit, storm)?;
        fs::rename(&work, kept.join("work")).tried(|| format!("keep {}", work.display()))?;
        Ok((end, kept))
    }

    fn compare(&self, args: &StormArgs) -> Result<Report> {
        let (native, native_kept) = self.run("native", &args.command, None)?;
        if native.hung {
            let said = format!("the command has {}; raise the limit with --limit", native.status);
            return Err(LabError::BadOption(said));
        }
        let words = args.command.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>();
        let mut report = Report {
            command: words.join(" "),
            seed: args.seed.unwrap_or_else(rand::random),
            status: native.status.clone(),
            native_s: native.took.as_secs_f64(),
            wanted: args.moves,
            ..Report::default()
        };
        let mut calm = 0;
        while report.differences.is_empty() && calm < CALM {
            let seed = report.seed.wrapping_add(u64::from(report.runs));
            let weather = Weather { nodes: args.nodes.unwrap_or(2), every: args.every, seed };
            let (storm, storm_kept) = self.run("storm", &args.command, Some(weather))?;
            report.runs += 1;
            report.storm_s.push(storm.took.as_secs_f64());
            report.differences = differences((&native, &native_kept), (&storm, &storm_kept))?;
            calm = if storm.moves.moves == 0 { calm + 1 } else { 0 };
            report.moves.add(storm.moves);
            if report.moves.moves >= args.moves {
                break;
            }
        }
        if !report.differences.is_empty() {
            let (again, again_kept) = self.run("again", &args.command, None)?;
            report.unsteady = !differences((&native, &native_kept), (&again, &again_kept))?.is_empty();
        }
        Ok(report)
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.place);
    }
}

fn differences(native: (&End, &Path), storm: (&End, &Path)) -> Result<Vec<Difference>> {
    let ((native, native_kept), (storm, storm_kept)) = (native, storm);
    let mut all = Vec::new();
    if storm.status != native.status {
        all.push(Difference::new("status", format!("{} instead of {}", storm.status, native.status)));
    }
    if storm.behind != native.behind {
        let how = format!("{} left running instead of {}", storm.behind, native.behind);
        all.push(Difference::new("processes", how));
    }
    for stream in ["stdout", "stderr"] {
        all.extend(left::files(stream, &native_kept.join(stream), &storm_kept.join(stream))?);
    }
    all.extend(left::folders(&native_kept.join("work"), &storm_kept.join("work"))?);
    Ok(all)
}

/// Copies the contents of a folder, with owners, permissions and times.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp").arg("-a").arg(from.join(".")).arg(to).status();
    let good = status.tried(|| "run cp".to_owned())?.success();
    if good { Ok(()) } else { Err(LabError::BadOption(format!("{} cannot be copied", from.display()))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        storm: StormArgs,
    }

    #[test]
    fn inner_command_receives_all_options() {
        let given =
            ["storm", "--seed", "7", "--every", "5..9ms", "--moves", "40", "--limit", "9", "--json", "--"];
        let read = |words: &[OsString]| Line::try_parse_from(words).unwrap().storm;
        let words: Vec<OsString> = given.into_iter().chain(["sh", "-c", "--nodes"]).map(Into::into).collect();
        let inside = read(&read(&words).words(4, Some("/a b".into()))[2..]);
        assert!(inside.inside && inside.json);
        assert_eq!((inside.nodes, inside.seed, inside.moves, inside.limit), (Some(4), Some(7), 40, 9));
        assert_eq!(inside.every, "5..9ms".parse().unwrap());
        assert_eq!(inside.copy, Some("/a b".into()));
        assert_eq!(inside.command, ["sh", "-c", "--nodes"]);
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            &["storm"][..],
            &["storm", "--nodes", "1", "--", "x"],
            &["storm", "--every", "9..5ms", "--", "x"],
        ] {
            assert!(Line::try_parse_from(bad).is_err(), "{bad:?}");
        }
    }
}
