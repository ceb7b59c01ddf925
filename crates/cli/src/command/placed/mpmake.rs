//! `mpmake`: the user's own make, with recipes placed by mexec; and `mpsh`, the shell with which
//! make then runs its recipes.
//!
//! make is not changed: a variable on its command line sets its shell to mpsh, and make passes this
//! variable on to recursive makes in `MAKEFLAGS`. mpsh runs recursive makes (which use the
//! jobserver) and trivial commands at home, and lets mexec place the rest.

mod bottleneck;
mod build;
pub(super) mod event_log;
mod live;
mod options;
mod recipe;
mod report;
mod sampler;
mod statistics;
mod status_line;
mod summary;

use super::mexec;
use super::mexec::child::{self, WaitEvent};
use super::mexec::signals::{SignalQueue, end_as};
use crate::command::run::mosrun::replace_process::{argv_of, replace_process};
use crate::tool::Invocation;
use crate::{Failure, client, help};
use build::Build;
use clap::{Arg, Command};
use event_log::{BuildEvent, BuildStart, CommandRecord, LOG_VARIABLE, NodeInfo};
use live::LiveBuild;
use options::Options;
use sampler::Sampler;
use status_line::StatusLine;
use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::{self, Command as Program};
use std::time::Duration;
use tern_control::{ClusterReport, NodeState, RefusalKind, Reply, Request};

/// The name of the shell.
const SHELL: &str = "mpsh";

/// Causes make to export the names of its makefiles, and of the target, to its recipes, because a
/// makefile may set another SHELL, also for one target.
const EXPORTS: [&str; 2] =
    ["--eval=export TERN_MAKEFILES = $(MAKEFILE_LIST)", "--eval=export TERN_TARGET = $@"];

/// The variable in which make exports the names of its makefiles.
pub(super) const MAKEFILES: &str = "TERN_MAKEFILES";
/// The variable in which make exports the target of a recipe.
const TARGET: &str = "TERN_TARGET";

/// How often the status line is updated.
const STATUS_INTERVAL: Duration = Duration::from_millis(200);

/// Describes mpmake's command line.
pub(crate) fn describe() -> Command {
    help::command("mpmake")
        .about("make, with its recipes placed on the nodes that run them best")
        .long_about(
            "make, with its recipes placed on the nodes that run them best. It runs the installed make, with all \
             its options and output; each command of a recipe is placed as mexec does. Recursive makes and trivial \
             commands run here. Without -j, the number of jobs is the number of CPUs in the cluster plus one per \
             node. On a terminal, a status line shows from the third second on what runs where, and a summary at \
             the end shows how many commands ran where and why. If TERN_PLACED names a file, each command is \
             recorded in it.",
        )
        .override_usage("mpmake [--report FILE.html] [MAKE'S OPTIONS] [TARGET..]")
        .arg(Arg::new("report").long("report").value_name("FILE").help(
            "Write a page that shows when and why each command ran on which node, what it cost, and what limited the build",
        ))
        .arg(Arg::new("words").value_name("WORD").num_args(0..).trailing_var_arg(true).help("The options and targets of make"))
        .after_help(help::after_help(
            "  mpmake                  with as many jobs as the cluster can run\n  mpmake -j12 all\n  mpmake --report=build.html -C src -k check",
            "As make: 2 on an error, 1 with -q if a target is not up to date",
        ))
}

/// Describes mpsh's command line.
pub(crate) fn describe_shell() -> Command {
    help::command(SHELL)
        .about("The shell that mpmake gives to make")
        .long_about(
            "The shell that mpmake gives to make. It runs a command line on the node that runs it best, as mexec \
             does, or here. Without -c it is the shell that the makefile sets, or /bin/sh.",
        )
        .override_usage("mpsh -c COMMANDS")
        .arg(Arg::new("words").value_name("WORD").num_args(0..).trailing_var_arg(true).help("The arguments of a shell"))
        .after_help(help::after_help("  make -j12 SHELL=$(command -v mpsh)     what mpmake does", "Otherwise as the shell"))
}

