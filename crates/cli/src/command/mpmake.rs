//! `mpmake`: the user's own make, with recipes that mexec places; and `mpsh`, the shell that it gives to make for that.
//!
//! make is not changed: a variable on its command line names its shell, and goes to recursive makes with the rest of `MAKEFLAGS`. That shell
//! runs at home what belongs there (recursive makes, and so the jobserver; commands of no length) and has mexec place the rest.

mod build;
mod figures;
mod look;
pub(super) mod notes;
mod options;
mod recipe;
mod report;
mod running;
mod status;
mod summary;
mod verdict;

use super::mexec;
use super::mexec::child::{self, Moment};
use super::mexec::signals::{Signals, end_as};
use super::mosrun::become_program::{arguments, become_program};
use crate::tool::Call;
use crate::{Failure, client, help};
use build::Build;
use clap::{Arg, Command};
use look::Looking;
use notes::{Begin, Node, Note, Noted, PLACED};
use options::Own;
use running::Running;
use status::Status;
use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::{self, Command as Program};
use std::time::Duration;
use tern_control::{ClusterReport, NodeState, RefusalKind, Reply, Request};

/// The shell's name.
const SHELL: &str = "mpsh";

/// Has make tell its recipes by which files it goes: they may name another shell.
const TELL: &str = "--eval=export TERN_MAKEFILES = $(MAKEFILE_LIST)";

/// The variable that it tells them in.
pub(super) const MAKEFILES: &str = "TERN_MAKEFILES";

/// How often what a terminal shows is made anew.
const OFTEN: Duration = Duration::from_millis(200);

/// mpmake's command line.
pub fn describe() -> Command {
    help::command("mpmake")
        .about("make, with its recipes on the nodes that run them best")
        .long_about(
            "make, with its recipes on the nodes that run them best. It is the make that is installed, with all its options and its output; each \
             command of a recipe is placed as mexec does. Recursive makes, and commands that take no time, run here. \
             Without -j there are as many jobs as the cluster has CPUs, and one more for each node. On a terminal its last line shows what runs where, \
             from the third second on, and at its end it says how many commands ran where and why. Where TERN_PLACED names a file, each command is noted there.",
        )
        .override_usage("mpmake [--report FILE.html] [MAKE'S OPTIONS] [TARGET..]")
        .arg(Arg::new("report").long("report").value_name("FILE").help(
            "Write a page that shows when each command ran on which node, why there, what it cost, and what held the build up",
        ))
        .arg(Arg::new("words").value_name("WORD").num_args(0..).trailing_var_arg(true).help("What make is given"))
        .after_help(help::closing(
            "  mpmake                  as many jobs as the cluster takes\n  mpmake -j12 all\n  mpmake --report=build.html -C src -k check",
            "As make: 2 if something failed, 1 with -q if something is not up to date.",
        ))
}

/// mpsh's command line.
pub fn describe_shell() -> Command {
    help::command(SHELL)
        .about("The shell that mpmake gives to make")
        .long_about(
            "The shell that mpmake gives to make: runs a command line on the node that runs it best, as mexec does, or here. Called otherwise than with -c \
             it is the shell that the makefile names, or /bin/sh.",
        )
        .override_usage("mpsh -c COMMANDS")
        .arg(Arg::new("words").value_name("WORD").num_args(0..).trailing_var_arg(true).help("What a shell is given"))
        .after_help(help::closing("  make -j12 SHELL=$(command -v mpsh)     what mpmake does", "Else as the shell."))
}

