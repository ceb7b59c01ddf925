//! The processes of one node, how much CPU each uses, and which one the arrows are on.

use std::cmp::Ordering;
use std::time::Duration;
use tern_control::ProcessRow;
use tern_ids::{HomePid, NodeId};

/// What a list is sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// Whoever uses most CPU first.
    #[default]
    Cpu,
    /// Whoever has used most CPU time first.
    Time,
    /// By number.
    Pid,
}

/// A process in the cluster: pids are those of its home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Its home, if that is another node than the list's.
    pub from: Option<NodeId>,
    /// Its pid there.
    pub pid: HomePid,
}

/// A line of the list.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// What the node says of it.
    pub row: ProcessRow,
    /// Percent of one CPU between the last two answers; nothing is known before there are two.
    pub cpu: Option<f64>,
}

impl Entry {
    /// Which process this is.
    #[must_use]
    pub fn key(&self) -> Key {
        Key { from: self.row.from, pid: self.row.pid }
    }
}

/// The processes of one node.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct List {
    /// Of which; `None` is the one that we are on.
    pub of: Option<NodeId>,
    /// Sorted.
    pub entries: Vec<Entry>,
    /// What by.
    pub order: Order,
    /// The one that the arrows are on.
    pub chosen: Option<Key>,
    /// The first line shown.
    pub top: usize,
    /// Whether the node has ever answered.
    pub heard: Option<Duration>,
    /// When the question was asked that is not answered yet.
    pub asked: Option<Duration>,
    /// When a question was last asked.
    pub last_asked: Option<Duration>,
}

impl List {
    /// A list that is still to be asked for.
    #[must_use]
    pub fn new(of: Option<NodeId>, order: Order) -> Self {
        Self { of, order, ..Self::default() }
    }

    /// The node's answer, which came at `now`.
    pub fn take(&mut self, rows: Vec<ProcessRow>, now: Duration) {
        let passed = self.heard.map(|before| now.saturating_sub(before).as_secs_f64());
        let entries = rows.into_iter().map(|row| {
            let key = Key { from: row.from, pid: row.pid };
            let before = self.entries.iter().find(|entry| entry.key() == key);
            let cpu = match (before, passed) {
                // The pid may be another process's by now: less time than before is no use of CPU.
                (Some(before), Some(passed)) if passed > 0.0 && row.cpu_seconds >= before.row.cpu_seconds => {
                    Some((row.cpu_seconds - before.row.cpu_seconds) / passed * 100.0)
                }
                _ => None,
            };
            Entry { row, cpu }
        });
        self.entries = entries.collect();
        self.heard = Some(now);
        self.sort();
    }

    /// Sorts it another way.
    pub fn sort_by(&mut self, order: Order) {
        self.order = order;
        self.sort();
        self.top = 0;
    }

    fn sort(&mut self) {
        let key = |entry: &Entry| match self.order {
            Order::Cpu => entry.cpu.unwrap_or(0.0),
            Order::Time => entry.row.cpu_seconds,
            Order::Pid => 0.0,
        };
        self.entries.sort_by(|a, b| {
            key(b).partial_cmp(&key(a)).unwrap_or(Ordering::Equal).then_with(|| {
                let number = |entry: &Entry| (entry.row.pid, entry.row.from);
                number(a).cmp(&number(b))
            })
        });
        if !self.entries.iter().any(|entry| Some(entry.key()) == self.chosen) {
            self.chosen = None;
        }
    }

    /// The process that the arrows are on, or else the first.
    #[must_use]
    pub fn chosen(&self) -> Option<&Entry> {
        self.entries.get(self.place())
    }

    /// Where that is.
    #[must_use]
    pub fn place(&self) -> usize {
        self.entries.iter().position(|entry| Some(entry.key()) == self.chosen).unwrap_or(0)
    }

    /// Moves the arrows by so many lines, and the window of `height` lines with them.
    pub fn step(&mut self, by: isize, height: usize) {
        let last = self.entries.len().saturating_sub(1);
        let place = self.place().saturating_add_signed(by).min(last);
        self.chosen = self.entries.get(place).map(Entry::key);
        let height = height.max(1);
        self.top = self.top.clamp((place + 1).saturating_sub(height), place);
    }

    /// The first line shown when there is room for `height`, the chosen one among them.
    #[must_use]
    pub fn window(&self, height: usize) -> usize {
        let place = self.place();
        self.top.clamp((place + 1).saturating_sub(height.max(1)), place)
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

    fn pids(list: &List) -> Vec<i32> {
        list.entries.iter().map(|entry| entry.row.pid.0).collect()
    }

    #[test]
    fn the_use_of_cpu_is_that_between_two_answers() {
        let mut list = List::new(None, Order::Cpu);
        list.take(vec![row(1, 5.0), row(2, 9.0)], Duration::from_secs(1));
        assert_eq!(list.entries[0].cpu, None);
        list.take(vec![row(1, 7.0), row(2, 9.5), row(3, 1.0)], Duration::from_secs(3));
        assert_eq!(pids(&list), [1, 2, 3]);
        assert_eq!(list.entries.iter().map(|e| e.cpu).collect::<Vec<_>>(), [Some(100.0), Some(25.0), None]);
        // The pid has been given to another process.
        list.take(vec![row(1, 0.5)], Duration::from_secs(4));
        assert_eq!(list.entries[0].cpu, None);
    }

    #[test]
    fn what_is_chosen_stays_chosen_wherever_it_goes() {
        let mut list = List::new(None, Order::Pid);
        list.take((1..=9).map(|pid| row(pid, f64::from(pid))).collect(), Duration::ZERO);
        list.step(2, 4);
        assert_eq!((list.chosen().unwrap().row.pid.0, list.window(4)), (3, 0));
        list.sort_by(Order::Time);
        assert_eq!(pids(&list)[..3], [9, 8, 7]);
        assert_eq!((list.chosen().unwrap().row.pid.0, list.window(4)), (3, 3));
        list.step(isize::MAX, 4);
        assert_eq!((list.chosen().unwrap().row.pid.0, list.window(4)), (1, 5));
        // It is gone, and the first is meant.
        list.take(vec![row(4, 0.0), row(5, 0.0)], Duration::from_secs(1));
        assert_eq!(list.chosen().unwrap().row.pid.0, 4);
        list.take(Vec::new(), Duration::from_secs(2));
        assert_eq!((list.chosen(), list.window(4)), (None, 0));
        list.step(1, 4);
    }
}
