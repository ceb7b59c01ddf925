//! `mosrun`: start a program where it shall run, in this very process.
//!
//! mosrun asks ternd, then becomes the program: same pid, same parent, no wrapper. For a start on another node
//! ternd answers when a destination is prepared; the program is moved there as its execve completes, when it
//! has next to no memory.

pub mod become_program;
pub mod options;

use crate::tool::Call;
use crate::{Failure, client, help};
use become_program::become_program;
use clap::{Arg, ArgAction, Command, value_parser};
use options::{Place, Start, Words};
use std::convert::Infallible;
use std::ffi::OsString;
use tern_control::{RefusalKind, Reply, Request};

/// The command line. It is read by `options`; this is for people.
pub fn describe() -> Command {
    let flag = |name: &'static str, letter| Arg::new(name).short(letter).action(ArgAction::SetTrue);
    let value = |name: &'static str, letter, value| Arg::new(name).short(letter).value_name(value);
    help::command("mosrun")
        .about("Run a program on a node of the cluster")
        .long_about(
            "Run a program on a node of the cluster. mosrun becomes the program: it keeps this process's pid, \
             terminal, files, environment and signals, wherever it runs.\n\nWithout -h, -ID, -j or -b it starts \
             here, and the cluster moves it and its children to where they run best.",
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
                .help("Run it on a node of these, in random order until one takes it, as in -j1-3,5"),
        )
        .arg(flag("best", 'b').help("Run it on the node where it will run best just now"))
        .arg(flag("fallback", 'F').help("If the node is unavailable, run it here rather than not at all"))
        .arg(flag("unlock", 'l').help("Let the cluster move it by itself"))
        .arg(flag("lock", 'L').help("Let it move only when told, and in emergencies"))
        .arg(flag("keep", 'k').help("As the process is that calls mosrun"))
        .arg(flag("argv0", 'z').help("The first ARG is the program's argv[0]"))
        .arg(flag("cpu", 'c').help("It computes: its system calls do not hold it at home (cpujob)"))
        .arg(flag("io", 'i').help("It reads and writes: it belongs where its files are (iojob)"))
        .arg(flag("nodecay", 'n').help("Its habits are never forgotten"))
        .arg(flag("slow", 's').help("They are forgotten slowly, as mosctl setdecay says; also the default"))
        .arg(flag("fast", 'f').help("They are forgotten fast"))
        .arg(value("decay", 'd', "N").help("Of its habits, so many parts of 1000 stay each interval"))
        .arg(value("memory", 'm', "MB").help("It will need so much memory: nodes with less free do not get it"))
        .arg(value("job", 'J', "JOB").help("A number by which mps, migrate and moskillall find several programs"))
        .arg(Arg::new("only").long("only").value_name("LIST").help("The nodes where it may run, besides its home"))
        .arg(Arg::new("not").long("not").value_name("LIST").help("The nodes where it may not"))
        .arg(Arg::new("help").long("help").action(ArgAction::SetTrue).help("Print this help"))
        .arg(Arg::new("version").long("version").action(ArgAction::SetTrue).help("Print the version"))
        .arg(
            Arg::new("program")
                .value_name("PROGRAM")
                .num_args(1..)
                .trailing_var_arg(true)
                .value_parser(value_parser!(OsString))
                .help("What to run, found as the shell finds it, and its arguments"),
        )
        .after_help(help::closing(
            "  mosrun -2 flac -8 song.wav        encode on node 2\n  \
               mosrun -j1-3,5 -F make            on any of four nodes, or here\n  \
               mosrun ./simulate                 here; the cluster moves it to where it runs best\n  \
               mosrun -b -m2000 ./simulate       on the best node that has 2000 MB free\n\n\
             Without -l, -L or -k a program is locked if a node was named (-h, -ID, -j). Otherwise it is as what\n\
             calls mosrun: free to be moved, unless that was locked.",
            OWN_CODES,
        ))
}

/// What a tool adds to the exit codes if it becomes a program.
pub(super) const OWN_CODES: &str = "\
126  the program cannot be executed\n127  the program was not found\n\
Once it runs, the exit status is the program's own.";

/// `mosrun …`; returns only if no program runs, or help was asked for.
///
/// # Errors
/// Those of `begin`.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    match options::read(call.args).map_err(|message| Failure::usage(call.tool, message))? {
        Words::Help => help::print(describe(), call),
        Words::Version => help::print_version(call),
        Words::Start(start) => match begin(&start)? {},
    }
}

/// Tells ternd of this process, and makes it the program.
///
/// # Errors
/// A refusal (nothing was run), or 126 or 127 if there is no such program.
pub fn begin(start: &Start<'_>) -> Result<Infallible, Failure> {
    let (lock, advice) = (start.lock, &start.advice);
    let registered = Request::Register { lock, never: start.never, advice: advice.clone() };
    match &start.place {
        // At home it runs with ternd or without it.
        Place::Home => drop(client::ask(&registered)),
        Place::Here => match client::ask(&registered) {
            Ok(Reply::Done) => {}
            Ok(other) if !start.fallback => return Err(client::unexpected(&other)),
            Err(failure) if !start.fallback => return Err(fallback_hint(failure)),
            Ok(_) | Err(_) => {}
        },
        Place::Best => placed(&Request::AtBest { lock, advice: advice.clone() }, start, &registered)?,
        Place::Nodes(nodes) => {
            let request = Request::AtExec { candidates: nodes.clone(), lock, advice: advice.clone() };
            placed(&request, start, &registered)?;
        }
    }
    Err(become_program(start.program, &start.arguments))
}

/// Has a place prepared for this process; if there is none and the user would rather have it run here, it is noted.
fn placed(request: &Request, start: &Start<'_>, registered: &Request) -> Result<(), Failure> {
    match client::ask(request) {
        Ok(Reply::Ready) => {}
        Ok(other) if !start.fallback => return Err(client::unexpected(&other)),
        Err(failure) if !start.fallback => return Err(fallback_hint(failure)),
        Ok(_) | Err(_) => drop(client::ask(registered)),
    }
    Ok(())
}

/// What to try if nothing more exact is known.
fn fallback_hint(failure: Failure) -> Failure {
    let unavailable = failure.code == RefusalKind::Unavailable.exit_code();
    if unavailable && failure.hint.is_none() { failure.hint("-F, to run it here instead") } else { failure }
}
