//! `runon NODE PROGRAM`: the same as `mosrun -NODE -L PROGRAM`, but NODE may also be a name.

use super::mosrun::options::{Launch, LaunchTarget};
use super::mosrun::replace_process::argv_of;
use super::mosrun::{self, PROGRAM_EXIT_CODES};
use crate::tool::Invocation;
use crate::{Failure, help, node_name};
use clap::{Arg, Command};
use std::ffi::{OsStr, OsString};
use tern_control::{Advice, Lock};

/// Describes the command line.
pub(crate) fn describe() -> Command {
    help::command("runon")
        .about("Run a program on a given node, locked there")
        .long_about("Run a program on a given node and lock it there: the same as mosrun -NODE -L.")
        .override_usage("runon NODE [-z] PROGRAM [ARG..]")
        .arg(Arg::new("node").value_name("NODE").help("The node's number, host or alias"))
        .args(program_args())
        .after_help(help::after_help(
            "  runon 2 flac -8 song.wav\n  runon beta ./simulate",
            PROGRAM_EXIT_CODES,
        ))
}

/// The arguments `[-z] PROGRAM [ARG..]` of runon, runhome and nomig.
pub(super) fn program_args() -> [Arg; 2] {
    let argv0 = Arg::new("argv0").short('z').action(clap::ArgAction::SetTrue);
    let program = Arg::new("program").value_name("PROGRAM").num_args(1..).trailing_var_arg(true);
    [
        argv0.help("The first ARG is the program's argv[0]"),
        program.help("The program, found as the shell finds it, and its arguments"),
    ]
}

/// `runon …`. Returns only after printing the help, or if the program was not started.
///
/// # Errors
/// A refusal (nothing was run), or 126 or 127 if the program cannot be executed or does not exist.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    if printed_help(invocation, describe)? {
        return Ok(());
    }
    let Some((node, words)) = invocation.args.split_first() else {
        return Err(Failure::usage(invocation.tool, "no node was given"));
    };
    // The arguments are checked before ternd is asked, so that an error in them is reported even if
    // ternd does not run.
    let (program, arguments) = parse_program(invocation.tool, words)?;
    let target = LaunchTarget::Nodes(vec![node_name::resolve(&node.to_string_lossy())?]);
    match mosrun::launch(&Launch {
        target,
        fallback: false,
        lock: Lock::Locked,
        never_migrates: false,
        advice: Advice::default(),
        program,
        arguments,
    })? {}
}

/// Prints the help or the version if the first argument asks for it; returns whether it did.
pub(super) fn printed_help(invocation: &Invocation<'_>, describe: fn() -> Command) -> Result<bool, Failure> {
    match invocation.args.first().and_then(|word| word.to_str()) {
        Some("--help") => help::print(describe(), invocation)?,
        Some("--version") => help::print_version(invocation)?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// Parses `[-z] [--] PROGRAM [ARG..]`: the program and its argv.
pub(super) fn parse_program<'a>(
    tool: &str,
    words: &'a [OsString],
) -> Result<(&'a OsStr, Vec<&'a OsStr>), Failure> {
    let (argv0, words) = match words.split_first() {
        Some((first, rest)) if first == "-z" => (true, rest),
        _ => (false, words),
    };
    let words = words.strip_prefix(&[OsString::from("--")]).unwrap_or(words);
    match words.split_first() {
        None => Err(Failure::usage(tool, "no program was given")),
        Some((first, _)) if first.to_string_lossy().starts_with('-') => {
            Err(Failure::usage(tool, format!("unknown option '{}'", first.to_string_lossy())))
        }
        Some((program, rest)) if argv0 && !rest.is_empty() => {
            Ok((program, rest.iter().map(OsString::as_os_str).collect()))
        }
        Some((program, rest)) => Ok((program, argv_of(program, rest))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn z_and_double_dash_are_parsed() {
        let read = |line: &str| {
            let words: Vec<_> = line.split_whitespace().map(OsString::from).collect();
            parse_program("runon", &words)
                .map(|(p, a)| format!("{} {a:?}", p.to_string_lossy()))
                .map_err(|failure| failure.message)
        };
        assert_eq!(read("a -z b").unwrap(), r#"a ["a", "-z", "b"]"#);
        assert_eq!(read("-z a b").unwrap(), r#"a ["b"]"#);
        assert_eq!(read("-- a").unwrap(), r#"a ["a"]"#);
        assert_eq!(read("-l a").unwrap_err(), "unknown option '-l'");
        assert_eq!(read("-z").unwrap_err(), "no program was given");
    }
}
