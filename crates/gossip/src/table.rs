//! The stored state of the other nodes: a row per node of the map, and the order of the newest
//! entries.
//!
//! A simulation of 10,000 nodes holds 100 million rows, so rows are small. Each message is made
//! from the few newest entries, so only these are kept sorted.

use crate::payloads::Payloads;
use crate::rng::Rng;
use crate::view::MemberStatus;
use tern_ids::NodeId;

/// Index of a row in the table. Indices change when the map does.
pub(crate) type RowIndex = u16;

/// Random draws before the matching rows are enumerated instead.
const MAX_DRAWS: usize = 64;

/// The state of one other node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    /// When its entry was fresh, or when it was found dead; by this node's clock.
    pub(crate) born: i64,
    pub(crate) incarnation: u64,
    pub(crate) sequence: u32,
    pub(crate) node: NodeId,
    pub(crate) status: MemberStatus,
    /// The last message to it could not be sent.
    pub(crate) is_unreachable: bool,
}

impl Row {
    /// Whether it is a regular target of messages. A node that was never seen is a target until a
    /// message to it fails.
    fn is_target(&self) -> bool {
        match self.status {
            MemberStatus::Alive | MemberStatus::Suspect => true,
            MemberStatus::NeverSeen => !self.is_unreachable,
            MemberStatus::Dead => false,
        }
    }

    /// Whether its entry is passed on.
    pub(crate) fn has_entry(&self) -> bool {
        matches!(self.status, MemberStatus::Alive | MemberStatus::Suspect)
    }
}

/// All other nodes of the map.
#[derive(Debug)]
pub(crate) struct Table {
    /// Sorted by node number.
    rows: Vec<Row>,
    payloads: Payloads,
    /// Row index by node number, up to the highest; `ABSENT` for none.
    index_by_node: Vec<RowIndex>,
    targets: usize,
    with_entry: usize,
    /// The newest entries, newest first: at most `window`, and fewer only if there are no more.
    /// Each is stored with its time, so that sorting reads no rows, which are seldom in the CPU
    /// cache.
    newest: Vec<(i64, RowIndex)>,
    window: usize,
    /// `newest` has to be rebuilt.
    is_stale: bool,
}

const ABSENT: RowIndex = RowIndex::MAX;

impl Table {
    /// An empty table that keeps the `window` newest entries sorted.
    pub(crate) fn new(window: usize) -> Self {
        Self {
            rows: Vec::new(),
            payloads: Payloads::default(),
            index_by_node: Vec::new(),
            targets: 0,
            with_entry: 0,
            newest: Vec::new(),
            window,
            is_stale: false,
        }
    }

    /// Sets the nodes; the rows of those that stay are kept.
    pub(crate) fn set_nodes(&mut self, nodes: &[NodeId]) {
        let mut rows = Vec::with_capacity(nodes.len());
        let mut payloads = Payloads::default();
        let mut index_by_node =
            vec![ABSENT; nodes.iter().map(|node| usize::from(node.0) + 1).max().unwrap_or(0)];
        for &node in nodes {
            let old = self.find(node);
            let never_seen = Row {
                born: i64::MIN,
                incarnation: 0,
                sequence: 0,
                node,
                status: MemberStatus::NeverSeen,
                is_unreachable: false,
            };
            // At most 65,535 numbers other than ours, so no index is ABSENT.
            index_by_node[usize::from(node.0)] = rows.len() as RowIndex;
            rows.push(old.map_or(never_seen, |index| *self.row(index)));
            payloads.push(old.map_or(&[], |index| self.payload(index)));
        }
        self.targets = rows.iter().filter(|row| row.is_target()).count();
        self.with_entry = rows.iter().filter(|row| row.has_entry()).count();
        (self.rows, self.payloads, self.index_by_node, self.is_stale) = (rows, payloads, index_by_node, true);
    }

    pub(crate) fn find(&self, node: NodeId) -> Option<RowIndex> {
        self.index_by_node.get(usize::from(node.0)).copied().filter(|index| *index != ABSENT)
    }

    pub(crate) fn row(&self, index: RowIndex) -> &Row {
        &self.rows[usize::from(index)]
    }

    pub(crate) fn payload(&self, index: RowIndex) -> &[u8] {
        self.payloads.get(usize::from(index))
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn indices(&self) -> impl Iterator<Item = RowIndex> + use<> {
        0..self.rows.len() as RowIndex
    }

    /// The number of regular targets.
    pub(crate) fn targets(&self) -> usize {
        self.targets
    }

    /// Changes a row, except for the time of its entry.
    pub(crate) fn change(&mut self, index: RowIndex, change: impl FnOnce(&mut Row)) {
        let row = &mut self.rows[usize::from(index)];
        let (targets, with_entry) = (row.is_target(), row.has_entry());
        change(row);
        self.targets = self.targets + usize::from(row.is_target()) - usize::from(targets);
        self.with_entry = self.with_entry + usize::from(row.has_entry()) - usize::from(with_entry);
        self.is_stale |= with_entry && !row.has_entry();
    }

    /// Stores a newer entry.
    pub(crate) fn replace_entry(&mut self, index: RowIndex, row: Row, payload: &[u8]) {
        let older = row.born < self.row(index).born;
        self.change(index, |old| *old = row);
        self.payloads.set(usize::from(index), payload);
        if self.is_stale {
            return;
        }
        let at = self.newest.iter().position(|(_, other)| *other == index);
        if let Some(at) = at {
            self.newest.remove(at);
            // After a clock jump an entry can be newer by its number and older by its age: another
            // entry may belong among the newest instead.
            self.is_stale |= older;
        }
        let at = self.newest.partition_point(|(born, _)| *born >= row.born);
        if at < self.window {
            self.newest.insert(at, (row.born, index));
            self.newest.truncate(self.window);
        }
    }

    /// The newest entries, newest first.
    pub(crate) fn newest(&self) -> impl Iterator<Item = RowIndex> + '_ {
        self.newest.iter().map(|(_, index)| *index)
    }

