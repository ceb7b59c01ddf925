//! The processes of one node, their CPU use, and the selected one.

use std::cmp::Ordering;
use std::time::Duration;
use tern_control::ProcessRow;
use tern_ids::{HomePid, NodeId};

/// The sort order of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SortOrder {
    /// The highest CPU use first.
    #[default]
    Cpu,
    /// The most CPU time first.
    Time,
    /// By pid.
    Pid,
}

/// Identifies a process in the cluster. Pids are those of its home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessKey {
    /// Its home, if that is not the node of the list.
    pub from: Option<NodeId>,
    /// Its pid at home.
    pub pid: HomePid,
}

/// A line of the list.
#[derive(Debug, Clone, PartialEq)]
pub struct ProcessEntry {
    /// The node's report about the process.
    pub row: ProcessRow,
    /// Percent of one CPU between the last two reports; `None` before there are two.
    pub cpu: Option<f64>,
}

impl ProcessEntry {
    /// The process's identity.
    #[must_use]
    pub fn key(&self) -> ProcessKey {
        ProcessKey { from: self.row.from, pid: self.row.pid }
    }
}

/// The processes of one node.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ProcessList {
    /// The node; `None` for this one.
    pub node: Option<NodeId>,
    /// The processes, sorted.
    pub entries: Vec<ProcessEntry>,
    /// The sort order.
    pub order: SortOrder,
    /// The selected process.
    pub selected: Option<ProcessKey>,
    /// The first line shown.
    pub first_line: usize,
    /// When the node's last reply arrived.
    pub received_at: Option<Duration>,
    /// When the pending query was sent, if there is one.
    pub pending_since: Option<Duration>,
    /// When the last query was sent.
    pub last_sent: Option<Duration>,
}

impl ProcessList {
    /// An empty list, before the first query.
    #[must_use]
    pub fn new(node: Option<NodeId>, order: SortOrder) -> Self {
        Self { node, order, ..Self::default() }
    }

    /// Replaces the processes by those of a reply that arrived at `now`, and computes their CPU
    /// use.
    pub fn update(&mut self, rows: Vec<ProcessRow>, now: Duration) {
        let passed = self.received_at.map(|before| now.saturating_sub(before).as_secs_f64());
        let entries = rows.into_iter().map(|row| {
            let key = ProcessKey { from: row.from, pid: row.pid };
            let before = self.entries.iter().find(|entry| entry.key() == key);
            let cpu = match (before, passed) {
                // If the CPU time has decreased, the pid belongs to another process now.
                (Some(before), Some(passed)) if passed > 0.0 && row.cpu_seconds >= before.row.cpu_seconds => {
                    Some((row.cpu_seconds - before.row.cpu_seconds) / passed * 100.0)
                }
                _ => None,
            };
            ProcessEntry { row, cpu }
        });
        self.entries = entries.collect();
        self.received_at = Some(now);
        self.sort();
    }

    /// Changes the sort order.
    pub fn sort_by(&mut self, order: SortOrder) {
        self.order = order;
        self.sort();
        self.first_line = 0;
    }

    fn sort(&mut self) {
        let key = |entry: &ProcessEntry| match self.order {
            SortOrder::Cpu => entry.cpu.unwrap_or(0.0),
            SortOrder::Time => entry.row.cpu_seconds,
            SortOrder::Pid => 0.0,
        };
        self.entries.sort_by(|a, b| {
            key(b).partial_cmp(&key(a)).unwrap_or(Ordering::Equal).then_with(|| {
                let number = |entry: &ProcessEntry| (entry.row.pid, entry.row.from);
                number(a).cmp(&number(b))
            })
        });
        if !self.entries.iter().any(|entry| Some(entry.key()) == self.selected) {
            self.selected = None;
        }
    }

    /// The selected process, or the first.
    #[must_use]
    pub fn selected_entry(&self) -> Option<&ProcessEntry> {
        self.entries.get(self.selected_index())
    }

    /// The index of the selected process.
    #[must_use]
    pub fn selected_index(&self) -> usize {
        self.entries.iter().position(|entry| Some(entry.key()) == self.selected).unwrap_or(0)
    }

    /// Moves the selection by `by` lines, and scrolls the window of `height` lines to it.
    pub fn move_selection(&mut self, by: isize, height: usize) {
        let last = self.entries.len().saturating_sub(1);
        let place = self.selected_index().saturating_add_signed(by).min(last);
        self.selected = self.entries.get(place).map(ProcessEntry::key);
        let height = height.max(1);
        self.first_line = self.first_line.clamp((place + 1).saturating_sub(height), place);
    }

    /// The first line of a window of `height` lines that contains the selection.
    #[must_use]
    pub fn first_visible(&self, height: usize) -> usize {
        let place = self.selected_index();
        self.first_line.clamp((place + 1).saturating_sub(height.max(1)), place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(pid: i32, cpu_seconds: f64) -> ProcessRow {
        ProcessRow {
            pid: HomePid(pid),
            uid: 0,
            r#where: Some(NodeId(2)),
            from: None,
            state: "running".into(),
            cpu_seconds,
            migrations: 1,
            reason: String::new(),
            command: "flac".into(),
            usage: tern_control::Usage::default(),
            started: None,
        }
    }

    fn pids(list: &ProcessList) -> Vec<i32> {
        list.entries.iter().map(|entry| entry.row.pid.0).collect()
    }

    #[test]
    fn cpu_use_is_computed_between_two_replies() {
        let mut list = ProcessList::new(None, SortOrder::Cpu);
        list.update(vec![row(1, 5.0), row(2, 9.0)], Duration::from_secs(1));
        assert_eq!(list.entries[0].cpu, None);
        list.update(vec![row(1, 7.0), row(2, 9.5), row(3, 1.0)], Duration::from_secs(3));
        assert_eq!(pids(&list), [1, 2, 3]);
        assert_eq!(list.entries.iter().map(|e| e.cpu).collect::<Vec<_>>(), [Some(100.0), Some(25.0), None]);
        // The pid belongs to another process now.
        list.update(vec![row(1, 0.5)], Duration::from_secs(4));
        assert_eq!(list.entries[0].cpu, None);
    }

    #[test]
    fn selection_follows_the_process() {
        let mut list = ProcessList::new(None, SortOrder::Pid);
        list.update((1..=9).map(|pid| row(pid, f64::from(pid))).collect(), Duration::ZERO);
        list.move_selection(2, 4);
        assert_eq!((list.selected_entry().unwrap().row.pid.0, list.first_visible(4)), (3, 0));
        list.sort_by(SortOrder::Time);
        assert_eq!(pids(&list)[..3], [9, 8, 7]);
        assert_eq!((list.selected_entry().unwrap().row.pid.0, list.first_visible(4)), (3, 3));
        list.move_selection(isize::MAX, 4);
        assert_eq!((list.selected_entry().unwrap().row.pid.0, list.first_visible(4)), (1, 5));
        // The selected process is gone, so the first is selected.
        list.update(vec![row(4, 0.0), row(5, 0.0)], Duration::from_secs(1));
        assert_eq!(list.selected_entry().unwrap().row.pid.0, 4);
        list.update(Vec::new(), Duration::from_secs(2));
        assert_eq!((list.selected_entry(), list.first_visible(4)), (None, 0));
        list.move_selection(1, 4);
    }
}
