//! `runhome PROGRAM`: `mosrun -h -L PROGRAM`.

use super::mosrun::options::{Place, Start};
use super::mosrun::{self, OWN_CODES};
use super::runon::{asked, program, program_words};
use crate::tool::Call;
use crate::{Failure, help};
use clap::Command;
use tern_control::{Advice, Lock};

/// The command line.
pub fn describe() -> Command {
    help::command("runhome")
        .about("Run a program here, locked")
        .long_about("Run a program here, locked: as mosrun -h. It needs no ternd.")
        .override_usage("runhome [-z] PROGRAM [ARG..]")
        .args(program_words())
        .after_help(help::closing("  runhome vi notes.txt", OWN_CODES))
}

/// `runhome …`; returns only if no program runs, or help was asked for.
///
/// # Errors
/// 126 or 127 if there is no such program.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    if asked(call, describe)? {
        return Ok(());
    }
    let (program, arguments) = program(call.tool, call.args)?;
    let (fallback, lock, never) = (false, Lock::Locked, false);
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
