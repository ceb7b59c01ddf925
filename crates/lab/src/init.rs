//! The lab's helper programs. All of them are the `tern` binary under the name `tern-lab-init`.
//!
//! | role | where | what |
//! |---|---|---|
//! | `switch LAB` | new net and mount namespaces | holds the switch and the tmpfs of all layers |
//! | `wire LAB` | the switch's network namespace | delay, loss, hubs |
//! | `node LAB N` | joins the node's groups, then new namespaces | starts `pid1`, and exits |
//! | `pid1 LAB N` | the node | mounts the node's files, then reaps children |
//! | `enter LAB N PROGRAM …` | the machine | runs a program in the node and exits with its status |
//! | `daemon LAB N PROGRAM …` | the machine | runs `spawn PROGRAM …` in the node |
//! | `spawn PROGRAM …` | the node | starts the program as a child of init |
//! | `keeper LAB` | the machine | takes the lab down when its owner dies |
//!
//! Long-running helpers print `ready`, or `failed` and the reason, to standard output, and then
//! close it.

use crate::cgroup::Hierarchies;
use crate::error::{LabError, Result, Tried};
use crate::options::Name;
use crate::signals::{self, Mask};
use crate::state::State;
use crate::{enter, keeper, root, spaces, wire};
use rustix::process::WaitOptions;
use rustix::thread::UnshareFlags;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// `argv[0]` of the lab's helper programs. A binary started under this name must call
/// [`init_main`].
pub const INIT_NAME: &str = "tern-lab-init";

/// Runs as the helper program that the command line names, and returns the exit code. Must be
/// called first, while the process is single-threaded, when the last component of `argv[0]` is
/// [`INIT_NAME`].
pub fn init_main() -> u8 {
    signals::expect_children();
    let mut words = std::env::args_os().skip(1);
    let role = words.next().unwrap_or_default();
    let rest: Vec<_> = words.collect();
    match role_of(&role.to_string_lossy(), &rest) {
        Ok(code) => code,
        Err(error) => {
            // Standard output is read by the lab, standard error by the user. Either may be closed.
            let _ = writeln!(std::io::stdout(), "failed {error}");
            let _ = writeln!(std::io::stderr(), "tern lab: {error}");
            125
        }
    }
}

/// A command that starts a helper program.
pub(crate) fn command(helper: &Path, role: &str, lab: &Name) -> Command {
    let mut command = Command::new(helper);
    command.arg0(INIT_NAME).arg(role).arg(lab.as_str());
    command
}

fn role_of(role: &str, rest: &[OsString]) -> Result<u8> {
    let (first, more) = rest.split_first().ok_or_else(bad_call)?;
    if role == "spawn" {
        return spawn(first, more);
    }
    let lab: Name = first.to_string_lossy().parse()?;
    let node = || more.first().and_then(|n| n.to_string_lossy().parse::<u16>().ok()).ok_or_else(bad_call);
    let program = || more.get(1).map(OsString::as_os_str).ok_or_else(bad_call);
    let arguments = more.get(2..).unwrap_or_default();
    match role {
        "switch" => switch(&lab),
        "wire" => run_wire(&lab),
        "node" => bear(&lab, node()?),
        "pid1" => pid1(&lab, node()?),
        "enter" => enter::enter(&lab, node()?, enter::How::Attached, program()?, arguments),
        "daemon" => enter::enter(&lab, node()?, enter::How::Detached, program()?, arguments),
        "keeper" => keeper::main(&lab),
        _ => Err(bad_call()),
    }
}

fn bad_call() -> LabError {
    LabError::BadOption(format!("{INIT_NAME} is only started by the lab; see tern lab --help"))
}

/// Reports success to the owner, and closes the standard files that connect this process with it.
fn ready() -> Result<()> {
    let said = writeln!(std::io::stdout(), "ready");
    // The owner may have died; its keeper cleans up in that case.
    drop(said);
    let null =
        File::options().read(true).write(true).open("/dev/null").tried(|| "open /dev/null".to_owned())?;
    rustix::stdio::dup2_stdin(&null).tried(|| "close the standard input".to_owned())?;
    rustix::stdio::dup2_stdout(&null).tried(|| "close the standard output".to_owned())?;
    rustix::stdio::dup2_stderr(&null).tried(|| "close the standard error".to_owned())
}

fn switch(lab: &Name) -> Result<u8> {
    Hierarchies::find()?.part(lab, "switch").join()?;
    spaces::leave(UnshareFlags::NEWNS | UnshareFlags::NEWNET)
        .tried(|| "make the switch's namespaces".to_owned())?;
    root::hold_layers(lab)?;
    let all = Mask::full();
    all.set();
    ready()?;
    loop {
        all.wait();
    }
}

fn run_wire(lab: &Name) -> Result<u8> {
    Hierarchies::find()?.part(lab, "switch").join()?;
    ready()?;
    wire::main(lab)?;
    Ok(0)
}

/// Creates the namespaces and the node's first process, reports that process's pid on this machine,
/// and exits.
fn bear(lab: &Name, node: u16) -> Result<u8> {
    let state = State::load(lab)?;
    let switch = state.switch()?.open().tried(|| "find the switch".to_owned())?;
    Hierarchies::find()?.part(lab, &format!("node{node}")).join()?;
    // The layers are visible in the switch's mount namespace.
    spaces::join_mounts(&switch).tried(|| "enter the switch's mount namespace".to_owned())?;
    let new = UnshareFlags::NEWNS
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWUTS
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWPID;
    spaces::leave(new).tried(|| "make the node's namespaces".to_owned())?;
    let mut init = command(Path::new("/proc/self/exe"), "pid1", lab);
    init.arg(node.to_string())
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    // Init waits for the end of this pipe, that is for the end of this process, before it reports.
    let init = init.stdin(Stdio::piped()).spawn().tried(|| "start init".to_owned())?;
    writeln!(std::io::stdout(), "pid {}", init.id()).tried(|| "tell init's pid".to_owned())?;
    Ok(0)
}

fn pid1(lab: &Name, node: u16) -> Result<u8> {
    rustix::thread::set_name(c"tern-lab-init").tried(|| "take a name".to_owned())?;
    // Blocked, so that no SIGCHLD is missed between two waits.
    let children = Mask::only(libc::SIGCHLD);
    children.set();
    let state = State::load(lab)?;
    root::build(&state, node)?;
    std::io::stdin().read_to_end(&mut Vec::new()).tried(|| "wait for the parent's end".to_owned())?;
    ready()?;
    loop {
        while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
        children.wait();
    }
}

/// Starts a program in a new session and exits, so that the node's init adopts the program.
fn spawn(program: &OsStr, arguments: &[OsString]) -> Result<u8> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    spaces::in_own_session(&mut command);
    command.spawn().tried(|| format!("start {}", Path::new(program).display()))?;
    Ok(0)
}
