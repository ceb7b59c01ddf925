//! `tern lab`: a cluster inside this machine. `tern_lab` implements it; this file only calls it.
#![expect(unsafe_code, reason = "a signal's disposition, which std sets for ordinary programs only")]

use crate::tool::Invocation;
use crate::{Failure, help};
use clap::{Args, Command};
use std::process::ExitCode;
use tern_lab::command::LabArgs;

/// Describes the command line.
pub(crate) fn describe() -> Command {
    LabArgs::augment_args(help::command("lab"))
}

/// `tern lab …`.
///
/// # Errors
/// Exit code 1 for failures of the lab. For run, exec and storm, their own exit code (125 if the
/// lab failed), without a further message.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    ignore_sigpipe();
    let Some(options) = help::parse::<LabArgs>(describe(), invocation)? else {
        return Ok(());
    };
    match tern_lab::command::run(options.command) {
        Ok(ExitCode::SUCCESS) => Ok(()),
        Ok(code) => Err(Failure::silent(exit_code_number(code))),
        Err(error) => Err(Failure::with_code(1, format!("{error:#}"))),
    }
}

/// Runs as one of the lab's own programs (argv\[0\] is `tern-lab-init`). Returns the exit code.
pub(crate) fn init() -> u8 {
    ignore_sigpipe();
    tern_lab::init_main()
}

/// Ignores SIGPIPE, as Rust's runtime does: the lab relies on it, and our C `main` leaves SIGPIPE
/// unchanged for mosrun.
fn ignore_sigpipe() {
    // SAFETY: ignoring a signal runs no code of ours when it comes.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
    }
}

/// The number of an exit code. std offers no conversion, only comparison.
fn exit_code_number(code: ExitCode) -> u8 {
    (0..=u8::MAX).find(|number| ExitCode::from(*number) == code).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_have_numbers() {
        assert_eq!([0, 1, 125, 255].map(|n| exit_code_number(n.into())), [0, 1, 125, 255]);
    }
}
