//! `tern lab`: a cluster inside this machine. All of it is in `tern_lab`; here is only the way to it.
#![expect(unsafe_code, reason = "a signal's disposition, which std sets for ordinary programs only")]

use crate::tool::Call;
use crate::{Failure, help};
use clap::{Args, Command};
use std::process::ExitCode;
use tern_lab::command::LabArgs;

/// The command line.
pub fn describe() -> Command {
    LabArgs::augment_args(help::command("lab"))
}

/// `tern lab …`.
///
/// # Errors
/// Those of the lab, with exit code 1; for run and exec 125, or the exit code of the command, with nothing
/// more to say.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    ignore_broken_pipes();
    let Some(options) = help::parse::<LabArgs>(describe(), call)? else {
        return Ok(());
    };
    match tern_lab::command::run(options.command) {
        Ok(ExitCode::SUCCESS) => Ok(()),
        Ok(code) => Err(Failure::silent(number(code))),
        Err(error) => Err(Failure { code: 1, message: format!("{error:#}"), hint: None }),
    }
}

/// One of the lab's own programs (argv\[0\] is `tern-lab-init`). Returns its exit code.
pub fn init() -> u8 {
    ignore_broken_pipes();
    tern_lab::init_main()
}

/// As Rust programs have it; the lab is written as one, while our C `main` leaves SIGPIPE alone for mosrun.
fn ignore_broken_pipes() {
    // SAFETY: ignoring a signal runs no code of ours when it comes.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
    }
}

/// The number of an exit code, which std does not tell but compares.
fn number(code: ExitCode) -> u8 {
    (0..=u8::MAX).find(|number| ExitCode::from(*number) == code).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_have_numbers() {
        assert_eq!([0, 1, 125, 255].map(|n| number(n.into())), [0, 1, 125, 255]);
    }
}