/// `mpmake …`.
///
/// # Errors
/// If make does not exist, or -j is not given and ternd does not answer. Otherwise make's status;
/// if that is 0, a failure to write the report.
pub(crate) fn run(invocation: &Invocation<'_>) -> Result<(), Failure> {
    if invocation.args.first().is_some_and(|word| word == "--help") {
        return help::print(describe(), invocation);
    }
    let own_path = std::env::current_exe()?;
    let shell = own_path.with_file_name(SHELL);
    if !shell.exists() {
        let text = format!("{} does not exist", shell.display());
        return Err(Failure::new(RefusalKind::NotFound, text).hint("make install, which creates it"));
    }
    let (options, make_args) = options::parse(invocation)?;
    let cluster = cluster();
    let mut make = Program::new("make");
    make.args(EXPORTS).arg(format!("SHELL={}", shell.display()));
    let mut jobs = options::jobs(&make_args);
    if jobs.is_none() {
        let all = default_jobs(cluster.as_ref().map_err(Failure::clone)?);
        make.arg(format!("-j{all}"));
        jobs = Some(all);
    }
    make.args(&make_args);
    let log = EventLog::open(&options)?;
    if let Some(log) = &log {
        make.env(LOG_VARIABLE, &log.file);
        let _disk_full =
            event_log::append(&log.file, &BuildEvent::Build(build_start(invocation, jobs, cluster.ok())));
    }
    let status = run_make(&mut make, log.as_ref(), options.report.is_some())?;
    let Some(log) = log else { return end_as(status) };
    let exit = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
    let over = BuildEvent::Over { at: event_log::now(), exit: u8::try_from(exit).unwrap_or(u8::MAX) };
    let _disk_full = event_log::append(&log.file, &over);
    let build = Build::read(&std::fs::read(&log.file).unwrap_or_default());
    drop(log);
    if io::stderr().is_terminal() {
        summary::print(&build, options.report.as_deref());
    }
    let written = options.report.map_or(Ok(()), |file| options::write(&file, &report::page(&build)));
    // make's own failure takes precedence over that of the report.
    end_as(status).and(written)
}

/// Runs make to its end and meanwhile shows the status line and samples the load. Returns its
/// status as of wait(2).
fn run_make(make: &mut Program, log: Option<&EventLog>, samples: bool) -> Result<i32, Failure> {
    let ignored = mexec::ignored_signals();
    let signals = SignalQueue::new(ignored).map_err(io::Error::from)?;
    let make = make.spawn().map_err(|error| {
        Failure::new(RefusalKind::NotFound, format!("make cannot be run: {error}"))
            .hint("apt-get install make")
    })?;
    let pid = rustix::process::Pid::from_child(&make);
    let Some(log) = log else { return Ok(child::supervise(pid, &signals, None, &mut |_| {})?) };
    let _sampler = samples.then(|| Sampler::start(log.file.clone()));
    let mut display = StatusLine::new().map(|line| (line, LiveBuild::open(&log.file)));
    let tick = display.is_some().then_some(STATUS_INTERVAL);
    let ended = child::supervise(pid, &signals, tick, &mut |event| {
        let Some((status_line, live)) = &mut display else { return };
        match event {
            WaitEvent::Tick => {
                live.read_on();
                status_line.show(|columns| live.line(columns));
            }
            WaitEvent::Stopping => status_line.clear(),
            // The next tick redraws it.
            WaitEvent::Continued | WaitEvent::Resized => {}
        }
    });
    Ok(ended?)
}

fn cluster() -> Result<ClusterReport, Failure> {
    match client::request(&Request::Cluster)? {
        Reply::Cluster(report) => Ok(report),
        other => Err(client::unexpected_reply(&other)),
    }
}

/// The number of jobs without -j: for each node that is up, the number of its CPUs plus one.
fn default_jobs(cluster: &ClusterReport) -> u32 {
    nodes_up(cluster).map(|node| node.cpus.ceil() as u32 + 1).sum::<u32>().max(1)
}

fn nodes_up(cluster: &ClusterReport) -> impl Iterator<Item = &tern_control::NodeLoad> {
    cluster.nodes.iter().filter(|node| node.node == cluster.me || node.state == NodeState::Alive)
}

/// The first event of a build.
fn build_start(invocation: &Invocation<'_>, jobs: Option<u32>, cluster: Option<ClusterReport>) -> BuildStart {
    let words: Vec<_> = invocation.args.iter().map(|word| word.to_string_lossy()).collect();
    let command = format!("mpmake {}", words.join(" ")).trim().to_owned();
    let node = |node: &tern_control::NodeLoad| NodeInfo {
        node: node.node.0,
        host: node.host.clone(),
        cpus: node.cpus,
        speed: node.speed,
    };
    let nodes = cluster.as_ref().map(|cluster| nodes_up(cluster).map(node).collect()).unwrap_or_default();
    BuildStart { at: event_log::now(), command, jobs, me: cluster.map_or(0, |cluster| cluster.me.0), nodes }
}

