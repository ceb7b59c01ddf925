//! The job table: this node's commands, wherever they run or wait, and other nodes' commands here.

use crate::lock;
use crate::messages::Task;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tern_control::PlacedRow;
use tern_ids::{HomePid, NodeId};

/// The maximum number of characters shown of a command.
const MAX_COMMAND_LEN: usize = 128;

/// The maximum number of rows in one reply, which keeps the reply below
/// [`tern_control::stream::MAX_DOCUMENT_LEN`].
const MAX_REPLY_ROWS: usize = 4096;

/// All commands placed from this node or on it.
#[derive(Debug, Default)]
pub(crate) struct JobTable(Mutex<Rows>);

#[derive(Debug, Default)]
struct Rows {
    next: u64,
    rows: BTreeMap<u64, (Instant, PlacedRow)>,
}

impl JobTable {
    /// Adds a command of this node (or of the node `from`), for which no node is chosen yet.
    pub(crate) fn add(self: &Arc<Self>, task: &Task, uid: u32, from: Option<NodeId>) -> JobEntry {
        let row = PlacedRow {
            pid: HomePid(task.pid),
            uid,
            r#where: None,
            is_queued: false,
            from,
            seconds: 0.0,
            command: task.summary(MAX_COMMAND_LEN),
        };
        let mut rows = lock(&self.0);
        let number = rows.next;
        rows.next += 1;
        rows.rows.insert(number, (Instant::now(), row));
        JobEntry(self.clone(), number)
    }

    /// A snapshot, the oldest first.
    pub(crate) fn rows(&self) -> Vec<PlacedRow> {
        let rows = lock(&self.0);
        let with_age = |(since, row): &(Instant, PlacedRow)| PlacedRow {
            seconds: since.elapsed().as_secs_f64(),
            ..row.clone()
        };
        rows.rows.values().take(MAX_REPLY_ROWS).map(with_age).collect()
    }
}

/// A row of the table, until it is dropped.
#[derive(Debug)]
pub(crate) struct JobEntry(Arc<JobTable>, u64);

impl JobEntry {
    /// It runs on this node.
    pub(crate) fn set_running(&self, node: NodeId) {
        self.set(Some(node), false);
    }

    /// It does not run: it is queued, or a node is being chosen or asked.
    pub(crate) fn set_pending(&self, is_queued: bool) {
        self.set(None, is_queued);
    }

    fn set(&self, node: Option<NodeId>, is_queued: bool) {
        let mut table = lock(&self.0.0);
        let Some((since, row)) = table.rows.get_mut(&self.1) else { return };
        row.is_queued = is_queued;
        if row.r#where != node {
            (*since, row.r#where) = (Instant::now(), node);
        }
    }
}

impl Drop for JobEntry {
    fn drop(&mut self) {
        lock(&self.0.0).rows.remove(&self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::task;

    #[test]
    fn ended_commands_are_removed_and_lost_ones_are_queued_again() {
        let table = Arc::new(JobTable::default());
        let (own, other) =
            (table.add(&task(&["gcc", "x.c"]), 7, None), table.add(&task(&["ld"]), 8, Some(NodeId(3))));
        let listed =
            || -> Vec<_> { table.rows().iter().map(|row| (row.uid, row.r#where, row.from)).collect() };
        own.set_running(NodeId(2));
        other.set_running(NodeId(1));
        assert_eq!(listed(), [(7, Some(NodeId(2)), None), (8, Some(NodeId(1)), Some(NodeId(3)))]);
        own.set_pending(true);
        drop(other);
        assert_eq!(listed(), [(7, None, None)]);
        assert!(table.rows()[0].is_queued);
        assert_eq!(table.rows()[0].command, "gcc x.c");
    }
}
