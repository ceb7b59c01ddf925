//! The container of a home's commands on this node: a process in a mount namespace of its own,
//! which starts the commands.
//!
//! ```text
//!  executor ──launch, pipes──▶ container ──clone──▶ init (pid 1 of the command's pid namespace)
//!                                  │                  └─▶ the command, as its user
//!                                  └─▶ tern-mfs, which mounts the files of its home
//! ```
//! There is one for each home. Its process has one thread, so that a forked child may run any code,
//! not only async-signal-safe functions. Its root directory has the contents of home's, mounted
//! from `/mfs/HOME`, and this node's own /dev, /sys and /run. Each command has a /proc of its own.
//! The container ends with the executor, and all its commands with it, since the kernel kills every
//! process of a pid namespace whose init is gone.

mod init;
mod mounts;

use crate::messages::{StartFailure, Task};
use anyhow::{Context, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use tern_ids::{Credentials, NodeId};
use tern_node::Config;

/// Used instead of a home's number for the container of the gatekeeper's jobs, which has this
/// node's own files.
pub(crate) const LOCAL: NodeId = NodeId(0);

/// Number of descriptors sent with a launch request: standard input, output and error, and the
/// socket of the command's init.
pub(crate) const LAUNCH_FDS: usize = 4;

/// Length of an encoded [`InitEvent`]: a type byte, two numbers, and the CPU time.
pub(crate) const INIT_EVENT_LEN: usize = 17;

/// A message of a command's init to the executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InitEvent {
    /// The command runs.
    Started,
    /// It could not be started: the step that failed, and its errno.
    StartFailed(StartFailure, i32),
    /// It has ended: the wait status, and the CPU time in microseconds.
    Exited(i32, u64),
}

impl InitEvent {
    pub(crate) fn to_bytes(self) -> [u8; INIT_EVENT_LEN] {
        let (what, first, second, cpu) = match self {
            Self::Started => (0, 0, 0, 0),
            Self::StartFailed(StartFailure::Directory, errno) => (1, 0, errno, 0),
            Self::StartFailed(StartFailure::Program, errno) => (1, 1, errno, 0),
            Self::StartFailed(StartFailure::Setup, errno) => (1, 2, errno, 0),
            Self::Exited(status, cpu) => (2, status, 0, cpu),
        };
        let mut bytes = [what; INIT_EVENT_LEN];
        bytes[1..5].copy_from_slice(&i32::to_le_bytes(first));
        bytes[5..9].copy_from_slice(&i32::to_le_bytes(second));
        bytes[9..].copy_from_slice(&cpu.to_le_bytes());
        bytes
    }

    /// Reads a message.
    pub(crate) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut bytes = [0; INIT_EVENT_LEN];
        from.read_exact(&mut bytes)?;
        let number = |at: usize| i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let cpu = bytes[9..].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        Ok(match (bytes[0], number(1)) {
            (0, _) => Self::Started,
            (1, 0) => Self::StartFailed(StartFailure::Directory, number(5)),
            (1, 1) => Self::StartFailed(StartFailure::Program, number(5)),
            (1, _) => Self::StartFailed(StartFailure::Setup, number(5)),
            (_, status) => Self::Exited(status, cpu),
        })
    }
}

