//! `runon NODE PROGRAM`: `mosrun -NODE -L PROGRAM`, with the node by number or name.

use super::mosrun::become_program::arguments;
use super::mosrun::options::{Place, Start};
use super::mosrun::{self, OWN_CODES};
use crate::tool::Call;
use crate::{Failure, help, place};
use clap::{Arg, Command};
use std::ffi::{OsStr, OsString};
use tern_control::{Advice, Lock};

/// The command line.
pub fn describe() -> Command {
    help::command("runon")
        .about("Run a program on this node, locked there")
        .long_about("Run a program on this node, locked there: as mosrun -NODE -L.")
        .override_usage("runon NODE [-z] PROGRAM [ARG..]")
        .arg(Arg::new("node").value_name("NODE").help("The node's number, host or alias"))
        .args(program_words())
        .after_help(help::closing("  runon 2 flac -8 song.wav\n  runon beta ./simulate", OWN_CODES))
}

/// `[-z] PROGRAM [ARG..]`, as runon, runhome and nomig have it.
pub(super) fn program_words() -> [Arg; 2] {
    let argv0 = Arg::new("argv0").short('z').action(clap::ArgAction::SetTrue);
    let program = Arg::new("program").value_name("PROGRAM").num_args(1..).trailing_var_arg(true);
    [
        argv0.help("The first ARG is the program's argv[0]"),
        program.help("What to run, found as the shell finds it, and its arguments"),
    ]
}

/// `runon …`; returns only if no program runs, or help was asked for.
///
/// # Errors
/// A refusal (nothing was run), or 126 or 127 if there is no such program.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    if asked(call, describe)? {
        return Ok(());
    }
    let Some((node, words)) = call.args.split_first() else {
        return Err(Failure::usage(call.tool, "no node was given"));
    };
    // First the words, then ternd: a typing mistake needs no daemon.
    let (program, arguments) = program(call.tool, words)?;
    let place = Place::Nodes(vec![place::node(&node.to_string_lossy())?]);
    let (fallback, lock, never) = (false, Lock::Locked, false);
    match mosrun::begin(&Start {
        place,
        fallback,
        lock,
        never,
        advice: Advice::default(),
        program,
        arguments,
    })? {}
}

/// Prints help or the version, if the first word asks for them.
pub(super) fn asked(call: &Call<'_>, describe: fn() -> Command) -> Result<bool, Failure> {
    match call.args.first().and_then(|word| word.to_str()) {
        Some("--help") => help::print(describe(), call)?,
        Some("--version") => help::print_version(call)?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// Reads `[-z] [--] PROGRAM [ARG..]`: the program and its argv.
pub(super) fn program<'a>(tool: &str, words: &'a [OsString]) -> Result<(&'a OsStr, Vec<&'a OsStr>), Failure> {
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
        Some((program, rest)) => Ok((program, arguments(program, rest))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn z_and_dashes_are_read() {
        let read = |line: &str| {
            let words: Vec<_> = line.split_whitespace().map(OsString::from).collect();
            program("runon", &words)
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
