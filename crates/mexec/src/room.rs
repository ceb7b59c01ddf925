//! A room: what the commands of one home see of the world on this node, and the process that bears them there.
//!
//! ```text
//!  executor ──order, pipes──▶ room ──clone──▶ init (pid 1 of a pid namespace of the command's own)
//!                              │                └─▶ the command, as its user
//!                              └─▶ tern-mfs, which shows the room the files of its home
//! ```
//! One for each home: a process with one thread, so that it may fork and go on as any program would. Its root has what its home's has,
//! by `/mfs/HOME`, and this node's own /dev, /sys and /run; each command has a /proc of its own. The room ends with the executor, and
//! all its commands with it: the kernel ends who is in a pid namespace whose first process is gone.

mod birth;
mod furnish;

use crate::words::{Failed, Task, Who};
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
use tern_ids::NodeId;
use tern_node::Config;

/// In the place of a home: the room of commands that are this node's own, and see it as it is.
pub(crate) const OWN: NodeId = NodeId(0);

/// Descriptors that come with an order: standard input, output and error, and the line to the command's init.
pub(crate) const DESCRIPTORS: usize = 4;

/// What init says of its command, in this many bytes: what it is, two numbers and the CPU time.
pub(crate) const NEWS: usize = 17;

/// What init says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum News {
    /// It runs.
    Started,
    /// It could not be begun.
    NotStarted(Failed, i32),
    /// It has ended with this status, and has used so many microseconds of CPU time.
    Ended(i32, u64),
}

impl News {
    pub(crate) fn to_bytes(self) -> [u8; NEWS] {
        let (what, first, second, cpu) = match self {
            Self::Started => (0, 0, 0, 0),
            Self::NotStarted(Failed::Directory, errno) => (1, 0, errno, 0),
            Self::NotStarted(Failed::Program, errno) => (1, 1, errno, 0),
            Self::NotStarted(Failed::Setting, errno) => (1, 2, errno, 0),
            Self::Ended(status, cpu) => (2, status, 0, cpu),
        };
        let mut bytes = [what; NEWS];
        bytes[1..5].copy_from_slice(&i32::to_le_bytes(first));
        bytes[5..9].copy_from_slice(&i32::to_le_bytes(second));
        bytes[9..].copy_from_slice(&cpu.to_le_bytes());
        bytes
    }

    /// Reads what init says.
    pub(crate) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut bytes = [0; NEWS];
        from.read_exact(&mut bytes)?;
        let number = |at: usize| i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let cpu = bytes[9..].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        Ok(match (bytes[0], number(1)) {
            (0, _) => Self::Started,
            (1, 0) => Self::NotStarted(Failed::Directory, number(5)),
            (1, 1) => Self::NotStarted(Failed::Program, number(5)),
            (1, _) => Self::NotStarted(Failed::Setting, number(5)),
            (_, status) => Self::Ended(status, cpu),
        })
    }
}

/// Has the room at the other end of this socket begin a command.
///
/// # Errors
/// If the room is gone.
pub(crate) fn order(
    room: &mut UnixStream,
    task: &Task,
    who: &Who,
    descriptors: [BorrowedFd<'_>; DESCRIPTORS],
) -> Result<()> {
    let body = tern_wire::encode(&(task, who))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let length = (body.len() as u32).to_le_bytes();
    sendmsg(&*room, &[IoSlice::new(&length)], &mut ancillary, SendFlags::NOSIGNAL)?;
    room.write_all(&body)?;
    Ok(())
}

/// Gives the executor the room's tree of files, if it has one.
fn give(executor: &UnixStream, tree: Option<&OwnedFd>) -> Result<()> {
    let descriptors: Vec<_> = tree.into_iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    sendmsg(executor, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Takes the tree of files of the room at the other end of this socket; none if it shows this node's own.
///
/// # Errors
/// If the room is gone.
pub(crate) fn take(room: &UnixStream) -> Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(room, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    anyhow::ensure!(got.bytes > 0, "the room has ended");
    Ok(descriptors(&mut ancillary).into_iter().next())
}

fn descriptors(ancillary: &mut RecvAncillaryBuffer<'_>) -> Vec<OwnedFd> {
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    rights.flatten().collect()
}

/// An order that has come.
pub(crate) struct Order {
    task: Task,
    who: Who,
    pub(crate) descriptors: [OwnedFd; DESCRIPTORS],
}

impl Order {
    /// Waits for the next; none if the executor is gone.
    pub(crate) fn hear(executor: &mut UnixStream) -> Result<Option<Self>> {
        let mut length = [0; 4];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut length)];
        let got =
            recvmsg(&*executor, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL)?;
        if got.bytes == 0 {
            return Ok(None);
        }
        let descriptors = descriptors(&mut ancillary);
        let mut body = Vec::new();
        executor.take(u32::from_le_bytes(length).into()).read_to_end(&mut body)?;
        let (task, who) = tern_wire::decode(&body)?;
        let descriptors = descriptors.try_into().ok().context("an order without its descriptors")?;
        Ok(Some(Self { task, who, descriptors }))
    }
}

/// The whole life of a room: makes it, with these directories of this node's, says `ready` on standard output, and bears commands until the executor, at the other end of
/// standard input, is gone.
///
/// # Errors
/// If it cannot be made; nothing is left then.
pub fn run(config: &Config, home: NodeId, shared: &[PathBuf]) -> Result<()> {
    let mut executor = UnixStream::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    let tree = match home {
        OWN => {
            furnish::as_it_is()?;
            None
        }
        home => {
            // By this name ternd knows whose work its commands are.
            rustix::thread::set_name(c"tern-room")?;
            Some(furnish::furnish(config, home, shared)?)
        }
    };
    let _gone = writeln!(io::stdout(), "ready");
    give(&executor, tree.as_ref())?;
    drop(tree);
    rustix::stdio::dup2_stdout(&null)?;
    birth::reap_by_kernel();
    let scratch = scratch(config);
    while let Some(mut order) = Order::hear(&mut executor)? {
        if home != OWN {
            order.task.nice = order.task.nice.max(config.guest_nice.into());
        }
        if let Err(error) = birth::bear(&order, &scratch) {
            // Its init's line is closed with it, which says that nothing was begun.
            tracing::warn!(%error, "a command could not be begun");
        }
    }
    Ok(())
}

/// Where a command that may be run twice has a place of its own for temporary files: on this node, for as long as it runs.
fn scratch(config: &Config) -> PathBuf {
    config.run_dir.join("tmp")
}

/// Where rooms are made.
pub(crate) fn place(config: &Config, home: NodeId) -> PathBuf {
    config.run_dir.join(format!("room-{home}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_survive() {
        for news in [
            News::Started,
            News::NotStarted(Failed::Directory, 2),
            News::NotStarted(Failed::Program, 13),
            News::NotStarted(Failed::Setting, 1),
            News::Ended(0x8b, u64::MAX - 1),
        ] {
            assert_eq!(News::read(&mut &news.to_bytes()[..]).unwrap(), news);
        }
    }
}
