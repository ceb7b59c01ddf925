//! `mexec`: runs a command on the node that runs it best, as if it ran here.

pub(super) mod child;
mod inherited;
mod placement;
pub(super) mod signals;
mod streams;

use super::mpmake::event_log::CommandRecord;
use crate::command::run::mosrun::options;
use crate::command::run::mosrun::replace_process::{argv_of, replace_process};
use crate::tool::Invocation;
use crate::{Failure, client, help, node_name, output};
use clap::{Arg, ArgAction, Command};
use std::ffi::OsStr;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use tern_control::{RefusalKind, Reply, Request};
use tern_ids::NodeId;
use tern_mexec::messages::{ExecReply, JobRequest, NodeChoice, StartFailure, Task};

/// The exit code when the node that ran the command was lost; the same as ssh's.
const EXIT_NODE_LOST: u8 = 255;

/// The number of characters of a command line that are recorded.
const MAX_RECORDED_CHARS: usize = 2000;

/// The additional exit codes of a tool that runs a command elsewhere.
const COMMAND_EXIT_CODES: &str = "\
126  the command cannot be executed\n127  the command was not found\n255  the node that ran it was lost\n\
Once it runs, the exit status, or death by a signal, is the command's own.";

/// Describes the command line.
pub(crate) fn describe() -> Command {
    help::command("mexec")
        .about("Run a command on the node that runs it best, as if it ran here")
        .long_about(
            "Run a command on the node that runs it best: here while this node is idle, otherwise where the load \
             is lowest. It has the caller's environment, directory, umask, limits, groups and nice value; its \
             standard streams, signals and exit status are as if it ran here. It sees this node's files, \
             including compilers and headers, through MFS, and /dev, /proc, /sys and /run of the node where it runs. \
             It does not migrate, and processes that it leaves behind are ended with it. When no node has free capacity \
             it waits for its turn. mexec is for short commands with much I/O, as in builds; use mosrun for long \
             computations.",
        )
        .override_usage("mexec [-n NODES|-b] [-g] [-i] [-r] [-v] [--] COMMAND [ARG..]\n       mexec --report-of FILE")
        .arg(Arg::new("nodes").short('n').value_name("NODES").help("Only one of these nodes: 2,4-6, or names"))
        .arg(Arg::new("best").short('b').action(ArgAction::SetTrue).help("The best of all nodes (the default)"))
        .arg(
            Arg::new("group")
                .short('g')
                .action(ArgAction::SetTrue)
                .help("Forward SIGHUP, SIGINT and SIGQUIT to its whole process group, as a terminal does, whatever sends them"),
        )
        .arg(
            Arg::new("interactive")
                .short('i')
                .action(ArgAction::SetTrue)
                .help("Give it a terminal of its own, as ssh -t does"),
        )
        .arg(
            Arg::new("repeatable")
                .short('r')
                .action(ArgAction::SetTrue)
                .help("Run it again on another node if its node is lost: for commands that may run twice and have no input (< /dev/null). With -r, temporary files ($TMPDIR) are on the node where it runs"),
        )
        .arg(
            Arg::new("verbose")
                .short('v')
                .action(ArgAction::SetTrue)
                .help("Report on standard error where it runs"),
        )
        .arg(Arg::new("report-of").long("report-of").value_name("FILE").exclusive(true).help(
            "Print a page about the commands recorded in FILE, as mpmake --report does: mexec records each command in the file named by TERN_PLACED",
        ))
        .arg(Arg::new("command").value_name("COMMAND").num_args(1..).trailing_var_arg(true).help(
            "The command, searched for on the node where it runs, and its arguments",
        ))
        .after_help(help::after_help(
            "  mexec gcc -c big.c                     on the least loaded node\n  \
               mexec -n 2,3 -- ./render frame7        on one of two nodes\n  \
               make -j12 CC=\"mexec -r gcc\"            the compilations of a build\n  \
               RUSTC_WRAPPER=mexec cargo build -j12    other tools: docs/guide/builds.md\n  \
               ls *.wav | xargs -P8 -n1 mexec flac -8 -s\n  \
               TERN_PLACED=$PWD/notes ninja -j12; mexec --report-of notes > build.html",
            COMMAND_EXIT_CODES,
        ))
}

/// A parsed command line.
struct Options<'a> {
    nodes: NodeChoice,
    group: bool,
    interactive: bool,
    repeatable: bool,
    verbose: bool,
    program: &'a OsStr,
    arguments: Vec<&'a OsStr>,
}

