//! The folder of a storm, and its runs: one native run, the runs in the storm, and their
//! comparison.

use super::StormArgs;
use super::difference::{Difference, compare_files, compare_folders};
use super::mover::StormParams;
use super::report::StormReport;
use super::run::{self, RunResult};
use crate::error::{LabError, Result, WithContext};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Maximum number of consecutive runs without a move; after that the command counts as too quick
/// for a storm.
const MAX_RUNS_WITHOUT_MOVE: u32 = 5;

/// The folder where the command runs, and the results of its runs. Removed on drop.
///
/// All runs use the same path, so that a path in the output does not depend on the run.
#[derive(Debug)]
pub(super) struct Workspace {
    directory: PathBuf,
    limit: Duration,
    copy: Option<PathBuf>,
}

impl Workspace {
    pub(super) fn create(args: &StormArgs) -> Result<Self> {
        // The pid is unique in the node.
        let directory = std::env::temp_dir().join(format!("tern-storm-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).with_context(|| format!("make {}", directory.display()))?;
        Ok(Self { directory, limit: Duration::from_secs(args.limit), copy: args.copy.clone() })
    }

    /// Runs the command, and keeps its results as `name`: its folder, with the output files beside
    /// it.
    fn run(
        &self,
        name: &str,
        words: &[OsString],
        storm: Option<StormParams>,
    ) -> Result<(RunResult, PathBuf)> {
        let (work, kept) = (self.directory.join("work"), self.directory.join(name));
        for folder in [&work, &kept] {
            let _ = fs::remove_dir_all(folder);
            fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
        }
        if let Some(from) = &self.copy {
            copy_folder(from, &work)?;
        }
        let result = run::run(words, &work, &kept, self.limit, storm)?;
        fs::rename(&work, kept.join("work")).with_context(|| format!("keep {}", work.display()))?;
        Ok((result, kept))
    }

    /// Runs the command natively and then in the storm, until enough moves were made or a run
    /// differs.
    pub(super) fn compare(&self, args: &StormArgs) -> Result<StormReport> {
        let (native, native_kept) = self.run("native", &args.command, None)?;
        if native.hung {
            let message = format!("the command has {}; raise the limit with --limit", native.status);
            return Err(LabError::BadOption(message));
        }
        let words = args.command.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>();
        let mut report = StormReport {
            command: words.join(" "),
            seed: args.seed.unwrap_or_else(rand::random),
            status: native.status.clone(),
            native_s: native.duration.as_secs_f64(),
            requested_moves: args.moves,
            ..StormReport::default()
        };
        let mut runs_without_move = 0;
        while report.differences.is_empty() && runs_without_move < MAX_RUNS_WITHOUT_MOVE {
            let seed = report.seed.wrapping_add(u64::from(report.runs));
            let params = StormParams { nodes: args.nodes.unwrap_or(2), pause: args.every, seed };
            let (storm, storm_kept) = self.run("storm", &args.command, Some(params))?;
            report.runs += 1;
            report.storm_s.push(storm.duration.as_secs_f64());
            report.differences = differences((&native, &native_kept), (&storm, &storm_kept))?;
            runs_without_move = if storm.moves.moves == 0 { runs_without_move + 1 } else { 0 };
            report.moves.add(storm.moves);
            if report.moves.moves >= args.moves {
                break;
            }
        }
        if !report.differences.is_empty() {
            let (again, again_kept) = self.run("again", &args.command, None)?;
            report.nondeterministic =
                !differences((&native, &native_kept), (&again, &again_kept))?.is_empty();
        }
        Ok(report)
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn differences(native: (&RunResult, &Path), storm: (&RunResult, &Path)) -> Result<Vec<Difference>> {
    let ((native, native_kept), (storm, storm_kept)) = (native, storm);
    let mut all = Vec::new();
    if storm.status != native.status {
        all.push(Difference::new("status", format!("{} instead of {}", storm.status, native.status)));
    }
    if storm.leftover != native.leftover {
        let how = format!("{} left running instead of {}", storm.leftover, native.leftover);
        all.push(Difference::new("processes", how));
    }
    for stream in ["stdout", "stderr"] {
        all.extend(compare_files(stream, &native_kept.join(stream), &storm_kept.join(stream))?);
    }
    all.extend(compare_folders(&native_kept.join("work"), &storm_kept.join("work"))?);
    Ok(all)
}

/// Copies the contents of a folder, with owners, permissions and times.
fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp").arg("-a").arg(from.join(".")).arg(to).status();
    let good = status.with_context(|| "run cp".to_owned())?.success();
    if good { Ok(()) } else { Err(LabError::BadOption(format!("{} cannot be copied", from.display()))) }
}
