//! `mexec`: a command on the node that runs it best, as if it ran here.

pub(super) mod child;
mod inherited;
mod place;
pub(super) mod signals;
mod streams;

use super::mosrun::become_program::{arguments, become_program};
use super::mosrun::options;
use super::mpmake::notes::Noted;
use crate::tool::Call;
use crate::{Failure, client, help, output, place as places};
use clap::{Arg, ArgAction, Command};
use std::ffi::OsStr;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use tern_control::{RefusalKind, Reply, Request};
use tern_ids::NodeId;
use tern_mexec::words::{Failed, Order, Said, Task, Where};

/// Ended with when the node that ran it was lost, as ssh does.
const LOST: u8 = 255;

/// Of a command, so many characters are noted.
const NOTED: usize = 2000;

/// What a tool that runs a command elsewhere adds to the exit codes.
const OWN_CODES: &str = "\
126  the command cannot be executed\n127  the command was not found\n255  the node that ran it was lost\n\
Once it runs, the exit status, or death by a signal, is the command's own.";

/// The command line.
pub fn describe() -> Command {
    help::command("mexec")
        .about("Run a command on the node that runs it best, as if it ran here")
        .long_about(
            "Run a command on the node that runs it best: here while this node has nothing to do, else where the load is lowest. It has \
             the caller's environment, directory, umask, limits, groups and nice value; its standard streams, \
             signals and exit status are as if it ran here. There it sees this node's files, the compilers and headers \
             too, through MFS, and that node's own /dev, /proc, /sys and /run. It does not migrate, and what it leaves running is ended with it. When no node has room it waits for its \
             turn. For short commands that read and write much, as builds are made of; what computes for long is mosrun's.",
        )
        .override_usage("mexec [-n NODES|-b] [-g] [-i] [-r] [-v] [--] COMMAND [ARG..]\n       mexec --report-of FILE")
        .arg(Arg::new("nodes").short('n').value_name("NODES").help("One of these only: 2,4-6, or names"))
        .arg(Arg::new("best").short('b').action(ArgAction::SetTrue).help("The best of all; so unless -n is said"))
        .arg(
            Arg::new("group")
                .short('g')
                .action(ArgAction::SetTrue)
                .help("Pass SIGHUP, SIGINT and SIGQUIT on to all its process group, as a terminal does, whoever sends them"),
        )
        .arg(
            Arg::new("interactive")
                .short('i')
                .action(ArgAction::SetTrue)
                .help("With a terminal of its own, as ssh -t"),
        )
        .arg(
            Arg::new("repeatable")
                .short('r')
                .action(ArgAction::SetTrue)
                .help("If its node is lost, run it again on another: for what may be done twice, and has no input (< /dev/null). Temporary files ($TMPDIR) are on that node then"),
        )
        .arg(
            Arg::new("verbose")
                .short('v')
                .action(ArgAction::SetTrue)
                .help("Say on standard error where it runs"),
        )
        .arg(Arg::new("report-of").long("report-of").value_name("FILE").exclusive(true).help(
            "Print a page about the commands that were noted in FILE, as mpmake --report: mexec notes each where TERN_PLACED names it",
        ))
        .arg(Arg::new("command").value_name("COMMAND").num_args(1..).trailing_var_arg(true).help(
            "What to run, found there as the shell finds it, and its arguments",
        ))
        .after_help(help::closing(
            "  mexec gcc -c big.c                     where the load is lowest\n  \
               mexec -n 2,3 -- ./render frame7        on one of two nodes\n  \
               make -j12 CC=\"mexec -r gcc\"            the compilations of a build\n  \
               RUSTC_WRAPPER=mexec cargo build -j12    other tools: docs/builds.md\n  \
               ls *.wav | xargs -P8 -n1 mexec flac -8 -s\n  \
               TERN_PLACED=$PWD/notes ninja -j12; mexec --report-of notes > build.html",
            OWN_CODES,
        ))
}

/// What the words say.
struct Words<'a> {
    r#where: Where,
    group: bool,
    interactive: bool,
    repeatable: bool,
    verbose: bool,
    program: &'a OsStr,
    arguments: Vec<&'a OsStr>,
}

