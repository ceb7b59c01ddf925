//! Orders to the node's own ternd, as `migrate` gives them, without a process for each.

use crate::error::{Result, Tried};
use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use tern_control::{Destination, ProcessRow, RefusalKind, Reply, Request, stream};
use tern_ids::{HomePid, NodeId};

/// Where a node's ternd hears its tools, unless it was told otherwise, which the lab does not.
const SOCKET: &str = "/run/tern/control";
/// Longer than ternd itself waits for anybody: a move that is not answered by then hangs.
const PATIENCE: Duration = Duration::from_secs(100);
/// This program is in the node where everything begins.
pub(super) const HOME: NodeId = NodeId(1);

/// What became of an order to move a process.
#[derive(Debug)]
pub(super) enum Answer {
    /// It runs there.
    Moved,
    /// It is there already.
    There,
    /// There is no such process any more.
    Gone,
    /// It stays, and why.
    Refused(String),
    /// Tern failed.
    Broken(String),
}

/// Moves a process, and waits until it runs there or is refused.
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

/// What ternd knows of its processes.
pub(super) fn processes() -> Result<Vec<ProcessRow>> {
    match ask(&Request::Processes).tried(|| "ask ternd for its processes".to_owned())? {
        Reply::Processes(rows) => Ok(rows),
        other => Err(io::Error::other(format!("it answered {other:?}")))
            .tried(|| "ask ternd for its processes".to_owned()),
    }
}

fn ask(request: &Request) -> io::Result<Reply> {
    let mut connection = UnixStream::connect(SOCKET)?;
    connection.set_read_timeout(Some(PATIENCE))?;
    stream::write(&mut connection, request)?;
    stream::read(&mut connection)
}
