//! What a node knows of each other one: a row per node of the map, and the order of the newest.
//!
//! A simulation of 10,000 nodes holds 100 million rows, so they are small; and each message is made from the newest
//! few, so these are kept in order and the others are not.

use crate::dice::Dice;
use crate::payloads::Payloads;
use crate::view::Status;
use tern_ids::NodeId;

/// A row, by its place in the table. Places change when the map does.
pub(crate) type Place = u16;

/// Throws of the dice before the living are counted out instead.
const THROWS: usize = 64;

/// One other node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    /// When its entry was fresh, or when it was found dead; by this node's clock.
    pub(crate) born: i64,
    pub(crate) incarnation: u64,
    pub(crate) sequence: u32,
    pub(crate) node: NodeId,
    pub(crate) status: Status,
    /// The last message to it could not be sent.
    pub(crate) unreached: bool,
}

impl Row {
    /// Whether messages go to it as a rule. One that was never heard of is given a chance.
    fn addressed(&self) -> bool {
        match self.status {
            Status::Alive | Status::Suspect => true,
            Status::Unheard => !self.unreached,
            Status::Dead => false,
        }
    }

    /// Whether it has an entry to pass on.
    pub(crate) fn told(&self) -> bool {
        matches!(self.status, Status::Alive | Status::Suspect)
    }
}

/// All other nodes of the map.
#[derive(Debug)]
pub(crate) struct Table {
    /// In the order of their numbers.
    rows: Vec<Row>,
    payloads: Payloads,
    /// Places by number, as far as the highest; `ABSENT` for none.
    places: Vec<Place>,
    addressed: usize,
    told: usize,
    /// The newest entries, newest first: at most `window`, and fewer only if there are no more.
    /// With the time of each, so that ordering them reads no rows, which are seldom in the cache.
    newest: Vec<(i64, Place)>,
    window: usize,
    /// `newest` has to be made anew.
    stale: bool,
}

const ABSENT: Place = Place::MAX;

impl Table {
    /// A table of nobody, that keeps so many of the newest in order.
    pub(crate) fn new(window: usize) -> Self {
        Self {
            rows: Vec::new(),
            payloads: Payloads::default(),
            places: Vec::new(),
            addressed: 0,
            told: 0,
            newest: Vec::new(),
            window,
            stale: false,
        }
    }

    /// Has exactly these nodes from now on; what is known of those that stay is kept.
    pub(crate) fn set_nodes(&mut self, nodes: &[NodeId]) {
        let mut rows = Vec::with_capacity(nodes.len());
        let mut payloads = Payloads::default();
        let mut places = vec![ABSENT; nodes.iter().map(|node| usize::from(node.0) + 1).max().unwrap_or(0)];
        for &node in nodes {
            let old = self.find(node);
            let unheard = Row {
                born: i64::MIN,
                incarnation: 0,
                sequence: 0,
                node,
                status: Status::Unheard,
                unreached: false,
            };
            // At most 65,535 numbers other than ours, so that no place is ABSENT.
            places[usize::from(node.0)] = rows.len() as Place;
            rows.push(old.map_or(unheard, |place| *self.row(place)));
            payloads.push(old.map_or(&[], |place| self.payload(place)));
        }
        self.addressed = rows.iter().filter(|row| row.addressed()).count();
        self.told = rows.iter().filter(|row| row.told()).count();
        (self.rows, self.payloads, self.places, self.stale) = (rows, payloads, places, true);
    }

    pub(crate) fn find(&self, node: NodeId) -> Option<Place> {
        self.places.get(usize::from(node.0)).copied().filter(|place| *place != ABSENT)
    }

    pub(crate) fn row(&self, place: Place) -> &Row {
        &self.rows[usize::from(place)]
    }

    pub(crate) fn payload(&self, place: Place) -> &[u8] {
        self.payloads.get(usize::from(place))
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn places(&self) -> impl Iterator<Item = Place> + use<> {
        0..self.rows.len() as Place
    }

    /// How many nodes are addressed as a rule.
    pub(crate) fn addressed(&self) -> usize {
        self.addressed
    }

    /// Changes a row, but not when its entry was fresh.
    pub(crate) fn change(&mut self, place: Place, change: impl FnOnce(&mut Row)) {
        let row = &mut self.rows[usize::from(place)];
        let (addressed, told) = (row.addressed(), row.told());
        change(row);
        self.addressed = self.addressed + usize::from(row.addressed()) - usize::from(addressed);
        self.told = self.told + usize::from(row.told()) - usize::from(told);
        self.stale |= told && !row.told();
    }

    /// A newer entry.
    pub(crate) fn renew(&mut self, place: Place, row: Row, payload: &[u8]) {
        let older = row.born < self.row(place).born;
        self.change(place, |old| *old = row);
        self.payloads.set(usize::from(place), payload);
        if self.stale {
            return;
        }
        let at = self.newest.iter().position(|(_, other)| *other == place);
        if let Some(at) = at {
            self.newest.remove(at);
            // Newer by its number and older by its age, after a clock has jumped: perhaps another one should be here.
            self.stale |= older;
        }
        let at = self.newest.partition_point(|(born, _)| *born >= row.born);
        if at < self.window {
            self.newest.insert(at, (row.born, place));
            self.newest.truncate(self.window);
        }
    }

    /// The newest entries, newest first.
    pub(crate) fn newest(&self) -> impl Iterator<Item = Place> + '_ {
        self.newest.iter().map(|(_, place)| *place)
    }

