//! The caller of a command, and the progress reports to it until the command runs.

use super::admission::{AdmissionLimit, Permit};
use super::queue::QueuePlace;
use crate::frames;
use crate::job_table::JobEntry;
use crate::messages::{ExecReply, PendingReason, PlacementReason, kind};
use anyhow::{Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use tern_ids::{Credentials, NodeId};

/// How often the wait for admission checks whether the caller has disconnected.
const ADMISSION_CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// A caller while its command is served.
#[derive(Debug)]
pub(super) struct Caller<'a> {
    pub(super) socket: UnixStream,
    pub(super) pid: i32,
    pub(super) credentials: Credentials,
    /// Whether it has requested progress reports ([`ExecReply::Placed`] and
    /// [`ExecReply::Pending`]).
    pub(super) wants_progress: bool,
    pub(super) entry: JobEntry,
    /// Held during the search for a node.
    pub(super) permit: Option<Permit<'a>>,
    /// Held while it waits for a slot of this node.
    pub(super) queue_place: Option<QueuePlace<'a>>,
}

impl<'a> Caller<'a> {
    pub(super) fn reply(&mut self, reply: &ExecReply) -> Result<()> {
        Ok(frames::write_message(&mut self.socket, kind::EXEC_REPLY, reply)?)
    }

    /// Records that the command runs on `node`, or will at once.
    pub(super) fn set_placed(&mut self, node: NodeId, reason: PlacementReason) -> Result<()> {
        self.entry.set_running(node);
        (self.permit, self.queue_place) = (None, None);
        if self.wants_progress { self.reply(&ExecReply::Placed(node, reason)) } else { Ok(()) }
    }

    pub(super) fn set_pending(&mut self, reason: PendingReason) -> Result<()> {
        self.entry.set_pending(!matches!(reason, PendingReason::NodeReply(_)));
        if self.wants_progress { self.reply(&ExecReply::Pending(reason)) } else { Ok(()) }
    }

    /// Waits for admission as long as the caller is connected.
    pub(super) fn admit(&mut self, limit: &'a AdmissionLimit, only: Option<NodeId>) -> Result<()> {
        let key = (self.credentials.uid, only);
        self.permit = limit.acquire(key, Duration::ZERO);
        if self.permit.is_none() {
            self.set_pending(PendingReason::SearchLimit)?;
        }
        while self.permit.is_none() {
            self.permit = limit.acquire(key, ADMISSION_CHECK_INTERVAL);
            if self.permit.is_none() && self.is_disconnected() {
                bail!("its caller has disconnected");
            }
        }
        Ok(())
    }

    fn is_disconnected(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }
}
