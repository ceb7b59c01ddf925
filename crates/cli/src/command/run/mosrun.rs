//! `mosrun`: starts a program on a chosen node, in this very process.
//!
//! mosrun sends its request to ternd, then becomes the program: same pid, same parent, no wrapper.
//! For a start on another node ternd replies when a destination is prepared; the program is moved
//! there as its execve completes, when it has almost no memory.

pub(crate) mod options;
pub(crate) mod replace_process;

use crate::tool::Invocation;
use crate::{Failure, client, help};
use clap::{Arg, ArgAction, Command, value_parser};
use options::{CommandLine, Launch, LaunchTarget};
use replace_process::replace_process;
use std::convert::Infallible;
use std::ffi::OsString;
use tern_control::{RefusalKind, Reply, Request};

/// Describes the command line for the help; `options` parses it.
pub(crate) fn describe() -> Command {
    let flag = |name: &'static str, letter| Arg::new(name).short(letter).action(ArgAction::SetTrue);
    let value = |name: &'static str, letter, value| Arg::new(name).short(letter).value_name(value);
    help::command("mosrun")
        .about("Run a program on a node of the cluster")
        .long_about(
            "Run a program on a node of the cluster. mosrun becomes the program, which keeps this process's pid, \
             terminal, files, environment and signals, wherever it runs.\n\nWithout -h, -ID, -j or -b the \
             program starts here, and the cluster moves it and its children to the best nodes.",
        )
        .override_usage(
            "mosrun [-h | -ID | -jID1-ID2[,ID3..] | -b] [-F] [-l | -L | -k] [-c | -i]\n              \
             [-n | -s | -f | -d N] [-m MB] [-J JOB] [--only LIST] [--not LIST] [-z]\n              \
             [--] PROGRAM [ARG..]",
        )
        .disable_help_flag(true)
        .disable_version_flag(true)
        .arg(flag("home", 'h').help("Run it here, its home, and lock it"))
        .arg(Arg::new("node").value_name("-ID").help("Run it on this node, as in -3; fail if that is impossible"))
        .arg(
            Arg::new("list")
                .short('j')
                .value_name("LIST")
                .help("Run it on one of these nodes, tried in random order, as in -j1-3,5"),
        )
        .arg(flag("best", 'b').help("Run it on the best node at the moment"))
        .arg(flag("fallback", 'F').help("If the node is unavailable, run it here instead of failing"))
        .arg(flag("unlock", 'l').help("Let the cluster move it automatically"))
        .arg(flag("lock", 'L').help("Lock it: move it only on request, and in emergencies"))
        .arg(flag("keep", 'k').help("Use the lock of the process that calls mosrun"))
        .arg(flag("argv0", 'z').help("The first ARG is the program's argv[0]"))
        .arg(flag("cpu", 'c').help("It computes: its system calls do not keep it at home (cpujob)"))
        .arg(flag("io", 'i').help("It does much I/O: it belongs where its files are (iojob)"))
        .arg(flag("nodecay", 'n').help("Its usage profile never decays (nodecay)"))
        .arg(flag("slow", 's').help("Its profile decays slowly, as set by mosctl setdecay; the default (slowdecay)"))
        .arg(flag("fast", 'f').help("Its profile decays fast (fastdecay)"))
        .arg(value("decay", 'd', "N").help("After each interval, N of 1000 parts of its profile remain"))
        .arg(value("memory", 'm', "MB").help("It needs this much memory: nodes with less free memory are excluded"))
        .arg(value("job", 'J', "JOB").help("A number with which mps, migrate and moskillall select its processes"))
        .arg(Arg::new("only").long("only").value_name("LIST").help("The nodes where it may run, besides its home"))
        .arg(Arg::new("not").long("not").value_name("LIST").help("The nodes where it may not run"))
        .arg(Arg::new("help").long("help").action(ArgAction::SetTrue).help("Print this help"))
        .arg(Arg::new("version").long("version").action(ArgAction::SetTrue).help("Print the version"))
        .arg(
            Arg::new("program")
                .value_name("PROGRAM")
                .num_args(1..)
                .trailing_var_arg(true)
                .value_parser(value_parser!(OsString))
                .help("The program, found as the shell finds it, and its arguments"),
        )
        .after_help(help::after_help(
            "  mosrun -2 flac -8 song.wav        encode on node 2\n  \
               mosrun -j1-3,5 -F make            on any of four nodes, or here\n  \
               mosrun ./simulate                 here; the cluster moves it to where it runs best\n  \
               mosrun -b -m2000 ./simulate       on the best node that has 2000 MB free\n\n\
             Without -l, -L or -k a program is locked if a node was named (-h, -ID, -j). Otherwise it has the\n\
             lock of the process that calls mosrun: it may be moved unless that is locked.",
            PROGRAM_EXIT_CODES,
        ))
}

/// The exit codes of a tool that becomes a program.
pub(super) const PROGRAM_EXIT_CODES: &str = "\
126  the program cannot be executed\n127  the program was not found\n\
Once it runs, the exit status is the program's own.";

/// `mosrun …`. Returns only after printing the help or the version, or if the program was not
/// started.
///
/// # Errors
/// As [`launch`].
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    match options::parse(invocation.args).map_err(|message| Failure::usage(invocation.tool, message))? {
        CommandLine::Help => help::print(describe(), invocation),
        CommandLine::Version => help::print_version(invocation),
        CommandLine::Launch(options) => match launch(&options)? {},
    }
}

/// Registers this process with ternd, then replaces it by the program.
///
/// # Errors
/// A refusal (nothing was run), or 126 or 127 if the program cannot be executed or does not exist.
pub(crate) fn launch(options: &Launch<'_>) -> Result<Infallible, Failure> {
    let (lock, advice) = (options.lock, &options.advice);
    let registration = Request::Register { lock, never: options.never_migrates, advice: advice.clone() };
    match &options.target {
        // At home the program runs with or without ternd.
        LaunchTarget::HereLocked => drop(client::request(&registration)),
        LaunchTarget::Here => match client::request(&registration) {
            Ok(Reply::Done) => {}
            Ok(other) if !options.fallback => return Err(client::unexpected_reply(&other)),
            Err(failure) if !options.fallback => return Err(fallback_hint(failure)),
            Ok(_) | Err(_) => {}
        },
        LaunchTarget::Best => {
            prepare_destination(&Request::AtBest { lock, advice: advice.clone() }, options, &registration)?;
        }
        LaunchTarget::Nodes(nodes) => {
            let request = Request::AtExec { candidates: nodes.clone(), lock, advice: advice.clone() };
            prepare_destination(&request, options, &registration)?;
        }
    }
    Err(replace_process(options.program, &options.arguments))
}

/// Asks ternd to prepare a destination. If that fails and the user gave -F, registers the process
/// at home.
fn prepare_destination(
    request: &Request,
    options: &Launch<'_>,
    registration: &Request,
) -> Result<(), Failure> {
    match client::request(request) {
        Ok(Reply::Ready) => {}
        Ok(other) if !options.fallback => return Err(client::unexpected_reply(&other)),
        Err(failure) if !options.fallback => return Err(fallback_hint(failure)),
        Ok(_) | Err(_) => drop(client::request(registration)),
    }
    Ok(())
}

/// Suggests -F for an unavailable node if the failure has no hint.
fn fallback_hint(failure: Failure) -> Failure {
    let unavailable = failure.code == RefusalKind::Unavailable.exit_code();
    if unavailable && failure.hint.is_none() { failure.hint("-F, to run it here instead") } else { failure }
}
