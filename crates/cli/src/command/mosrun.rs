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
    let later = "Advice for balancing, as are -i, -n, -s and -f; accepted as in MOSIX, balancing comes later";
    help::command("mosrun")
        .about("Run a program on a node of the cluster")
        .long_about(
            "Run a program on a node of the cluster. mosrun becomes the program: it keeps this process's pid, \
             terminal, files, environment and signals, wherever it runs.\n\nWithout -h, -ID or -j it starts \
             here, from where migrate can move it.",
        )
        .override_usage("mosrun [-h | -ID | -jID1-ID2[,ID3..] | -b] [-F] [-l | -L | -k] [-z] [--] PROGRAM [ARG..]")
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
        .arg(flag("best", 'b').help("Run it on the best node; until balancing comes, that is this one"))
        .arg(flag("fallback", 'F').help("If the node is unavailable, run it here rather than not at all"))
        .arg(flag("unlock", 'l').help("Let the cluster move it by itself"))
        .arg(flag("lock", 'L').help("Let it move only when told, and in emergencies"))
        .arg(flag("keep", 'k').help("As the process is that calls mosrun"))
        .arg(flag("argv0", 'z').help("The first ARG is the program's argv[0]"))
        .arg(flag("cpu", 'c').help(later))
        .arg(flag("io", 'i').hide(true))
        .arg(flag("nodecay", 'n').hide(true))
        .arg(flag("slow", 's').hide(true))
        .arg(flag("fast", 'f').hide(true))
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
               mosrun -l ./simulate              here; the cluster may move it\n\n\
             Without -l, -L or -k a program is locked, unless only advice (-c, -i, -n, -s, -f) or -b is\n\
             given: then it is as its caller. None of these five has an effect yet.",
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
    let registered = Request::Register { lock: start.lock, never: start.never };
    match &start.place {
        // At home it runs with ternd or without it.
        Place::Home => drop(client::ask(&registered)),
        Place::Here => match client::ask(&registered) {
            Ok(Reply::Done) => {}
            Ok(other) if !start.fallback => return Err(client::unexpected(&other)),
            Err(failure) if !start.fallback => return Err(fallback_hint(failure)),
            Ok(_) | Err(_) => {}
        },
        Place::Nodes(nodes) => {
            let request = Request::AtExec { candidates: nodes.clone(), lock: start.lock };
            match client::ask(&request) {
                Ok(Reply::Ready) => {}
                Ok(other) if !start.fallback => return Err(client::unexpected(&other)),
                Err(failure) if !start.fallback => return Err(fallback_hint(failure)),
                Ok(_) | Err(_) => drop(client::ask(&registered)),
            }
        }
    }
    Err(become_program(start.program, &start.arguments))
}

/// What to try if nothing more exact is known.
fn fallback_hint(failure: Failure) -> Failure {
    let unavailable = failure.code == RefusalKind::Unavailable.exit_code();
    if unavailable && failure.hint.is_none() { failure.hint("-F, to run it here instead") } else { failure }
}
