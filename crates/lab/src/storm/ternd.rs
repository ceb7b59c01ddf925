//! Move requests to the node's ternd, as `migrate` sends them, without starting a process for each.

use crate::error::{Result, Tried};
use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use tern_control::{Destination, ProcessRow, RefusalKind, Reply, Request, stream};
use tern_ids::{HomePid, NodeId};

/// ternd's default control socket. The lab does not change it.
const SOCKET: &str = "/run/tern/control";
/// Timeout for a move. It is longer than any of ternd's own timeouts, so a move without a reply by
/// then hangs.
const REPLY_TIMEOUT: Duration = Duration::from_secs(100);
/// The node where this program runs, and where every process of the command starts.
pub(super) const HOME: NodeId = NodeId(1);

/// The result of a move request.
#[derive(Debug)]
pub(super) enum Answer {
    /// The process now runs at the destination.
    Moved,
    /// The process was at the destination already.
    There,
    /// The process has ended.
    Gone,
    /// The process was not moved, for this reason.
    Refused(String),
    /// Tern failed, with this error.
    Broken(String),
}

/// Moves a process. Returns when the process runs at the destination, or the move is refused.
pub(super) fn migrate(pid: i32, to: NodeId) -> Answer {
    let place = if to == HOME { Destination::Home } else { Destination::Node(to) };
    match ask(&Request::Migrate { pid: HomePid(pid), to: place }) {
        Ok(Reply::Migrated(report)) if report.to == to && report.pid.0 == pid => Answer::Moved,
        Ok(Reply::Migrated(report)) => {
            Answer::Broken(format!("asked for {pid} to go to {to}, ternd reports {report:?}"))
        }
        Ok(Reply::Refused(refusal)) => match refusal.kind {
            RefusalKind::NotFound => Answer::Gone,
            RefusalKind::BadRequest => Answer::There,
            RefusalKind::Internal => Answer::Broken(refusal.message),
            _ => Answer::Refused(refusal.message),
        },
        Ok(other) => Answer::Broken(format!("ternd answered {other:?}")),
        Err(error) => Answer::Broken(format!("no answer from ternd: {error}")),
    }
}

/// ternd's list of processes.
pub(super) fn processes() -> Result<Vec<ProcessRow>> {
    match ask(&Request::Processes).tried(|| "ask ternd for its processes".to_owned())? {
        Reply::Processes(rows) => Ok(rows),
        other => Err(io::Error::other(format!("it answered {other:?}")))
            .tried(|| "ask ternd for its processes".to_owned()),
    }
}

fn ask(request: &Request) -> io::Result<Reply> {
    let mut connection = UnixStream::connect(SOCKET)?;
    connection.set_read_timeout(Some(REPLY_TIMEOUT))?;
    stream::write(&mut connection, request)?;
    stream::read(&mut connection)
}
