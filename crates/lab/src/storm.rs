//! `tern lab storm`: runs a command natively, then in a storm of migrations, and compares the
//! results.
//!
//! ```text
//!  machine                     node 1 of a lab
//!  start ── tern lab storm ──▶ run_inside ── run natively ─▶ output, files ┐
//!           --inside …              └─────── mosrun, moved ─▶ output, files ┴ difference ─▶ report
//!                                            by mover, on processes found by descendants
//! ```
//!
//! The part of the storm inside the node runs in the node's pid namespace, so it sees the same pids
//! as ternd and the command's processes. This part is the subreaper of all processes that the
//! command starts, so that none of them escapes the storm or outlives it. The command is locked
//! (`mosrun -L`): the balancer does not move the command or its children, so that the storm makes
//! all moves, and the counts are exact.

mod args;
mod descendants;
mod difference;
mod mover;
mod pause;
mod report;
mod run;
mod ternd;
mod workspace;

pub(crate) use args::StormArgs;
pub use difference::Difference;
pub use mover::{MoveStats, ProgramMoves};
pub use report::StormReport;

use crate::command::run_in;
use crate::error::{LabError, Result, WithContext};
use crate::lab::Lab;
use crate::lab::options::{LabName, LabOptions};
use crate::lab::state::LabState;
use crate::node::enter::{EnterMode, enter};
use crate::process::signals;
use std::io::Write;
use workspace::Workspace;

/// Runs a storm and returns the exit code. The caller must be single-threaded.
///
/// # Errors
/// Those of the lab; the command cannot be run; or a signal interrupts the storm.
pub(crate) fn start(args: &StormArgs) -> Result<u8> {
    if args.inside {
        return run_inside(args);
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
        .map(|copy| copy.canonicalize().with_context(|| format!("find the folder {}", copy.display())));
    let copy = copy.transpose()?;
    let Some(lab) = up else {
        let name = args.lab.clone().map_or_else(|| LabName::unique("storm"), Ok)?;
        let nodes = args.nodes.unwrap_or(3);
        let options = LabOptions { name, nodes, daemon: true, ..LabOptions::default() };
        return run_in(&options, &args.inner_command(nodes, copy));
    };
    let state = LabState::load(lab.name())?;
    let nodes = state.node_count();
    if !state.daemon || nodes < 2 {
        let message = format!("lab {name} does not have two nodes with ternd; give another name with --lab");
        return Err(LabError::BadOption(message));
    }
    if args.nodes.is_some_and(|asked| asked != nodes) {
        let message =
            format!("lab {name} is up with {nodes} nodes; omit --nodes, or give another name with --lab");
        return Err(LabError::BadOption(message));
    }
    signals::reset_sigchld();
    let words = args.inner_command(nodes, copy);
    let (program, arguments) =
        words.split_first().ok_or_else(|| LabError::BadOption("no command".to_owned()))?;
    enter(lab.name(), 1, EnterMode::Attached, program, arguments)
}

/// The part of the storm that runs inside the node.
fn run_inside(args: &StormArgs) -> Result<u8> {
    signals::reset_sigchld();
    signals::record_interrupts();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .with_context(|| "adopt what the command leaves behind".to_owned())?;
    let workspace = Workspace::create(args)?;
    let report = workspace.compare(args)?;
    let text = if args.json {
        let mut text = serde_json::to_string(&report).with_context(|| "write the report".to_owned())?;
        text.push('\n');
        text
    } else {
        report.text()
    };
    std::io::stdout().write_all(text.as_bytes()).with_context(|| "write to standard output".to_owned())?;
    Ok(report.exit_code())
}