fn read<'a>(call: &Call<'a>) -> Result<Words<'a>, Failure> {
    let (mut r#where, mut rest) = (Where::Best, call.args);
    let (mut group, mut interactive, mut repeatable, mut verbose) = (false, false, false, false);
    let wrong = |message: String| Failure::usage(call.tool, message);
    while let Some((word, after)) = rest.split_first() {
        let Some(letters) = word.to_str().and_then(|word| word.strip_prefix('-')).filter(|w| !w.is_empty())
        else {
            break;
        };
        rest = after;
        if letters == "-" {
            break;
        }
        if let Some(attached) = letters.strip_prefix('n') {
            let list = match (attached, rest.split_first()) {
                ("", Some((next, after))) => {
                    rest = after;
                    next.to_string_lossy().into_owned()
                }
                ("", None) => return Err(wrong("-n needs a list of nodes".into())),
                (attached, _) => attached.to_owned(),
            };
            r#where = Where::Among(nodes(&list)?);
            continue;
        }
        for letter in letters.chars() {
            match letter {
                'b' => r#where = Where::Best,
                'g' => group = true,
                'i' => interactive = true,
                'r' => repeatable = true,
                'v' => verbose = true,
                _ => return Err(wrong(format!("unknown option '-{letters}'"))),
            }
        }
    }
    let Some((program, args)) = rest.split_first() else {
        return Err(wrong("no command was given".into()));
    };
    let arguments = arguments(program, args);
    Ok(Words { r#where, group, interactive, repeatable, verbose, program, arguments })
}

/// A list of numbers and ranges, or of names.
fn nodes(list: &str) -> Result<Vec<NodeId>, Failure> {
    if let Ok(nodes) = options::nodes(list) {
        return Ok(nodes);
    }
    list.split(',').map(places::node).collect()
}

/// What is known of commands is kept by this: the program, and of a shell's commands the first one.
fn class(program: &OsStr, arguments: &[&OsStr]) -> String {
    let base = |path: &OsStr| {
        Path::new(path).file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    };
    let name = base(program);
    let shell = ["sh", "bash", "dash", "ksh", "zsh"].contains(&&*name);
    let script =
        shell.then(|| arguments.iter().skip_while(|word| !word.to_string_lossy().ends_with('c')).nth(1));
    match script.flatten() {
        Some(script) => {
            let script = script.to_string_lossy();
            let first = script.split_whitespace().find(|word| !word.contains('=')).unwrap_or_default();
            format!("{name} {}", base(OsStr::new(first)))
        }
        None => name,
    }
}

/// `mexec …`.
///
/// # Errors
/// A refusal (nothing was run), 126 or 127 if there is no such program, 255 if its node was lost, or the command's own status.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    match call.args.first().and_then(|word| word.to_str()) {
        Some("--help" | "-h") => return help::print(describe(), call),
        Some("--version") => return help::print_version(call),
        Some("--report-of") => {
            let [_, file] = call.args else {
                return Err(Failure::usage(call.tool, "--report-of needs one file"));
            };
            return super::mpmake::report_of(Path::new(file));
        }
        _ => {}
    }
    let words = read(call)?;
    let mut task = inherited::task(words.program, &words.arguments)?;
    let terminal = words.interactive.then(streams::Raw::window).flatten();
    if words.interactive && terminal.is_none() {
        return Err(Failure::usage(call.tool, "-i needs a terminal as standard input"));
    }
    task.terminal = terminal;
    // What may be run twice, and by whom it is not known, has no use for a temporary file of another's.
    task.scratch = words.repeatable;
    let noted = Noted::asked(&task.shown(NOTED));
    let ended = attend(&words, task, noted.as_ref());
    // Of a command that has run, its end is noted already.
    if let (Some(noted), Err(failure)) = (noted, &ended) {
        noted.failed(failure.code);
    }
    match ended? {
        Some(status) => signals::end_as(status),
        None => Err(become_program(words.program, &words.arguments)),
    }
}

