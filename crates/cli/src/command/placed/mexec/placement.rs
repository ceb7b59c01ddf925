//! Requests a node for a command. If that takes long, a message at the terminal names the reason.

use super::{connection_failure, report};
use crate::Failure;
use crate::command::placed::mpmake::event_log::{self, CommandRecord};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, IsTerminal, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use tern_control::RefusalKind;
use tern_mexec::frames::{self, LocalFrame};
use tern_mexec::messages::{ExecReply, JobRequest, PendingReason, WANTS_PROGRESS, kind};

/// How long finding a node may take before the reason is reported.
const WAIT_NOTICE_DELAY: Duration = Duration::from_secs(2);

/// Sends the request. Returns the first reply that is not about the search for a node.
///
/// # Errors
/// If the connection to the placing service fails.
pub(super) fn request(
    executor: &mut UnixStream,
    job: &JobRequest,
    record: Option<&CommandRecord>,
) -> Result<ExecReply, Failure> {
    let started = Instant::now();
    let mut may_notify = record.is_none() && is_run_by_a_user();
    let flags = if may_notify || record.is_some() { WANTS_PROGRESS } else { 0 };
    let bytes = tern_wire::encode(job).map_err(|e| connection_failure(&io::Error::other(e)))?;
    executor
        .write_all(&frames::encode_frame(kind::JOB_REQUEST, flags, &bytes))
        .map_err(|e| connection_failure(&e))?;
    let (mut wait, mut is_chosen) = (None, false);
    loop {
        if may_notify
            && !is_chosen
            && !is_readable_within(executor, WAIT_NOTICE_DELAY.saturating_sub(started.elapsed()))
        {
            report(&describe_wait(wait.as_ref()));
            may_notify = false;
        }
        match receive(executor)? {
            ExecReply::Pending(reason) => wait = Some(reason),
            ExecReply::Placed(node, why) => {
                is_chosen = true;
                if let Some(record) = record {
                    record.started(Some(node.0), &event_log::reason_text(why));
                }
            }
            reply => return Ok(reply),
        }
    }
}

/// Whether a user at a terminal waits for this command: this process leads its process group, so an
/// interactive shell has started it, and not make or a script.
fn is_run_by_a_user() -> bool {
    io::stderr().is_terminal() && rustix::process::getpgrp() == rustix::process::getpid()
}

fn is_readable_within(executor: &UnixStream, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).ok();
    poll(&mut [PollFd::new(executor, PollFlags::IN)], timeout.as_ref()).is_ok_and(|ready| ready > 0)
}

fn describe_wait(wait: Option<&PendingReason>) -> String {
    match wait {
        Some(PendingReason::SearchLimit) => {
            "waiting: as many of your commands as allowed are looking for a node already".into()
        }
        Some(PendingReason::NodeReply(node)) => format!("waiting for a reply from node {node}"),
        Some(PendingReason::Slot(nodes)) => {
            let nodes: Vec<_> = nodes.iter().map(ToString::to_string).collect();
            match &nodes[..] {
                [node] => format!("waiting: node {node} is full"),
                nodes => format!("waiting: nodes {} are full", nodes.join(", ")),
            }
        }
        None => "waiting for a node to be chosen".into(),
    }
}

fn receive(executor: &mut UnixStream) -> Result<ExecReply, Failure> {
    match frames::read_frame(executor).map_err(|e| connection_failure(&e))? {
        LocalFrame { kind: kind::EXEC_REPLY, payload: bytes, .. } => {
            frames::decode(&bytes).map_err(|e| connection_failure(&e))
        }
        frame => Err(Failure::new(
            RefusalKind::Internal,
            format!("tern-exec sent an unexpected message of kind {}", frame.kind),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_ids::NodeId;

    #[test]
    fn wait_reason_is_described() {
        let text = |wait| describe_wait(Some(&wait));
        assert_eq!(text(PendingReason::Slot(vec![NodeId(2)])), "waiting: node 2 is full");
        assert_eq!(text(PendingReason::Slot(vec![NodeId(2), NodeId(3)])), "waiting: nodes 2, 3 are full");
        assert_eq!(text(PendingReason::NodeReply(NodeId(7))), "waiting for a reply from node 7");
    }
}
