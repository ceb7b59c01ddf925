//! `tern lab …`: the command line of the lab.

mod args;
mod run;

pub use args::{CreateArgs, LabArgs, LabCommand, LabNameArg};
pub(crate) use run::run_in;

use crate::error::LabError;
use crate::lab::options::{LabName, LabOptions};
use crate::lab::{self, Lab};
use crate::network::cuts::Cable;
use crate::node::enter::{EnterMode, enter};
use crate::process::signals;
use crate::storm;
use anyhow::Result;
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

/// Runs a `tern lab` command. If the command of `run` or `exec` died by a signal, this process dies
/// by the same signal instead of returning. The caller must be single-threaded.
///
/// # Errors
/// Those of [`LabError`]. For `run` and `exec` this function prints the error and returns exit code
/// 125.
pub fn run(command: LabCommand) -> Result<ExitCode> {
    match command {
        LabCommand::Up { create, lab } => up(create.options(lab.name)),
        LabCommand::Run { create, lab, command } => {
            let name = lab.map_or_else(|| LabName::unique("run"), Ok)?;
            code_or_125(run_in(&create.options(name), &command))
        }
        LabCommand::Exec { lab, node, command } => {
            signals::reset_sigchld();
            let (program, arguments) = split_command(&command)?;
            let opened = Lab::open(&lab.name);
            code_or_125(
                opened.and_then(|_lab| enter(&lab.name, node, EnterMode::Attached, program, arguments)),
            )
        }
        LabCommand::Storm(args) => match storm::start(&args) {
            Err(error @ LabError::BadOption(_)) => {
                let _ = writeln!(std::io::stderr(), "tern lab storm: {error}");
                Ok(2.into())
            }
            end => code_or_125(end),
        },
        LabCommand::Cut { lab, node, other, one_way } => {
            success(Lab::open(&lab.name)?.cut(cable(node, other, one_way)))
        }
        LabCommand::Heal { lab, node, other, one_way } => {
            let lab = Lab::open(&lab.name)?;
            success(node.map_or_else(|| lab.heal_all(), |node| lab.heal(cable(node, other, one_way))))
        }
        LabCommand::Kill { lab, node } => success(Lab::open(&lab.name)?.kill(node)),
        LabCommand::Restart { lab, node, daemon_only } => {
            let lab = Lab::open(&lab.name)?;
            success(if daemon_only { lab.restart_daemon(node) } else { lab.restart(node) })
        }
        LabCommand::Down { lab } => success(lab::down(&lab.name)),
    }
}

fn success(result: Result<(), LabError>) -> Result<ExitCode> {
    result?;
    Ok(ExitCode::SUCCESS)
}

fn code_or_125(result: Result<u8, LabError>) -> Result<ExitCode> {
    match result {
        Ok(code) => Ok(code.into()),
        Err(error) => {
            die_if_interrupted(&error);
            let _ = writeln!(std::io::stderr(), "tern lab: {error}");
            Ok(125.into())
        }
    }
}

/// An interrupt also ends the programs that the lab runs. This process then dies by the signal, and
/// does not report their failure.
fn die_if_interrupted(error: &LabError) {
    if let LabError::Interrupted(signal) = error {
        signals::die_by_signal(*signal);
    }
    if let Some(received) = signals::recorded() {
        signals::die_by_signal(received.signal);
    }
}

fn cable(node: u16, other: Option<u16>, one_way: bool) -> Cable {
    match other {
        None => Cable::Node(node),
        Some(other) if one_way => Cable::OneWay(node, other),
        Some(other) => Cable::between(node, other),
    }
}

fn split_command(command: &[OsString]) -> Result<(&OsString, &[OsString]), LabError> {
    command.split_first().ok_or_else(|| LabError::BadOption("there is no command to run".to_owned()))
}

fn up(options: LabOptions) -> Result<ExitCode> {
    signals::record_interrupts();
    let lab = match Lab::up(&options) {
        Ok(lab) => lab,
        Err(error) => {
            die_if_interrupted(&error);
            return Err(error.into());
        }
    };
    if let Some(signal) = signals::recorded() {
        drop(lab);
        signals::die_by_signal(signal.signal);
    }
    let mut text = format!("lab {}: {} nodes, {}\n", lab.name(), options.nodes, options.link);
    for node in lab.nodes() {
        text += &format!("node{} {} speed {:.3}\n", node.number(), node.address(), lab.speed(node.number())?);
    }
    lab.keep();
    // A failed write is ignored: the lab is up all the same.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(ExitCode::SUCCESS)
}
