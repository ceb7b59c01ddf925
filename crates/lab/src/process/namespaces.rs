//! Joining and unsharing namespaces, and the code that runs between fork and exec.

use crate::process::signals::SignalMask;
use rustix::process::Signal;
use rustix::thread::{
    LinkNameSpaceType, ThreadNameSpaceType, UnshareFlags, move_into_link_name_space,
    move_into_thread_name_spaces, unshare_unsafe,
};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Moves this process, which must be single-threaded, into new namespaces.
pub(crate) fn unshare(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: the flags used here (namespaces) do not unshare memory or descriptors.
    Ok(unsafe { unshare_unsafe(flags) }?)
}

/// Moves this process into the mount namespace of another process.
pub(crate) fn join_mount_namespace(process: &OwnedFd) -> io::Result<()> {
    Ok(move_into_thread_name_spaces(process.as_fd(), ThreadNameSpaceType::MOUNT)?)
}

/// From now on, children of this process are created in the pid namespace of the given process.
pub(crate) fn set_child_pid_namespace(process: &OwnedFd) -> io::Result<()> {
    Ok(move_into_thread_name_spaces(process.as_fd(), ThreadNameSpaceType::PROCESS_ID)?)
}

/// Makes the command run in this network namespace; its other namespaces stay the caller's.
pub(crate) fn set_network(command: &mut Command, network: OwnedFd) {
    // SAFETY: one system call.
    unsafe {
        command.pre_exec(move || {
            Ok(move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))?)
        });
    }
}

/// Makes the command run in a new session without a controlling terminal.
pub(crate) fn set_new_session(command: &mut Command) {
    // SAFETY: one system call. It fails only for the leader of a process group, which a fresh child
    // is not.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(())
        });
    }
}

/// Descriptors and paths that a command needs to become a process of a node, opened before the
/// fork.
#[derive(Debug)]
pub(crate) struct NodeEntry {
    /// A descriptor of the node's init.
    pub(crate) init: OwnedFd,
    /// `cgroup.procs` of the node's groups, open for writing.
    pub(crate) groups: Vec<OwnedFd>,
    /// The command's working directory; `/` if this does not exist in the node.
    pub(crate) directory: CString,
}

/// Makes the command run in the node with this signal mask. The command's process must be created
/// in the node's pid namespace ([`set_child_pid_namespace`]). It is killed when its parent, the
/// calling thread, dies.
pub(crate) fn set_node(command: &mut Command, entry: NodeEntry, mask: SignalMask) {
    let namespaces = ThreadNameSpaceType::MOUNT
        | ThreadNameSpaceType::NETWORK
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION;
    // SAFETY: only system calls on data prepared before the fork; nothing allocates or takes a
    // lock.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            for group in &entry.groups {
                // 0 stands for the writing process.
                rustix::io::write(group, b"0")?;
            }
            move_into_thread_name_spaces(entry.init.as_fd(), namespaces)?;
            if rustix::process::chdir(entry.directory.as_c_str()).is_err() {
                rustix::process::chdir(c"/")?;
            }
            mask.set();
            Ok(())
        });
    }
}
