//! The processes that a node shows: those in its shims, and those that were started with mosrun.

use crate::node::Node;
use crate::peer::client;
use crate::peer::message::{PeerReply, PeerRequest};
use crate::process::permission::Caller;
use crate::process::registry::Registry;
use crate::shim;
use std::time::Duration;
use tern_control::{ConnectionRow, ProcessRow, Refusal, RefusalKind, ShimReply, ShimRequest, used_away};
use tern_ids::{HomePid, NodeId};

/// Maximum number of rows in a reply to another node, and maximum number of characters of each
/// command line, reason and state. Together they fit in a frame.
const MAX_ROWS: usize = 2048;
const MAX_CHARS: usize = 128;

/// Timeout of a request for the list of another node.
const LIST_TIMEOUT: Duration = Duration::from_secs(3);

/// The processes in the shims: own processes that are away or migrating, and guests.
pub(crate) fn from_shims(node: &Node) -> Vec<ProcessRow> {
    let replies = shim::request_all(&node.config.run_dir, &ShimRequest::Processes).into_iter();
    let rows = |(_, reply)| if let ShimReply::Processes(rows) = reply { rows } else { Vec::new() };
    replies.flat_map(rows).collect()
}

/// The sockets of the caller's processes in the shims, or those of all processes if the caller owns
/// this node.
pub(crate) fn connections(node: &Node, caller: Caller) -> Vec<ConnectionRow> {
    let replies = shim::request_all(&node.config.run_dir, &ShimRequest::Connections).into_iter();
    let rows = |(_, reply)| if let ShimReply::Connections(rows) = reply { rows } else { Vec::new() };
    let mut rows: Vec<_> = replies.flat_map(rows).collect();
    rows.retain(|row| caller.owns_node() || row.uid == caller.uid);
    rows.sort_by_key(|row| (row.from, row.pid, row.fd));
    rows.truncate(ConnectionRow::MAX_ROWS);
    for row in &mut rows {
        // A socket for IPv6 shows an IPv4 address in another form.
        for address in std::iter::once(&mut row.local).chain(&mut row.peer) {
            address.set_ip(address.ip().to_canonical());
        }
    }
    rows
}

/// All processes that `mps` shows.
pub(crate) fn all(node: &Node) -> Vec<ProcessRow> {
    let mut rows = from_shims(node);
    let living = node.registry.living();
    let own: Vec<_> = rows.iter().filter(|row| row.from.is_none()).map(|row| row.pid).collect();
    let found = |pid: HomePid| living.iter().find(|one| one.pid == pid.0);
    for row in rows.iter_mut().filter(|row| row.from.is_none()) {
        // A deputy keeps the pid and the ancestors of its process, so the registry finds it.
        row.started = found(row.pid).map(|one| one.registration.started_as());
    }
    let mut at_home = Registry::rows(&living, &own, node.me());
    for row in &mut at_home {
        if row.reason.is_empty() {
            row.reason = node.balancing.refusal(row.pid).unwrap_or_default();
        }
        if let Some(one) = found(row.pid) {
            row.cpu_seconds += used_away::by_process(&node.config.run_dir, one.pid, one.start).as_secs_f64();
        }
    }
    for row in rows.iter_mut().chain(&mut at_home).filter(|row| row.from.is_none()) {
        let counted = found(row.pid).map_or(0, |one| node.cluster.migrations_of(row.pid, one.start));
        row.migrations = row.migrations.max(counted);
    }
    rows.extend(at_home);
    rows.sort_by_key(|row| (row.from, row.pid));
    rows
}

/// All processes of another node that `mps` shows.
pub(crate) fn of_node(node: &Node, on: NodeId) -> Result<Vec<ProcessRow>, Refusal> {
    if on == node.me() {
        return Ok(all(node));
    }
    match client::call_pooled(node, on, &PeerRequest::Processes, LIST_TIMEOUT)? {
        PeerReply::Processes(rows) => Ok(rows),
        _ => Err(Refusal::new(RefusalKind::Internal, format!("node {on} sent an unexpected reply"))),
    }
}

/// All processes, with as many rows and characters as fit in one message.
pub(crate) fn for_peer(node: &Node) -> Vec<ProcessRow> {
    let mut rows = all(node);
    rows.truncate(MAX_ROWS);
    for row in &mut rows {
        for text in [&mut row.command, &mut row.reason, &mut row.state] {
            let end = text.char_indices().nth(MAX_CHARS).map_or(text.len(), |(at, _)| at);
            text.truncate(end);
        }
    }
    rows
}

/// Whether this row is of a process of this node that runs on another one.
pub(crate) fn is_away(node: &Node, row: &ProcessRow) -> bool {
    row.from.is_none() && row.r#where.is_some_and(|place| place != node.me())
}

/// Number of processes of this node that are away, and number of guests here.
pub(crate) fn counts(node: &Node) -> (u32, u32) {
    let rows = from_shims(node);
    let count = |wanted: &dyn Fn(&ProcessRow) -> bool| {
        u32::try_from(rows.iter().filter(|row| wanted(row)).count()).unwrap_or(u32::MAX)
    };
    (count(&|row| is_away(node, row)), count(&|row| row.from.is_some()))
}
