//! Creation of a node's namespaces, and its init, the first process in them.

use crate::error::{Result, WithContext};
use crate::lab::options::LabName;
use crate::lab::state::LabState;
use crate::node::root_fs;
use crate::process::cgroup::Hierarchies;
use crate::process::namespaces;
use crate::process::signals::SignalMask;
use crate::roles::{self, report_ready};
use rustix::process::WaitOptions;
use rustix::thread::UnshareFlags;
use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Creates the namespaces and the node's first process, reports that process's pid on this machine,
/// and exits.
pub(crate) fn create_node(lab: &LabName, node: u16) -> Result<u8> {
    let state = LabState::load(lab)?;
    let switch = state.switch_process()?.open().with_context(|| "find the switch".to_owned())?;
    Hierarchies::find()?.node_group(lab, node).join()?;
    // The writable layers of the nodes' file systems are on a tmpfs that only the mount namespace of
    // the switch process has.
    namespaces::join_mount_namespace(&switch)
        .with_context(|| "enter the switch's mount namespace".to_owned())?;
    let new = UnshareFlags::NEWNS
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWUTS
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWPID;
    namespaces::unshare(new).with_context(|| "make the node's namespaces".to_owned())?;
    let mut init = roles::command(Path::new("/proc/self/exe"), "pid1", lab);
    init.arg(node.to_string())
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    // Init waits for the end of this pipe, that is for the end of this process, before it reports.
    let init = init.stdin(Stdio::piped()).spawn().with_context(|| "start init".to_owned())?;
    writeln!(std::io::stdout(), "pid {}", init.id()).with_context(|| "tell init's pid".to_owned())?;
    Ok(0)
}

/// Mounts the node's files, then reaps its orphaned processes until killed.
pub(crate) fn main(lab: &LabName, node: u16) -> Result<u8> {
    rustix::thread::set_name(c"tern-lab-init").with_context(|| "take a name".to_owned())?;
    // Blocked, so that no SIGCHLD is missed between two waits.
    let children = SignalMask::only(libc::SIGCHLD);
    children.set();
    let state = LabState::load(lab)?;
    root_fs::build(&state, node)?;
    std::io::stdin().read_to_end(&mut Vec::new()).with_context(|| "wait for the parent's end".to_owned())?;
    report_ready()?;
    loop {
        while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
        children.wait();
    }
}

/// Starts a program in a new session and exits, so that the node's init adopts the program.
pub(crate) fn spawn(program: &OsStr, arguments: &[OsString]) -> Result<u8> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    namespaces::set_new_session(&mut command);
    command.spawn().with_context(|| format!("start {}", Path::new(program).display()))?;
    Ok(0)
}
