//! Runs a program in a node as if it had been started there. This process is its proxy: it stops
//! when the program stops, forwards the signals that it receives, and exits with the program's
//! status.

use crate::error::{Result, WithContext};
use crate::lab::options::LabName;
use crate::lab::state::LabState;
use crate::process::cgroup::Hierarchies;
use crate::process::namespaces::{self, NodeEntry};
use crate::process::signals::{self, SignalMask};
use crate::roles;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};
use std::env;
use std::ffi::{CString, OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

/// The exit code of a shell for a missing program.
const EXIT_NOT_FOUND: u8 = 127;
const EXIT_NOT_EXECUTABLE: u8 = 126;

/// Whether the program stays a child of this process, with its terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EnterMode {
    Attached,
    Detached,
}

/// Runs the program in the node with this process's environment, directory, terminal and standard
/// files. Returns the program's exit code, or ends this process by the signal that ended the
/// program. The caller must be single-threaded.
pub(crate) fn enter(
    lab: &LabName,
    node: u16,
    mode: EnterMode,
    program: &OsStr,
    arguments: &[OsString],
) -> Result<u8> {
    let state = LabState::load(lab)?;
    let init = state.running_init(node)?.open().with_context(|| format!("find node {node}"))?;
    let groups = Hierarchies::find()?.node_group(lab, node).open_procs_files()?;
    let directory = env::current_dir().unwrap_or_else(|_e| "/".into());
    let directory = CString::new(directory.as_os_str().as_bytes()).unwrap_or_default();
    namespaces::set_child_pid_namespace(&init).with_context(|| format!("enter node {node}"))?;
    let mut command = match mode {
        EnterMode::Attached => Command::new(program),
        EnterMode::Detached => {
            let mut spawner = Command::new(&state.helper);
            std::os::unix::process::CommandExt::arg0(&mut spawner, roles::INIT_NAME);
            spawner.arg("spawn").arg(program);
            spawner
        }
    };
    command.args(arguments).env("PATH", search_path(&state.program_directory()));
    let all_signals = SignalMask::all();
    let old_mask = all_signals.set();
    namespaces::set_node(&mut command, NodeEntry { init, groups, directory }, old_mask);
    let was_in_foreground = is_in_foreground();
    let child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let _ = writeln!(io::stderr(), "tern lab: cannot run {}: {error}", Path::new(program).display());
            return Ok(if error.kind() == io::ErrorKind::NotFound {
                EXIT_NOT_FOUND
            } else {
                EXIT_NOT_EXECUTABLE
            });
        }
    };
    let pid = Pid::from_child(&child);
    let status = supervise(pid, &all_signals)?;
    if was_in_foreground {
        // An interactive shell has put its jobs into the foreground. It cannot restore this process
        // group, which is outside its pid namespace.
        let _ = rustix::termios::tcsetpgrp(std::io::stdin(), rustix::process::getpgrp());
    }
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Ok(code as u8),
        (None, Some(signal)) => signals::die_by_signal(signal),
        (None, None) => Ok(EXIT_NOT_EXECUTABLE),
    }
}

/// Waits for the child, with all signals blocked.
fn supervise(child: Pid, all_signals: &SignalMask) -> Result<WaitStatus> {
    loop {
        let waited = waitpid(Some(child), WaitOptions::NOHANG | WaitOptions::UNTRACED);
        if let Some((_, status)) = waited.with_context(|| "wait for the program".to_owned())? {
            if !status.stopped() {
                return Ok(status);
            }
            // Stop this process too, so that the shell that started it sees its job stop.
            let _ = kill_process(rustix::process::getpid(), Signal::STOP);
            let _ = kill_process(child, Signal::CONT);
            continue;
        }
        let received = all_signals.wait();
        // The terminal sends its signals to the child as well, so those are not forwarded.
        if received.from_process
            && received.signal != libc::SIGCHLD
            && let Some(signal) = Signal::from_named_raw(received.signal)
        {
            let _ = kill_process(child, signal);
        }
    }
}

/// Whether this process is in the foreground group of the terminal on its standard input.
fn is_in_foreground() -> bool {
    rustix::termios::tcgetpgrp(std::io::stdin()).is_ok_and(|group| group == rustix::process::getpgrp())
}

/// Puts the tools' directory first, so that fresh builds take precedence over the machine's
/// installed programs.
fn search_path(programs: &Path) -> OsString {
    let mut path = programs.as_os_str().to_owned();
    path.push(":");
    path.push(env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into()));
    path
}
