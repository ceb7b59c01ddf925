//! `nomig PROGRAM`: the program and its children never migrate.

use super::mosrun::options::{Place, Start};
use super::mosrun::{self, OWN_CODES};
use super::runon::{asked, program, program_words};
use crate::tool::Call;
use crate::{Failure, help};
use clap::Command;
use tern_control::{Advice, Lock};

/// The command line.
pub fn describe() -> Command {
    help::command("nomig")
        .about("Run a program that never migrates, nor do its children")
        .long_about(
            "Run a program that never migrates, nor do its children. Unlike a lock this cannot be lifted. \
             Without ternd the program runs all the same.",
        )
        .override_usage("nomig [-z] PROGRAM [ARG..]")
        .args(program_words())
        .after_help(help::closing("  nomig /usr/sbin/sshd -D", OWN_CODES))
}

/// `nomig …`; returns only if no program runs, or help was asked for.
///
/// # Errors
/// 126 or 127 if there is no such program.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    if asked(call, describe)? {
        return Ok(());
    }
    let (program, arguments) = program(call.tool, call.args)?;
    let (fallback, lock, never) = (false, Lock::Locked, true);
    match mosrun::begin(&Start {
        place: Place::Home,
        fallback,
        lock,
        never,
        advice: Advice::default(),
        program,
        arguments,
    })? {}
}