    /// Makes [`Self::newest`] right again after somebody has died or left; otherwise it is.
    pub(crate) fn put_in_order(&mut self) {
        if self.stale {
            self.stale = false;
            let told = self.places().filter(|place| self.row(*place).told());
            let mut all: Vec<(i64, Place)> = told.map(|place| (self.row(place).born, place)).collect();
            let newest_first = |(born, _): &(i64, Place)| std::cmp::Reverse(*born);
            if all.len() > self.window {
                all.select_nth_unstable_by_key(self.window, newest_first);
                all.truncate(self.window);
            }
            all.sort_by_key(newest_first);
            self.newest = all;
        }
    }

    /// Any node.
    pub(crate) fn anyone(&self, dice: &mut Dice) -> Option<Place> {
        (!self.rows.is_empty()).then(|| dice.below(self.rows.len()) as Place)
    }

    /// One of those who are addressed as a rule and that are wanted, each as likely as the others.
    pub(crate) fn someone(&self, dice: &mut Dice, wanted: impl Fn(&Row) -> bool) -> Option<Place> {
        let fits = |place: Place| self.row(place).addressed() && wanted(self.row(place));
        if self.addressed == 0 {
            return None;
        }
        for _ in 0..THROWS {
            let place = dice.below(self.rows.len()) as Place;
            if fits(place) {
                return Some(place);
            }
        }
        let all: Vec<Place> = self.places().filter(|place| fits(*place)).collect();
        all.get(dice.below(all.len())).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(table: &mut Table, node: u16, born: i64) {
        let place = table.find(NodeId(node)).unwrap();
        let row = Row { born, status: Status::Alive, ..*table.row(place) };
        table.renew(place, row, &node.to_le_bytes());
    }

    fn newest(table: &mut Table) -> Vec<u16> {
        table.put_in_order();
        table.newest().map(|place| table.row(place).node.0).collect()
    }

    fn table(nodes: u16) -> Table {
        let mut table = Table::new(3);
        table.set_nodes(&(1..=nodes).map(NodeId).collect::<Vec<_>>());
        table
    }

    #[test]
    fn the_newest_stay_in_order() {
        let mut table = table(9);
        assert_eq!(newest(&mut table), [0u16; 0]);
        for (node, born) in [(4, 10), (5, 30), (6, 20), (7, 5), (8, 25), (4, 40)] {
            heard(&mut table, node, born);
        }
        assert_eq!(newest(&mut table), [4, 5, 8]);
        let place = table.find(NodeId(5)).unwrap();
        table.change(place, |row| row.status = Status::Dead);
        assert_eq!(newest(&mut table), [4, 8, 6]);
        heard(&mut table, 4, 1);
        assert_eq!(newest(&mut table), [8, 6, 7]);
    }

    #[test]
    fn the_order_is_that_of_sorting_whatever_happens() {
        let mut dice = Dice::new(5);
        let mut table = table(12);
        for _ in 0..20_000 {
            let node = 1 + dice.below(12) as u16;
            if dice.below(8) == 0 {
                let place = table.find(NodeId(node)).unwrap();
                table.change(place, |row| row.status = Status::Dead);
            } else {
                heard(&mut table, node, dice.below(1_000_000) as i64);
            }
            let mut born: Vec<i64> = table.rows.iter().filter(|row| row.told()).map(|row| row.born).collect();
            born.sort_unstable_by(|a, b| b.cmp(a));
            born.truncate(3);
            table.put_in_order();
            let kept: Vec<i64> = table.newest().map(|place| table.row(place).born).collect();
            assert_eq!(kept, born);
            assert_eq!(table.addressed, table.rows.iter().filter(|row| row.addressed()).count());
        }
    }

    #[test]
    fn who_stays_in_the_map_stays_known() {
        let mut table = table(4);
        heard(&mut table, 2, 10);
        heard(&mut table, 3, 20);
        table.set_nodes(&[NodeId(3), NodeId(600)]);
        assert_eq!(newest(&mut table), [3]);
        assert_eq!(table.payload(table.find(NodeId(3)).unwrap()), [3, 0]);
        assert!(table.find(NodeId(2)).is_none());
        assert_eq!(table.addressed(), 2);
    }

    #[test]
    fn someone_is_anyone_who_fits() {
        let mut table = table(1_000);
        for place in table.places() {
            table.change(place, |row| row.unreached = row.node.0 > 2);
        }
        let mut dice = Dice::new(2);
        let mut counts = [0; 2];
        for _ in 0..1_000 {
            let place = table.someone(&mut dice, |_| true).unwrap();
            counts[usize::from(place)] += 1;
        }
        assert!(counts.iter().all(|count| *count > 400), "{counts:?}");
        assert_eq!(table.someone(&mut dice, |row| row.node.0 > 2), None);
    }
}
