//! `nomig PROGRAM`: runs a program that never migrates, nor do its children.

use super::mosrun::options::{Launch, LaunchTarget};
use super::mosrun::{self, PROGRAM_EXIT_CODES};
use super::runon::{parse_program, printed_help, program_args};
use crate::tool::Invocation;
use crate::{Failure, help};
use clap::Command;
use tern_control::{Advice, Lock};

/// Describes the command line.
pub(crate) fn describe() -> Command {
    help::command("nomig")
        .about("Run a program that never migrates, and neither do its children")
        .long_about(
            "Run a program that never migrates, and neither do its children. Unlike a lock this cannot be \
             undone. It works without ternd.",
        )
        .override_usage("nomig [-z] PROGRAM [ARG..]")
        .args(program_args())
        .after_help(help::after_help("  nomig /usr/sbin/sshd -D\n  nomig ./watchdog", PROGRAM_EXIT_CODES))
}

/// `nomig …`. Returns only after printing the help, or if the program was not started.
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
        never_migrates: true,
        advice: Advice::default(),
        program,
        arguments,
    })? {}
}
