//! What is placed, for who asks: this node's commands wherever they run or wait, and those of others here.

use crate::lock;
use crate::words::Task;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tern_control::PlacedRow;
use tern_ids::{HomePid, NodeId};

/// Of a command, so much is shown.
const SHOWN: usize = 128;

/// The most that is told at a time: less than a document can hold.
const TOLD: usize = 4096;

/// All that is placed from this node or on it.
#[derive(Debug, Default)]
pub(crate) struct Board(Mutex<Rows>);

#[derive(Debug, Default)]
struct Rows {
    next: u64,
    rows: BTreeMap<u64, (Instant, PlacedRow)>,
}

impl Board {
    /// Adds a command, of this node or of that one, which runs here or waits until [`Entry::runs`].
    pub(crate) fn add(self: &Arc<Self>, task: &Task, uid: u32, from: Option<NodeId>) -> Entry {
        let row = PlacedRow {
            pid: HomePid(task.pid),
            uid,
            r#where: None,
            from,
            seconds: 0.0,
            command: task.shown(SHOWN),
        };
        let mut rows = lock(&self.0);
        let number = rows.next;
        rows.next += 1;
        rows.rows.insert(number, (Instant::now(), row));
        Entry(self.clone(), number)
    }

    /// As they are now: who came first is first.
    pub(crate) fn rows(&self) -> Vec<PlacedRow> {
        let rows = lock(&self.0);
        let aged = |(since, row): &(Instant, PlacedRow)| PlacedRow {
            seconds: since.elapsed().as_secs_f64(),
            ..row.clone()
        };
        rows.rows.values().take(TOLD).map(aged).collect()
    }
}

/// One of them, until this is dropped.
#[derive(Debug)]
pub(crate) struct Entry(Arc<Board>, u64);

impl Entry {
    /// It runs on this node.
    pub(crate) fn runs(&self, node: NodeId) {
        self.set(Some(node));
    }

    /// It runs nowhere.
    pub(crate) fn waits(&self) {
        self.set(None);
    }

    fn set(&self, node: Option<NodeId>) {
        if let Some((since, row)) = lock(&self.0.0).rows.get_mut(&self.1).filter(|(_, r)| r.r#where != node) {
            (*since, row.r#where) = (Instant::now(), node);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.0.0).rows.remove(&self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile::task;

    #[test]
    fn what_is_over_is_gone_and_what_is_lost_waits_again() {
        let board = Arc::new(Board::default());
        let (own, other) =
            (board.add(&task(&["gcc", "x.c"]), 7, None), board.add(&task(&["ld"]), 8, Some(NodeId(3))));
        let seen = || -> Vec<_> { board.rows().iter().map(|row| (row.uid, row.r#where, row.from)).collect() };
        own.runs(NodeId(2));
        other.runs(NodeId(1));
        assert_eq!(seen(), [(7, Some(NodeId(2)), None), (8, Some(NodeId(1)), Some(NodeId(3)))]);
        own.waits();
        drop(other);
        assert_eq!(seen(), [(7, None, None)]);
        assert_eq!(board.rows()[0].command, "gcc x.c");
    }
}
