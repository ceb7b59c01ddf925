//! The processes that a node shows: what its shims hold, and what was started with mosrun.

use crate::message::{PeerReply, PeerRequest};
use crate::registry::Registry;
use crate::state::Node;
use crate::{balancing, peers, shims};
use std::time::Duration;
use tern_control::{ProcessRow, Refusal, RefusalKind, ShimReply, ShimRequest};
use tern_ids::NodeId;

/// The most rows that another node is sent, and the most of each command line and reason: together less than a frame.
const MOST_ROWS: usize = 2048;
const MOST_TEXT: usize = 128;

/// How long another node may take to tell of its own.
const TELL: Duration = Duration::from_secs(3);

/// What the shims hold: own processes that are away or on their way, and guests.
pub(crate) fn of_shims(node: &Node) -> Vec<ProcessRow> {
    let replies = shims::ask_all(&node.config.run_dir, &ShimRequest::Processes).into_iter();
    let rows = |(_, reply)| if let ShimReply::Processes(rows) = reply { rows } else { Vec::new() };
    replies.flat_map(rows).collect()
}

/// All that `mps` shows.
pub(crate) fn all(node: &Node) -> Vec<ProcessRow> {
    let mut rows = of_shims(node);
    let living = node.registry.living();
    let own: Vec<_> = rows.iter().filter(|row| row.from.is_none()).map(|row| row.pid).collect();
    for row in rows.iter_mut().filter(|row| row.from.is_none()) {
        // A deputy is the process itself, with its number and its relatives.
        row.started = living.iter().find(|one| one.pid == row.pid.0).map(|one| one.said.shown());
    }
    let mut at_home = Registry::rows(&living, &own, node.me());
    for row in at_home.iter_mut().filter(|row| row.reason.is_empty()) {
        row.reason = balancing::refusal(node, row.pid).unwrap_or_default();
    }
    rows.extend(at_home);
    rows.sort_by_key(|row| (row.from, row.pid));
    rows
}

/// The same of another node.
pub(crate) fn of(node: &Node, on: NodeId) -> Result<Vec<ProcessRow>, Refusal> {
    if on == node.me() {
        return Ok(all(node));
    }
    match peers::ask_again(node, on, &PeerRequest::Processes, TELL)? {
        PeerReply::Processes(rows) => Ok(rows),
        _ => {
            Err(Refusal::new(RefusalKind::Internal, format!("node {on} gave an answer to another question")))
        }
    }
}

/// All of them, in a message that is never too long.
pub(crate) fn for_others(node: &Node) -> Vec<ProcessRow> {
    let mut rows = all(node);
    rows.truncate(MOST_ROWS);
    for row in &mut rows {
        for text in [&mut row.command, &mut row.reason, &mut row.state] {
            let end = text.char_indices().nth(MOST_TEXT).map_or(text.len(), |(at, _)| at);
            text.truncate(end);
        }
    }
    rows
}

/// Whether it is a process of this node that runs elsewhere.
pub(crate) fn is_away(node: &Node, row: &ProcessRow) -> bool {
    row.from.is_none() && row.r#where.is_some_and(|place| place != node.me())
}

/// Processes of this node that are away, and guests here.
pub(crate) fn counts(node: &Node) -> (u32, u32) {
    let rows = of_shims(node);
    let count = |wanted: &dyn Fn(&ProcessRow) -> bool| {
        u32::try_from(rows.iter().filter(|row| wanted(row)).count()).unwrap_or(u32::MAX)
    };
    (count(&|row| is_away(node, row)), count(&|row| row.from.is_some()))
}
