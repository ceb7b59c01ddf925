//! The lab's own programs, all of them the `tern` binary under the name `tern-lab-init`.
//!
//! | role | where | what |
//! |---|---|---|
//! | `switch LAB` | new net and mount namespaces | holds the switch and the tmpfs of all layers |
//! | `wire LAB` | the switch's network namespace | delay, loss, hubs |
//! | `node LAB N` | joins the node's groups, then new namespaces | bears `pid1`, and ends |
//! | `pid1 LAB N` | the node | mounts its files, then reaps |
//! | `enter LAB N PROGRAM …` | the machine | runs a program in the node and ends as it ends |
//! | `daemon LAB N PROGRAM …` | the machine | runs `spawn PROGRAM …` in the node |
//! | `spawn PROGRAM …` | the node | leaves the program to init |
//! | `keeper LAB` | the machine | takes the lab down when its owner dies |
//!
//! Those that stay say `ready` on their standard output, or `failed` and why, and then close it.

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

/// `argv[0]` of the lab's own programs: a binary that is called by this name must call [`init_main`].
pub const INIT_NAME: &str = "tern-lab-init";

/// Does what the command line says, as one of the lab's own programs; returns the exit code. To be called,
/// before anything else and while the process has one thread, when the last part of `argv[0]` is [`INIT_NAME`].
pub fn init_main() -> u8 {
    signals::expect_children();
    let mut words = std::env::args_os().skip(1);
    let role = words.next().unwrap_or_default();
    let rest: Vec<_> = words.collect();
    match role_of(&role.to_string_lossy(), &rest) {
        Ok(code) => code,
        Err(error) => {
            // The first is for the lab, the second for people; each of them may be closed.
            let _ = writeln!(std::io::stdout(), "failed {error}");
            let _ = writeln!(std::io::stderr(), "tern lab: {error}");
            125
        }
    }
}

/// A command that starts one of them.
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
    LabError::BadOption(format!("{INIT_NAME} is for the lab's own use; see tern lab --help"))
}

/// Tells the owner that all is well, and lets go of what connects us with it.
fn ready() -> Result<()> {
    let said = writeln!(std::io::stdout(), "ready");
    // The owner may have died; its keeper sees to the rest.
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

/// Makes the namespaces and the node's first process, tells its pid as this machine sees it, and ends.
fn bear(lab: &Name, node: u16) -> Result<u8> {
    let state = State::load(lab)?;
    let switch = state.switch()?.open().tried(|| "find the switch".to_owned())?;
    Hierarchies::find()?.part(lab, &format!("node{node}")).join()?;
    // From there the layers are seen.
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
    // Init says nothing before the end of this pipe, which is the end of this process.
    let init = init.stdin(Stdio::piped()).spawn().tried(|| "start init".to_owned())?;
    writeln!(std::io::stdout(), "pid {}", init.id()).tried(|| "tell init's pid".to_owned())?;
    Ok(0)
}

fn pid1(lab: &Name, node: u16) -> Result<u8> {
    rustix::thread::set_name(c"tern-lab-init").tried(|| "take a name".to_owned())?;
    // Blocked, so that none is missed between two waits.
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

/// Starts a program with a session of its own and ends, which leaves it to the node's init.
fn spawn(program: &OsStr, arguments: &[OsString]) -> Result<u8> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    spaces::in_own_session(&mut command);
    command.spawn().tried(|| format!("start {}", Path::new(program).display()))?;
    Ok(0)
}
