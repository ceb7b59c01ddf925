//! `cpujob`, `iojob`, `nodecay`, `slowdecay`, `fastdecay`: mosrun with one option said by the name.

use super::mosrun::{self, OWN_CODES, options};
use super::runon::asked;
use crate::tool::Call;
use crate::{Failure, help};
use clap::{Arg, Command};
use std::ffi::OsString;

/// The names, the options of mosrun that they stand for, and what these say.
const NAMES: [(&str, &str, &str); 5] = [
    ("cpujob", "-c", "Run a program of which it is known that it computes"),
    ("iojob", "-i", "Run a program of which it is known that it reads and writes"),
    ("nodecay", "-n", "Run a program whose habits are never forgotten"),
    ("slowdecay", "-s", "Run a program whose habits are forgotten slowly"),
    ("fastdecay", "-f", "Run a program whose habits are forgotten fast"),
];

/// `cpujob`'s command line.
pub fn describe_cpujob() -> Command {
    describe(0)
}

/// `iojob`'s.
pub fn describe_iojob() -> Command {
    describe(1)
}

/// `nodecay`'s.
pub fn describe_nodecay() -> Command {
    describe(2)
}

/// `slowdecay`'s.
pub fn describe_slowdecay() -> Command {
    describe(3)
}

/// `fastdecay`'s.
pub fn describe_fastdecay() -> Command {
    describe(4)
}

fn describe(at: usize) -> Command {
    let (name, option, about) = NAMES[at];
    help::command(name)
        .about(about)
        .long_about(format!("{about}: as mosrun {option}, whose options it takes."))
        .override_usage(format!("{name} [OPTION OF MOSRUN..] PROGRAM [ARG..]"))
        .arg(
            Arg::new("words")
                .value_name("PROGRAM")
                .num_args(1..)
                .trailing_var_arg(true)
                .help("What to run, and its arguments; options of mosrun before it, such as -b or -2"),
        )
        .after_help(help::closing(&format!("  {name} ./simulate\n  {name} -b -m2000 ./simulate"), OWN_CODES))
}

/// `cpujob …` and the others; returns only if no program runs, or help was asked for.
///
/// # Errors
/// Those of mosrun.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    let Some(at) = NAMES.iter().position(|(name, ..)| *name == call.tool) else {
        return Err(Failure::usage(call.tool, "it has another name than it should"));
    };
    let own = [describe_cpujob, describe_iojob, describe_nodecay, describe_slowdecay, describe_fastdecay];
    if asked(call, own[at])? {
        return Ok(());
    }
    let words: Vec<OsString> = std::iter::once(NAMES[at].1.into()).chain(call.args.iter().cloned()).collect();
    match options::read(&words).map_err(|message| Failure::usage(call.tool, message))? {
        options::Words::Start(start) => match mosrun::begin(&start)? {},
        options::Words::Help => help::print(own[at](), call),
        options::Words::Version => help::print_version(call),
    }
}