    /// Rebuilds [`Self::newest`] if a node has died or left since.
    pub(crate) fn rebuild_newest(&mut self) {
        if self.is_stale {
            self.is_stale = false;
            let with_entry = self.indices().filter(|index| self.row(*index).has_entry());
            let mut all: Vec<(i64, RowIndex)> =
                with_entry.map(|index| (self.row(index).born, index)).collect();
            let newest_first = |(born, _): &(i64, RowIndex)| std::cmp::Reverse(*born);
            if all.len() > self.window {
                all.select_nth_unstable_by_key(self.window, newest_first);
                all.truncate(self.window);
            }
            all.sort_by_key(newest_first);
            self.newest = all;
        }
    }

    /// A random row.
    pub(crate) fn random_row(&self, rng: &mut Rng) -> Option<RowIndex> {
        (!self.rows.is_empty()).then(|| rng.below(self.rows.len()) as RowIndex)
    }

    /// A random regular target for which `wanted` holds, each with the same probability.
    pub(crate) fn random_target(&self, rng: &mut Rng, wanted: impl Fn(&Row) -> bool) -> Option<RowIndex> {
        let fits = |index: RowIndex| self.row(index).is_target() && wanted(self.row(index));
        if self.targets == 0 {
            return None;
        }
        for _ in 0..MAX_DRAWS {
            let index = rng.below(self.rows.len()) as RowIndex;
            if fits(index) {
                return Some(index);
            }
        }
        let all: Vec<RowIndex> = self.indices().filter(|index| fits(*index)).collect();
        all.get(rng.below(all.len())).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(table: &mut Table, node: u16, born: i64) {
        let index = table.find(NodeId(node)).unwrap();
        let row = Row { born, status: MemberStatus::Alive, ..*table.row(index) };
        table.replace_entry(index, row, &node.to_le_bytes());
    }

    fn newest(table: &mut Table) -> Vec<u16> {
        table.rebuild_newest();
        table.newest().map(|index| table.row(index).node.0).collect()
    }

    fn table(nodes: u16) -> Table {
        let mut table = Table::new(3);
        table.set_nodes(&(1..=nodes).map(NodeId).collect::<Vec<_>>());
        table
    }

    #[test]
    fn newest_entries_stay_sorted() {
        let mut table = table(9);
        assert_eq!(newest(&mut table), [0u16; 0]);
        for (node, born) in [(4, 10), (5, 30), (6, 20), (7, 5), (8, 25), (4, 40)] {
            store(&mut table, node, born);
        }
        assert_eq!(newest(&mut table), [4, 5, 8]);
        let index = table.find(NodeId(5)).unwrap();
        table.change(index, |row| row.status = MemberStatus::Dead);
        assert_eq!(newest(&mut table), [4, 8, 6]);
        store(&mut table, 4, 1);
        assert_eq!(newest(&mut table), [8, 6, 7]);
    }

    #[test]
    fn newest_entries_match_a_full_sort() {
        let mut rng = Rng::new(5);
        let mut table = table(12);
        for _ in 0..20_000 {
            let node = 1 + rng.below(12) as u16;
            if rng.below(8) == 0 {
                let index = table.find(NodeId(node)).unwrap();
                table.change(index, |row| row.status = MemberStatus::Dead);
            } else {
                store(&mut table, node, rng.below(1_000_000) as i64);
            }
            let mut born: Vec<i64> =
                table.rows.iter().filter(|row| row.has_entry()).map(|row| row.born).collect();
            born.sort_unstable_by(|a, b| b.cmp(a));
            born.truncate(3);
            table.rebuild_newest();
            let kept: Vec<i64> = table.newest().map(|index| table.row(index).born).collect();
            assert_eq!(kept, born);
            assert_eq!(table.targets, table.rows.iter().filter(|row| row.is_target()).count());
        }
    }

    #[test]
    fn nodes_that_stay_in_the_map_keep_their_rows() {
        let mut table = table(4);
        store(&mut table, 2, 10);
        store(&mut table, 3, 20);
        table.set_nodes(&[NodeId(3), NodeId(600)]);
        assert_eq!(newest(&mut table), [3]);
        assert_eq!(table.payload(table.find(NodeId(3)).unwrap()), [3, 0]);
        assert!(table.find(NodeId(2)).is_none());
        assert_eq!(table.targets(), 2);
    }

    #[test]
    fn random_target_is_uniform_over_matching_rows() {
        let mut table = table(1_000);
        for index in table.indices() {
            table.change(index, |row| row.is_unreachable = row.node.0 > 2);
        }
        let mut rng = Rng::new(2);
        let mut counts = [0; 2];
        for _ in 0..1_000 {
            let index = table.random_target(&mut rng, |_| true).unwrap();
            counts[usize::from(index)] += 1;
        }
        assert!(counts.iter().all(|count| *count > 400), "{counts:?}");
        assert_eq!(table.random_target(&mut rng, |row| row.node.0 > 2), None);
    }
}