/// Has it run, and waits for its end: its status, or nothing if this process is to become it.
fn attend(words: &Words<'_>, task: Task, noted: Option<&Noted>) -> Result<Option<i32>, Failure> {
    let class = class(words.program, &words.arguments);
    let ignored = task.signals.0;
    let order = Order { task, r#where: words.r#where.clone(), repeatable: words.repeatable, class };
    let mut home = connect()?;
    match place::find(&mut home, &order, noted)? {
        Said::Here => {
            if words.verbose {
                tell("here");
            }
            drop(home);
            let Some(noted) = noted else { return Ok(None) };
            let (status, cpu) = child::run(words.program, &words.arguments, ignored)?;
            noted.ended(status, Some(cpu));
            Ok(Some(status))
        }
        Said::Started(node) => {
            if words.verbose {
                tell(&format!("on node {node}"));
            }
            match streams::attend(home, &order.task, words.group)? {
                Said::Ended(ended) => {
                    if let Some(noted) = noted {
                        noted.ended(ended.status, Some(ended.cpu));
                    }
                    Ok(Some(ended.status))
                }
                said => Err(not_run(said, words)),
            }
        }
        said => Err(not_run(said, words)),
    }
}

/// Runs something here that is not placed; returns only if it is not run, or has ended and somebody wanted to know.
///
/// # Errors
/// That it is not run, or its status.
pub(super) fn run_here(program: &OsStr, arguments: &[&OsStr], noted: Option<Noted>) -> Result<(), Failure> {
    let Some(noted) = noted else { return Err(become_program(program, arguments)) };
    let (status, cpu) = child::run(program, arguments, ignored())?;
    noted.ended(status, Some(cpu));
    signals::end_as(status)
}

/// The signals that this process ignores, as bits.
pub(super) fn ignored() -> u64 {
    inherited::signals().0
}

fn tell(what: &str) {
    let _gone = io::Write::write_all(&mut io::stderr(), format!("mexec: {what}\n").as_bytes());
}

/// Why it does not run, or not to its end.
fn not_run(said: Said, words: &Words<'_>) -> Failure {
    let program = words.program.to_string_lossy();
    match said {
        Said::Refused(refusal) => refusal.into(),
        Said::NotStarted(what, errno) => {
            let error = io::Error::from_raw_os_error(errno);
            let why = output::reason(&error);
            match what {
                Failed::Program => {
                    let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
                    Failure { code, message: format!("{program}: {why}"), hint: None }
                }
                Failed::Directory => {
                    Failure::new(RefusalKind::Unavailable, format!("this directory is not seen there: {why}"))
                        .hint("cd to a directory below none of /dev, /proc, /sys and /run")
                }
                Failed::Setting => {
                    Failure::new(RefusalKind::Unavailable, format!("{program} cannot be begun there: {why}"))
                }
            }
        }
        Said::Lost(node) => Failure {
            code: LOST,
            message: format!("node {node} was lost while it ran {program}"),
            hint: None,
        },
        said => {
            Failure::new(RefusalKind::Internal, format!("{said:?} was said where a command was to be run"))
        }
    }
}

fn broken(error: &io::Error) -> Failure {
    Failure::new(RefusalKind::Unavailable, format!("what places commands has gone: {error}"))
        .hint("exec.log in ternd's run directory says why; try again")
}

/// Connects to what places commands; ternd starts it.
fn connect() -> Result<UnixStream, Failure> {
    let socket = client::run_dir().join(tern_mexec::SOCKET);
    if let Ok(home) = UnixStream::connect(&socket) {
        return Ok(home);
    }
    match client::ask(&Request::Mexec)? {
        Reply::Done => UnixStream::connect(&socket).map_err(|e| broken(&e)),
        other => Err(client::unexpected(&other)),
    }
}

/// Words of the system as they travel.
fn bytes(word: &OsStr) -> Vec<u8> {
    std::os::unix::ffi::OsStrExt::as_bytes(word).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn read_line(line: &str) -> Result<(Where, [bool; 4], String), String> {
        let args: Vec<_> = line.split_whitespace().map(OsString::from).collect();
        let words = read(&Call { tool: "mexec", args: &args }).map_err(|failure| failure.message)?;
        let flags = [words.group, words.interactive, words.repeatable, words.verbose];
        Ok((words.r#where, flags, format!("{:?}", words.arguments)))
    }

    #[test]
    fn options_end_at_the_command() {
        let best = |flags, words: &str| Ok((Where::Best, flags, words.to_owned()));
        assert_eq!(read_line("gcc -n x"), best([false; 4], r#"["gcc", "-n", "x"]"#));
        assert_eq!(read_line("-rv -- -x"), best([false, false, true, true], r#"["-x"]"#));
        let some = Where::Among(vec![NodeId(2), NodeId(4), NodeId(5)]);
        assert_eq!(read_line("-g -- -n"), best([true, false, false, false], r#"["-n"]"#));
        assert_eq!(read_line("-n 2,4-5 a"), Ok((some.clone(), [false; 4], r#"["a"]"#.into())));
        assert_eq!(read_line("-n2,4-5 a"), Ok((some, [false; 4], r#"["a"]"#.into())));
        assert_eq!(read_line("-x a").unwrap_err(), "unknown option '-x'");
        assert_eq!(read_line("-b").unwrap_err(), "no command was given");
    }

    #[test]
    fn classes_are_programs_and_first_commands() {
        let class = |line: &[&str]| {
            let words: Vec<_> = line.iter().map(|word| OsStr::new(*word)).collect();
            super::class(words[0], &words)
        };
        assert_eq!(class(&["/usr/bin/gcc", "-c", "x.c"]), "gcc");
        assert_eq!(class(&["sh", "-ec", "X=1 /bin/ld -o a && b"]), "sh ld");
        assert_eq!(class(&["bash", "script"]), "bash");
    }
}
