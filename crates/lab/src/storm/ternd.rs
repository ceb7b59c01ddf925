//! Move requests to the node's ternd, as `migrate` sends them, without starting a process for each.

use crate::error::{Result, WithContext};
use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use tern_control::{Destination, ProcessRow, RefusalKind, Reply, Request, stream};
use tern_ids::{HomePid, NodeId};

/// ternd's default control socket. The lab does not change it.
const CONTROL_SOCKET: &str = "/run/tern/control";
/// Timeout for a move. It is longer than any of ternd's own timeouts, so a move without a reply by
/// then has hung.
const REPLY_TIMEOUT: Duration = Duration::from_secs(100);
/// The node where this program runs, and where every process of the command starts.
pub(super) const HOME: NodeId = NodeId(1);

/// The result of a move request.
#[derive(Debug)]
pub(super) enum MoveResult {
    /// The process now runs at the destination.
    Moved,
    /// The process was at the destination already.
    AlreadyThere,
    /// The process has ended.
    ProcessEnded,
    /// The process was not moved, for this reason.
    Refused(String),
    /// Tern failed, with this error.
    Failed(String),
}

/// Moves a process. Returns when the process runs at the destination, or the move is refused.
pub(super) fn migrate(pid: i32, to: NodeId) -> MoveResult {
    let place = if to == HOME { Destination::Home } else { Destination::Node(to) };
    match request(&Request::Migrate { pid: HomePid(pid), to: place }) {
        Ok(Reply::Migrated(report)) if report.to == to && report.pid.0 == pid => MoveResult::Moved,
        Ok(Reply::Migrated(report)) => {
            MoveResult::Failed(format!("asked for {pid} to go to {to}, ternd reports {report:?}"))
        }
        Ok(Reply::Refused(refusal)) => match refusal.kind {
            RefusalKind::NotFound => MoveResult::ProcessEnded,
            RefusalKind::AlreadyDone => MoveResult::AlreadyThere,
            RefusalKind::Internal => MoveResult::Failed(refusal.message),
            _ => MoveResult::Refused(refusal.message),
        },
        Ok(other) => MoveResult::Failed(format!("ternd answered {other:?}")),
        Err(error) => MoveResult::Failed(format!("no answer from ternd: {error}")),
    }
}

/// ternd's list of processes.
pub(super) fn processes() -> Result<Vec<ProcessRow>> {
    match request(&Request::Processes).with_context(|| "ask ternd for its processes".to_owned())? {
        Reply::Processes(rows) => Ok(rows),
        other => Err(io::Error::other(format!("it answered {other:?}")))
            .with_context(|| "ask ternd for its processes".to_owned()),
    }
}

fn request(request: &Request) -> io::Result<Reply> {
    let mut connection = UnixStream::connect(CONTROL_SOCKET)?;
    connection.set_read_timeout(Some(REPLY_TIMEOUT))?;
    stream::write(&mut connection, request)?;
    stream::read(&mut connection)
}
