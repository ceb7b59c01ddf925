//! `runhome PROGRAM`: the same as `mosrun -h -L PROGRAM`.

use super::mosrun::options::{Launch, LaunchTarget};
use super::mosrun::{self, PROGRAM_EXIT_CODES};
use super::runon::{parse_program, printed_help, program_args};
use crate::tool::Invocation;
use crate::{Failure, help};
use clap::Command;
use tern_control::{Advice, Lock};

/// Describes the command line.
pub(crate) fn describe() -> Command {
    help::command("runhome")
        .about("Run a program here, locked")
        .long_about("Run a program here and lock it: the same as mosrun -h. It works without ternd.")
        .override_usage("runhome [-z] PROGRAM [ARG..]")
        .args(program_args())
        .after_help(help::after_help("  runhome vi notes.txt\n  runhome -z sh -sh", PROGRAM_EXIT_CODES))
}

/// `runhome …`. Returns only after printing the help, or if the program was not started.
///
/// # Errors
/// 126 or 127 if the program cannot be executed or does not exist.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    if printed_help(invocation, describe)? {
        return Ok(());
    }
    let (program, arguments) = parse_program(invocation.tool, invocation.args)?;
    match mosrun::launch(&Launch {
        target: LaunchTarget::HereLocked,
        fallback: false,
        lock: Lock::Locked,
        never_migrates: false,
        advice: Advice::default(),
        program,
        arguments,
    })? {}
}