/// Asks the container at the other end of this socket to start a command.
///
/// # Errors
/// If the container is gone.
pub(crate) fn send_launch(
    container: &mut UnixStream,
    task: &Task,
    credentials: &Credentials,
    fds: [BorrowedFd<'_>; LAUNCH_FDS],
) -> Result<()> {
    let body = tern_wire::encode(&(task, credentials))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LAUNCH_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let length = (body.len() as u32).to_le_bytes();
    sendmsg(&*container, &[IoSlice::new(&length)], &mut ancillary, SendFlags::NOSIGNAL)?;
    container.write_all(&body)?;
    Ok(())
}

/// Sends one byte to the executor, and with it the root of the container's MFS tree, if the
/// container has one.
fn send_tree(executor: &UnixStream, tree: Option<&OwnedFd>) -> Result<()> {
    let fds: Vec<_> = tree.into_iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    sendmsg(executor, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives the root of a container's MFS tree; `None` if the container has the node's own files.
///
/// # Errors
/// If the container is gone.
pub(crate) fn receive_tree(container: &UnixStream) -> Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(container, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    anyhow::ensure!(received.bytes > 0, "the container has ended");
    Ok(received_fds(&mut ancillary).into_iter().next())
}

fn received_fds(ancillary: &mut RecvAncillaryBuffer<'_>) -> Vec<OwnedFd> {
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    rights.flatten().collect()
}

/// A received launch request.
pub(crate) struct LaunchRequest {
    task: Task,
    credentials: Credentials,
    pub(crate) fds: [OwnedFd; LAUNCH_FDS],
}

impl LaunchRequest {
    /// Waits for the next request; `None` if the executor is gone.
    pub(crate) fn receive(executor: &mut UnixStream) -> Result<Option<Self>> {
        let mut length = [0; 4];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LAUNCH_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut length)];
        let received =
            recvmsg(&*executor, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL)?;
        if received.bytes == 0 {
            return Ok(None);
        }
        let fds = received_fds(&mut ancillary);
        let mut body = Vec::new();
        executor.take(u32::from_le_bytes(length).into()).read_to_end(&mut body)?;
        let (task, credentials) = tern_wire::decode(&body)?;
        let fds = fds.try_into().ok().context("a launch request without its descriptors")?;
        Ok(Some(Self { task, credentials, fds }))
    }
}

/// The main function of a container's process. Sets the container up, with the directories `shared`
/// of this node; writes `ready` to standard output; and starts commands until the executor, at the
/// other end of standard input, is gone.
///
/// # Errors
/// If the container cannot be set up, or a launch request is malformed. The container's mounts end
/// with this process.
pub fn run(config: &Config, home: NodeId, shared: &[PathBuf]) -> Result<()> {
    let mut executor = UnixStream::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    let tree = match home {
        LOCAL => {
            mounts::keep_node_mounts()?;
            None
        }
        home => {
            // ternd identifies the processes of placed commands by this name of their ancestor.
            rustix::thread::set_name(c"tern-container")?;
            Some(mounts::set_up(config, home, shared)?)
        }
    };
    let _gone = writeln!(io::stdout(), "ready");
    send_tree(&executor, tree.as_ref())?;
    drop(tree);
    rustix::stdio::dup2_stdout(&null)?;
    init::reap_automatically();
    let tmp_dir = private_tmp_dir(config);
    while let Some(mut request) = LaunchRequest::receive(&mut executor)? {
        if home != LOCAL {
            request.task.nice = request.task.nice.max(config.guest_nice.into());
        }
        if let Err(error) = init::start(&request, &tmp_dir) {
            tracing::warn!(%error, "a command could not be started");
        }
    }
    Ok(())
}

/// Where the private temporary directory of a repeatable command is mounted, in the command's own
/// mount namespace.
fn private_tmp_dir(config: &Config) -> PathBuf {
    config.run_dir.join("tmp")
}

/// Where a container is set up.
pub(crate) fn setup_dir(config: &Config, home: NodeId) -> PathBuf {
    config.run_dir.join(format!("room-{home}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_event_round_trips() {
        for event in [
            InitEvent::Started,
            InitEvent::StartFailed(StartFailure::Directory, 2),
            InitEvent::StartFailed(StartFailure::Program, 13),
            InitEvent::StartFailed(StartFailure::Setup, 1),
            InitEvent::Exited(0x8b, u64::MAX - 1),
        ] {
            assert_eq!(InitEvent::read(&mut &event.to_bytes()[..]).unwrap(), event);
        }
    }
}