/// `mpmake …`.
///
/// # Errors
/// If there is no make, or ternd, which knows the nodes; else make's own status.
pub fn run(call: &Call<'_>) -> Result<(), Failure> {
    if call.args.first().is_some_and(|word| word == "--help") {
        return help::print(describe(), call);
    }
    let own = std::env::current_exe()?;
    let shell = own.with_file_name(SHELL);
    if !shell.exists() {
        let said = format!("{} is not there", shell.display());
        return Err(Failure::new(RefusalKind::NotFound, said).hint("make install, which makes it"));
    }
    let (own, words) = options::read(call)?;
    let cluster = cluster();
    let mut make = Program::new("make");
    make.arg(TELL).arg(format!("SHELL={}", shell.display()));
    let mut jobs = options::jobs(&words);
    if jobs.is_none() {
        let all = self::jobs(cluster.as_ref().map_err(Failure::clone)?);
        make.arg(format!("-j{all}"));
        jobs = Some(all);
    }
    make.args(&words);
    let notes = Notes::begin(&own)?;
    if let Some(notes) = &notes {
        make.env(PLACED, &notes.file);
        let _full = notes::add(&notes.file, &Note::Build(begin(call, jobs, cluster.ok())));
    }
    let status = attend(&mut make, notes.as_ref(), own.report.is_some())?;
    let Some(notes) = notes else { return end_as(status) };
    let exit = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
    let over = Note::Over { at: notes::now(), exit: u8::try_from(exit).unwrap_or(u8::MAX) };
    let _full = notes::add(&notes.file, &over);
    let build = Build::read(&std::fs::read(&notes.file).unwrap_or_default());
    drop(notes);
    if io::stderr().is_terminal() {
        summary::say(&build, own.report.as_deref());
    }
    let written = own.report.map_or(Ok(()), |file| options::write(&file, &report::page(&build)));
    // That it did not make everything is what matters more.
    end_as(status).and(written)
}

/// Runs make to its end, with all that is to be seen of it meanwhile; its status as wait(2) has it.
fn attend(make: &mut Program, notes: Option<&Notes>, looks: bool) -> Result<i32, Failure> {
    let ignored = mexec::ignored();
    let signals = Signals::new(ignored).map_err(io::Error::from)?;
    let make = make.spawn().map_err(|error| {
        Failure::new(RefusalKind::NotFound, format!("make cannot be run: {error}"))
            .hint("apt-get install make")
    })?;
    let pid = rustix::process::Pid::from_child(&make);
    let Some(notes) = notes else { return Ok(child::attend(pid, &signals, None, &mut |_| {})?) };
    let _looking = looks.then(|| Looking::begin(notes.file.clone()));
    let mut shown = Status::new().map(|status| (status, Running::of(&notes.file)));
    let tick = shown.is_some().then_some(OFTEN);
    let ended = child::attend(pid, &signals, tick, &mut |moment| {
        let Some((status, running)) = &mut shown else { return };
        match moment {
            Moment::Tick => {
                running.read_on();
                status.say(|columns| running.line(columns));
            }
            Moment::Stops => status.clear(),
            // The next tick sees to it.
            Moment::GoesOn | Moment::Size => {}
        }
    });
    Ok(ended?)
}

fn cluster() -> Result<ClusterReport, Failure> {
    match client::ask(&Request::Cluster)? {
        Reply::Cluster(report) => Ok(report),
        other => Err(client::unexpected(&other)),
    }
}

/// As many as all nodes run at a time.
fn jobs(cluster: &ClusterReport) -> u32 {
    up(cluster).map(|node| node.cpus.ceil() as u32 + 1).sum::<u32>().max(1)
}

fn up(cluster: &ClusterReport) -> impl Iterator<Item = &tern_control::NodeLoad> {
    cluster.nodes.iter().filter(|node| node.node == cluster.me || node.state == NodeState::Alive)
}

/// What is noted of a build first.
fn begin(call: &Call<'_>, jobs: Option<u32>, cluster: Option<ClusterReport>) -> Begin {
    let words: Vec<_> = call.args.iter().map(|word| word.to_string_lossy()).collect();
    let command = format!("mpmake {}", words.join(" ")).trim().to_owned();
    let node = |node: &tern_control::NodeLoad| Node {
        node: node.node.0,
        host: node.host.clone(),
        cpus: node.cpus,
        speed: node.speed,
    };
    let nodes = cluster.as_ref().map(|cluster| up(cluster).map(node).collect()).unwrap_or_default();
    Begin { at: notes::now(), command, jobs, me: cluster.map_or(0, |cluster| cluster.me.0), nodes }
}