fn parse<'a>(invocation: &Invocation<'a>) -> Result<Options<'a>, Failure> {
    let (mut nodes, mut rest) = (NodeChoice::Best, invocation.args);
    let (mut group, mut interactive, mut repeatable, mut verbose) = (false, false, false, false);
    let usage_error = |message: String| Failure::usage(invocation.tool, message);
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
                ("", None) => return Err(usage_error("-n needs a list of nodes".into())),
                (attached, _) => attached.to_owned(),
            };
            nodes = NodeChoice::Among(parse_nodes(&list)?);
            continue;
        }
        for letter in letters.chars() {
            match letter {
                'b' => nodes = NodeChoice::Best,
                'g' => group = true,
                'i' => interactive = true,
                'r' => repeatable = true,
                'v' => verbose = true,
                _ => return Err(usage_error(format!("unknown option '-{letters}'"))),
            }
        }
    }
    let Some((program, args)) = rest.split_first() else {
        return Err(usage_error("no command was given".into()));
    };
    let arguments = argv_of(program, args);
    Ok(Options { nodes, group, interactive, repeatable, verbose, program, arguments })
}

/// Parses a list of nodes: numbers and ranges, or names.
fn parse_nodes(list: &str) -> Result<Vec<NodeId>, Failure> {
    if let Ok(nodes) = options::parse_nodes(list) {
        return Ok(nodes);
    }
    list.split(',').map(node_name::resolve).collect()
}

/// The class under which the usage profile of a command is kept: its program; for a shell script
/// given with -c, the shell and the first command.
fn profile_class(program: &OsStr, arguments: &[&OsStr]) -> String {
    let base = |path: &OsStr| {
        Path::new(path).file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    };
    let name = base(program);
    let shell = ["sh", "bash", "dash", "ksh", "zsh"].contains(&&*name);
    let script =
        shell.then(|| arguments.iter().skip_while(|word| !is_command_option(&word.to_string_lossy())).nth(1));
    match script.flatten() {
        Some(script) => {
            let script = script.to_string_lossy();
            let first = script.split_whitespace().find(|word| !word.contains('=')).unwrap_or_default();
            format!("{name} {}", base(OsStr::new(first)))
        }
        None => name,
    }
}

/// Whether this is the shell's option -c, perhaps combined with others (-ec).
fn is_command_option(word: &str) -> bool {
    word.starts_with('-') && !word.starts_with("--") && word.ends_with('c')
}

/// `mexec …`.
///
/// # Errors
/// A refusal (nothing was run), 126 or 127 if the program cannot be executed or does not exist, 255
/// if its node was lost, or the command's own status.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    match invocation.args.first().and_then(|word| word.to_str()) {
        Some("--help" | "-h") => return help::print(describe(), invocation),
        Some("--version") => return help::print_version(invocation),
        Some("--report-of") => {
            let [_, file] = invocation.args else {
                return Err(Failure::usage(invocation.tool, "--report-of needs one file"));
            };
            return super::mpmake::report_of(Path::new(file));
        }
        _ => {}
    }
    let options = parse(invocation)?;
    let mut task = inherited::task(options.program, &options.arguments)?;
    let terminal = options.interactive.then(streams::RawTerminal::window).flatten();
    if options.interactive && terminal.is_none() {
        return Err(Failure::usage(invocation.tool, "-i needs a terminal as standard input"));
    }
    task.terminal = terminal;
    // A repeatable command keeps its temporary files on the node where it runs.
    task.private_tmp = options.repeatable;
    let record = CommandRecord::requested(&task.summary(MAX_RECORDED_CHARS));
    let result = run_placed(&options, task, record.as_ref());
    // If there is a status, `run_placed` has recorded the end already.
    if let (Some(record), Err(failure)) = (record, &result) {
        record.failed(failure.code);
    }
    match result? {
        Some(status) => signals::end_as(status),
        None => Err(replace_process(options.program, &options.arguments)),
    }
}

/// Lets tern-exec place the command, and waits for its end. Returns its status, or `None` if this
/// process must become the command.
fn run_placed(
    options: &Options<'_>,
    task: Task,
    record: Option<&CommandRecord>,
) -> Result<Option<i32>, Failure> {
    let class = profile_class(options.program, &options.arguments);
    let ignored = task.ignored_signals;
    let job = JobRequest { task, nodes: options.nodes.clone(), repeatable: options.repeatable, class };
    let mut executor = connect()?;
    match placement::request(&mut executor, &job, record)? {
        ExecReply::RunLocally => {
            if options.verbose {
                report("here");
            }
            drop(executor);
            let Some(record) = record else { return Ok(None) };
            let (status, cpu) = child::run(options.program, &options.arguments, ignored)?;
            record.ended(status, Some(cpu));
            Ok(Some(status))
        }
        ExecReply::Started(node) => {
            if options.verbose {
                report(&format!("on node {node}"));
            }
            match streams::serve(executor, &job.task, options.group)? {
                ExecReply::Exited(ended) => {
                    if let Some(record) = record {
                        record.ended(ended.status, Some(ended.cpu_us));
                    }
                    Ok(Some(ended.status))
                }
                reply => Err(command_failure(reply, options)),
            }
        }
        reply => Err(command_failure(reply, options)),
    }
}

