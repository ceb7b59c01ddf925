//! `cpujob`, `iojob`, `nodecay`, `slowdecay`, `fastdecay`: mosrun with one option implied by the
//! name.

use super::mosrun::{self, PROGRAM_EXIT_CODES, options};
use super::runon::printed_help;
use crate::tool::Invocation;
use crate::{Failure, help};
use clap::{Arg, Command};
use std::ffi::OsString;

/// For each tool: its name, the option of mosrun that it implies, and its summary.
const PRESETS: [(&str, &str, &str); 5] = [
    ("cpujob", "-c", "Run a program that is known to compute"),
    ("iojob", "-i", "Run a program that is known to do much I/O"),
    ("nodecay", "-n", "Run a program whose usage profile never decays"),
    ("slowdecay", "-s", "Run a program whose usage profile decays slowly"),
    ("fastdecay", "-f", "Run a program whose usage profile decays fast"),
];

/// Describes the command line of `cpujob`.
pub(crate) fn describe_cpujob() -> Command {
    describe(0)
}

/// Describes the command line of `iojob`.
pub(crate) fn describe_iojob() -> Command {
    describe(1)
}

/// Describes the command line of `nodecay`.
pub(crate) fn describe_nodecay() -> Command {
    describe(2)
}

/// Describes the command line of `slowdecay`.
pub(crate) fn describe_slowdecay() -> Command {
    describe(3)
}

/// Describes the command line of `fastdecay`.
pub(crate) fn describe_fastdecay() -> Command {
    describe(4)
}

fn describe(at: usize) -> Command {
    let (name, option, about) = PRESETS[at];
    help::command(name)
        .about(about)
        .long_about(format!("{about}: the same as mosrun {option}. The other options of mosrun may follow."))
        .override_usage(format!("{name} [OPTION OF MOSRUN..] PROGRAM [ARG..]"))
        .arg(
            Arg::new("words")
                .value_name("PROGRAM")
                .num_args(1..)
                .trailing_var_arg(true)
                .help("The program and its arguments; options of mosrun, such as -b or -2, may precede it"),
        )
        .after_help(help::after_help(
            &format!("  {name} ./simulate\n  {name} -b -m2000 ./simulate"),
            PROGRAM_EXIT_CODES,
        ))
}

/// `cpujob …` and the others. Returns only after printing the help, or if the program was not
/// started.
///
/// # Errors
/// As mosrun.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let Some(at) = PRESETS.iter().position(|(name, ..)| *name == invocation.tool) else {
        return Err(Failure::usage(invocation.tool, "no such variant of mosrun"));
    };
    let describes =
        [describe_cpujob, describe_iojob, describe_nodecay, describe_slowdecay, describe_fastdecay];
    if printed_help(invocation, describes[at])? {
        return Ok(());
    }
    let args: Vec<OsString> =
        std::iter::once(PRESETS[at].1.into()).chain(invocation.args.iter().cloned()).collect();
    match options::parse(&args).map_err(|message| Failure::usage(invocation.tool, message))? {
        options::CommandLine::Launch(launch) => match mosrun::launch(&launch)? {},
        options::CommandLine::Help => help::print(describes[at](), invocation),
        options::CommandLine::Version => help::print_version(invocation),
    }
}