/// Has the page of notes that somebody else's commands have left: `mexec --report-of`.
///
/// # Errors
/// If they cannot be read, or nothing takes the page.
pub(super) fn report_of(file: &Path) -> Result<(), Failure> {
    let text = std::fs::read(file).map_err(|error| {
        let said = format!("{} cannot be read: {}", file.display(), crate::output::reason(&error));
        Failure::new(RefusalKind::NotFound, said)
            .hint(format!("{PLACED}={} before what runs mexec", file.display()))
    })?;
    crate::output::print(&report::page(&Build::read(&text)))
}

/// The file in which recipes note what becomes of them.
struct Notes {
    file: PathBuf,
    /// It is nobody else's, and gone when this is dropped.
    own: bool,
}

impl Notes {
    /// None if nobody wants to know. Within another mpmake it is the one that does.
    fn begin(own: &Own) -> Result<Option<Self>, Failure> {
        let named = std::env::var_os(PLACED).filter(|name| !name.is_empty());
        let within = std::env::var_os("MAKELEVEL").is_some_and(|level| level != "0");
        match named {
            Some(_) if within && own.report.is_none() => return Ok(None),
            Some(file) => return Ok(Some(Self { file: file.into(), own: false })),
            None if own.report.is_none() && !io::stderr().is_terminal() => return Ok(None),
            None => {}
        }
        let file = std::env::temp_dir().join(format!("mpmake-{}-{}", process::id(), notes::now()));
        match std::fs::File::create_new(&file) {
            Ok(_) => Ok(Some(Self { file, own: true })),
            Err(_) if own.report.is_none() => Ok(None),
            Err(error) => Err(Failure::new(RefusalKind::Unavailable, format!("{}: {error}", file.display()))),
        }
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        if self.own {
            let _gone = std::fs::remove_file(&self.file);
        }
    }
}

/// `mpsh …`; returns only if nothing runs, or what ran elsewhere has ended.
///
/// # Errors
/// Those of the shell or of mexec, or the command's own status.
pub fn run_shell(call: &Call<'_>) -> Result<(), Failure> {
    let shell = recipe::shell(std::env::var_os(MAKEFILES).as_deref());
    let script = call.args.iter().position(|word| is_c(word)).and_then(|at| call.args.get(at + 1));
    let Some(script) = script else { return Err(become_shell(&shell, call.args)) };
    let script = script.to_string_lossy();
    let noted = |why: &str| {
        let noted = Noted::asked(&script);
        noted.inspect(|noted| noted.begun(None, why))
    };
    if recipe::is_recursive(&script) {
        let _runs_all_the_time = noted(notes::RECURSIVE);
        return Err(become_shell(&shell, call.args));
    }
    if recipe::is_trivial(&script) {
        let shell = shell.as_os_str();
        return mexec::run_here(shell, &arguments(shell, call.args), noted(notes::TRIVIAL));
    }
    let mut words: Vec<OsString> = Vec::new();
    if recipe::is_repeatable(&script) {
        words.push("-r".into());
        // make's own is one job's at a time, and what has any is not run again.
        let null = std::fs::File::open("/dev/null")?;
        rustix::stdio::dup2_stdin(&null).map_err(io::Error::from)?;
    }
    words.push("--".into());
    words.push(shell.into_os_string());
    words.extend(call.args.iter().cloned());
    mexec::run(&Call { tool: "mexec", args: &words })
}

fn is_c(word: &OsStr) -> bool {
    let word = word.to_string_lossy();
    word.starts_with('-') && !word.starts_with("--") && word.ends_with('c')
}

fn become_shell(shell: &Path, args: &[OsString]) -> Failure {
    become_program(shell.as_os_str(), &arguments(shell.as_os_str(), args))
}
