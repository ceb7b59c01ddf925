//! `mpmake`: the user's own make, with recipes that mexec places; and `mpsh`, the shell that it gives to make for that.
//!
//! make is not changed: a variable on its command line names its shell, and goes to recursive makes with the rest of `MAKEFLAGS`. That shell
//! runs at home what belongs there (recursive makes, and so the jobserver; commands of no length) and has mexec place the rest.

mod recipe;

use super::mexec;
use super::mosrun::become_program::{arguments, become_program};
use crate::tool::Call;
use crate::{Failure, client, help};
use clap::{Arg, Command};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command as Program};
use tern_control::{NodeState, RefusalKind, Reply, Request};

/// The shell's name.
const SHELL: &str = "mpsh";

/// Has make tell its recipes by which files it goes: they may name another shell.
const TELL: &str = "--eval=export TERN_MAKEFILES = $(MAKEFILE_LIST)";

/// The variable that it tells them in.
pub(super) const MAKEFILES: &str = "TERN_MAKEFILES";

/// Where each recipe notes where it ran.
const PLACED: &str = "TERN_PLACED";

/// mpmake's command line.
pub fn describe() -> Command {
    help::command("mpmake")
        .about("make, with its recipes on the nodes that run them best")
        .long_about(
            "make, with its recipes on the nodes that run them best. It is the make that is installed, with all its options and its output; each \
             command of a recipe is placed as mexec does. Recursive makes, and commands that take no time, run here. \
             Without -j there are as many jobs as the cluster has CPUs, and one more for each node. On a terminal it says at its end how many commands ran where.",
        )
        .override_usage("mpmake [MAKE'S OPTIONS] [TARGET..]")
        .arg(Arg::new("words").value_name("WORD").num_args(0..).trailing_var_arg(true).help("What make is given"))
        .after_help(help::closing(
            "  mpmake                  as many jobs as the cluster takes\n  mpmake -j12 all\n  mpmake -C src -k check",
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
    let mut make = Program::new("make");
    make.arg(TELL).arg(format!("SHELL={}", shell.display()));
    if !call.args.iter().any(|word| word.to_string_lossy().starts_with("-j") || word == "--jobs") {
        make.arg(format!("-j{}", jobs()?));
    }
    make.args(call.args);
    let notes = Notes::begin();
    if let Some(notes) = &notes {
        make.env(PLACED, &notes.0);
    }
    let ended = make.status().map_err(|error| {
        Failure::new(RefusalKind::NotFound, format!("make cannot be run: {error}"))
            .hint("apt-get install make")
    })?;
    if let Some(notes) = notes {
        notes.say();
    }
    match (ended.code(), ended.signal()) {
        (Some(0), _) => Ok(()),
        (Some(code), _) => Err(Failure::silent(code as u8)),
        (_, signal) => Err(Failure::silent(128u8.saturating_add(signal.unwrap_or(0) as u8))),
    }
}

/// As many as all nodes run at a time.
fn jobs() -> Result<u32, Failure> {
    match client::ask(&Request::Cluster)? {
        Reply::Cluster(report) => {
            let up =
                report.nodes.iter().filter(|node| node.node == report.me || node.state == NodeState::Alive);
            Ok(up.map(|node| node.cpus.ceil() as u32 + 1).sum::<u32>().max(1))
        }
        other => Err(client::unexpected(&other)),
    }
}

/// A file in which recipes note where they ran; gone when this is dropped.
struct Notes(PathBuf);

impl Notes {
    fn begin() -> Option<Self> {
        if !io::stderr().is_terminal() {
            return None;
        }
        let path = std::env::temp_dir().join(format!("mpmake-{}", process::id()));
        std::fs::File::create_new(&path).ok()?;
        Some(Self(path))
    }

    fn say(self) {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for line in std::fs::read_to_string(&self.0).unwrap_or_default().lines() {
            *counts.entry(line.to_owned()).or_default() += 1;
        }
        let all: usize = counts.values().sum();
        let each: Vec<_> = counts.iter().map(|(place, count)| format!("{count} {place}")).collect();
        if all > 0 {
            let _gone = writeln!(io::stderr(), "mpmake: {all} commands: {}", each.join(", "));
        }
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.0);
    }
}

/// Notes where a command runs, if somebody wants to know.
pub(super) fn note(place: &str) {
    if let Some(path) = std::env::var_os(PLACED)
        && let Ok(mut file) = std::fs::OpenOptions::new().append(true).open(path)
    {
        let _full = file.write_all(format!("{place}\n").as_bytes());
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
    if recipe::is_recursive(&script) {
        return Err(become_shell(&shell, call.args));
    }
    if recipe::is_trivial(&script) {
        note("here");
        return Err(become_shell(&shell, call.args));
    }
    let mut words: Vec<OsString> = Vec::new();
    if recipe::is_repeatable(&script) {
        words.push("-r".into());
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