/// Runs a command here without placing it. Without a record, this process becomes the command. With
/// a record, the command is a child, its end is recorded, and this process ends in the same way.
///
/// # Errors
/// Why it was not run, or its status.
pub(super) fn run_here(
    program: &OsStr,
    arguments: &[&OsStr],
    record: Option<CommandRecord>,
) -> Result<(), Failure> {
    let Some(record) = record else { return Err(replace_process(program, arguments)) };
    let (status, cpu) = child::run(program, arguments, ignored_signals())?;
    record.ended(status, Some(cpu));
    signals::end_as(status)
}

/// The signals that this process ignores, as a bit mask.
pub(super) fn ignored_signals() -> u64 {
    inherited::signals().0
}

fn report(what: &str) {
    let _gone = io::Write::write_all(&mut io::stderr(), format!("mexec: {what}\n").as_bytes());
}

/// The failure for a command that was not run, or not to its end.
fn command_failure(reply: ExecReply, options: &Options<'_>) -> Failure {
    let program = options.program.to_string_lossy();
    match reply {
        ExecReply::Refused(refusal) => refusal.into(),
        ExecReply::StartFailed(what, errno) => {
            let error = io::Error::from_raw_os_error(errno);
            let why = output::error_text(&error);
            match what {
                StartFailure::Program => {
                    let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
                    Failure::with_code(code, format!("{program}: {why}"))
                }
                StartFailure::Directory => Failure::new(
                    RefusalKind::Unavailable,
                    format!("this directory is not visible there: {why}"),
                )
                .hint("cd to a directory outside /dev, /proc, /sys and /run"),
                StartFailure::Setup => Failure::new(
                    RefusalKind::Unavailable,
                    format!("{program} cannot be started there: {why}"),
                ),
            }
        }
        ExecReply::NodeLost(node) => {
            Failure::with_code(EXIT_NODE_LOST, format!("node {node} was lost while it ran {program}"))
        }
        reply => {
            Failure::new(RefusalKind::Internal, format!("tern-exec sent an unexpected reply: {reply:?}"))
        }
    }
}

fn connection_failure(error: &io::Error) -> Failure {
    Failure::new(RefusalKind::Unavailable, format!("the connection to tern-exec was lost: {error}"))
        .hint("exec.log in ternd's run directory, for the reason; then try again")
}

/// Connects to the service that places commands; ternd starts it if it does not run.
fn connect() -> Result<UnixStream, Failure> {
    let socket = client::run_dir().join(tern_mexec::SOCKET);
    if let Ok(executor) = UnixStream::connect(&socket) {
        return Ok(executor);
    }
    match client::request(&Request::StartMexec)? {
        Reply::Done => UnixStream::connect(&socket).map_err(|e| connection_failure(&e)),
        other => Err(client::unexpected_reply(&other)),
    }
}

/// The bytes of a program name or an argument, for the request.
fn bytes(word: &OsStr) -> Vec<u8> {
    std::os::unix::ffi::OsStrExt::as_bytes(word).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn parse_line(line: &str) -> Result<(NodeChoice, [bool; 4], String), String> {
        let args: Vec<_> = line.split_whitespace().map(OsString::from).collect();
        let options = parse(&Invocation { tool: "mexec", args: &args }).map_err(|failure| failure.message)?;
        let flags = [options.group, options.interactive, options.repeatable, options.verbose];
        Ok((options.nodes, flags, format!("{:?}", options.arguments)))
    }

    #[test]
    fn options_end_at_the_command() {
        let best = |flags, words: &str| Ok((NodeChoice::Best, flags, words.to_owned()));
        assert_eq!(parse_line("gcc -n x"), best([false; 4], r#"["gcc", "-n", "x"]"#));
        assert_eq!(parse_line("-rv -- -x"), best([false, false, true, true], r#"["-x"]"#));
        let some = NodeChoice::Among(vec![NodeId(2), NodeId(4), NodeId(5)]);
        assert_eq!(parse_line("-g -- -n"), best([true, false, false, false], r#"["-n"]"#));
        assert_eq!(parse_line("-n 2,4-5 a"), Ok((some.clone(), [false; 4], r#"["a"]"#.into())));
        assert_eq!(parse_line("-n2,4-5 a"), Ok((some, [false; 4], r#"["a"]"#.into())));
        assert_eq!(parse_line("-x a").unwrap_err(), "unknown option '-x'");
        assert_eq!(parse_line("-b").unwrap_err(), "no command was given");
    }

    #[test]
    fn class_is_program_or_first_shell_command() {
        let class = |line: &[&str]| {
            let words: Vec<_> = line.iter().map(|word| OsStr::new(*word)).collect();
            super::profile_class(words[0], &words)
        };
        assert_eq!(class(&["/usr/bin/gcc", "-c", "x.c"]), "gcc");
        assert_eq!(class(&["sh", "-ec", "X=1 /bin/ld -o a && b"]), "sh ld");
        assert_eq!(class(&["bash", "script"]), "bash");
        assert_eq!(class(&["bash", "build.c", "x"]), "bash");
    }
}