/// Prints the page about the commands recorded in a file: `mexec --report-of`.
///
/// # Errors
/// If the file cannot be read, or the page cannot be printed.
pub(super) fn report_of(file: &Path) -> Result<(), Failure> {
    let text = std::fs::read(file).map_err(|error| {
        let text = format!("{} cannot be read: {}", file.display(), crate::output::error_text(&error));
        Failure::new(RefusalKind::NotFound, text)
            .hint(format!("set {LOG_VARIABLE}={} for the commands that run mexec", file.display()))
    })?;
    crate::output::print(&report::page(&Build::read(&text)))
}

/// The event log of a build.
struct EventLog {
    file: PathBuf,
    /// Whether this process created the file; it is then removed on drop.
    is_temporary: bool,
}

impl EventLog {
    /// `None` if no log is needed: no report is wanted, standard error is no terminal, and no log
    /// is named. Also `None` if no report is wanted, and an outer mpmake keeps the log or the log
    /// cannot be created.
    fn open(options: &Options) -> Result<Option<Self>, Failure> {
        let named = std::env::var_os(LOG_VARIABLE).filter(|name| !name.is_empty());
        let is_nested = std::env::var_os("MAKELEVEL").is_some_and(|level| level != "0");
        match named {
            Some(_) if is_nested && options.report.is_none() => return Ok(None),
            Some(file) => return Ok(Some(Self { file: file.into(), is_temporary: false })),
            None if options.report.is_none() && !io::stderr().is_terminal() => return Ok(None),
            None => {}
        }
        let file = std::env::temp_dir().join(format!("mpmake-{}-{}", process::id(), event_log::now()));
        match std::fs::File::create_new(&file) {
            Ok(_) => Ok(Some(Self { file, is_temporary: true })),
            Err(_) if options.report.is_none() => Ok(None),
            Err(error) => Err(Failure::new(RefusalKind::Unavailable, format!("{}: {error}", file.display()))),
        }
    }
}

impl Drop for EventLog {
    fn drop(&mut self) {
        if self.is_temporary {
            let _gone = std::fs::remove_file(&self.file);
        }
    }
}

/// `mpsh …`. Returns only if no command was started, or after the end of a command that ran on
/// another node or whose end is recorded.
///
/// # Errors
/// As the shell or mexec, or the command's own status.
pub(crate) fn run_shell(invocation: &Invocation<'_>) -> Result<(), Failure> {
    let target = std::env::var(TARGET).unwrap_or_default();
    let (shell, options) = recipe::makefile_shell(std::env::var_os(MAKEFILES).as_deref(), &target);
    let shell_args: Vec<OsString> = options.into_iter().chain(invocation.args.iter().cloned()).collect();
    let script = invocation
        .args
        .iter()
        .position(|word| is_command_option(word))
        .and_then(|at| invocation.args.get(at + 1));
    let Some(script) = script else { return Err(replace_by_shell(&shell, &shell_args)) };
    let script = script.to_string_lossy();
    let start_record = |why: &str| {
        let record = CommandRecord::requested(&script);
        record.inspect(|record| record.started(None, why))
    };
    if recipe::is_recursive(&script) {
        let _record = start_record(event_log::RECURSIVE_MAKE);
        return Err(replace_by_shell(&shell, &shell_args));
    }
    if recipe::is_trivial(&script) {
        let shell = shell.as_os_str();
        return mexec::run_here(shell, &argv_of(shell, &shell_args), start_record(event_log::TRIVIAL));
    }
    let mut args: Vec<OsString> = Vec::new();
    if recipe::is_repeatable(&script) {
        args.push("-r".into());
        // make gives its standard input to one job at a time, and tern-exec does not repeat a
        // command that has read input.
        let null = std::fs::File::open("/dev/null")?;
        rustix::stdio::dup2_stdin(&null).map_err(io::Error::from)?;
    }
    args.push("--".into());
    args.push(shell.into_os_string());
    args.extend(shell_args);
    mexec::run(&Invocation { tool: "mexec", args: &args })
}

fn is_command_option(word: &OsStr) -> bool {
    let word = word.to_string_lossy();
    word.starts_with('-') && !word.starts_with("--") && word.ends_with('c')
}

fn replace_by_shell(shell: &Path, args: &[OsString]) -> Failure {
    replace_process(shell.as_os_str(), &argv_of(shell.as_os_str(), args))
}
