//! What a process does on files of other nodes: what home asks these nodes for, as the mounted trees tell, and what it does
//! itself while it runs on the node of the files, as that node's kernel counts (docs/design/balancing.md).

use crate::traffic::Sum;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use tern_balancer::{Decay, Decayed, Traffic};
use tern_ids::NodeId;

/// Bytes of a round trip, of one that was not seen to make any: the most that one carries.
pub(super) const TRIP: f64 = 131_072.0;

/// Who has come to the node of its files may need so long until it has them open itself.
const SETTLES_MS: u64 = 5_000;

/// What is less than this (bytes a second) is forgotten.
const NOTHING: f64 = 1.0;

/// A while in the life of a process.
#[derive(Debug, Clone, Copy)]
pub(super) struct While {
    pub(super) seconds: f64,
    /// Calls that home has made for it, and bytes of these, or what it has done itself at home.
    pub(super) calls: f64,
    pub(super) bytes: f64,
    /// Away: where, for how long, and how many bytes of that node's own files it has read and written there itself.
    pub(super) away: Option<(NodeId, u64, f64)>,
}

/// Of one process.
#[derive(Debug, Clone, Default)]
pub(super) struct OnFiles {
    rates: BTreeMap<NodeId, (Decayed, Decayed)>,
    /// What trees have told and is not in the rates yet: they tell it at other times than the kernel counts it.
    heard: BTreeMap<NodeId, Sum>,
    /// It was there, and had to read and write that node's files through home all the same. They draw it no more.
    distant: BTreeSet<NodeId>,
}

impl OnFiles {
    /// A tree tells.
    pub(super) fn hear(&mut self, told: &HashMap<NodeId, Sum>) {
        for (node, sum) in told.iter().filter(|(node, _)| !self.distant.contains(node)) {
            let heard = self.heard.entry(*node).or_default();
            (heard.calls, heard.bytes) = (heard.calls + sum.calls, heard.bytes + sum.bytes);
        }
    }

    /// It runs elsewhere now.
    pub(super) fn moved(&mut self) {
        self.heard.clear();
    }

    /// Takes such a while into its rates; gives the calls and bytes that are left, which are on files of home, or on none.
    pub(super) fn count(&mut self, now: While, decay: Decay) -> (f64, f64) {
        let mut left = now.bytes;
        for node in self.nodes(now.away.map(|(at, ..)| at)) {
            let through_home = self.through_home(node, now.bytes, left);
            let sum = match now.away {
                Some((at, since_ms, near)) if at == node => {
                    if near < through_home.bytes && since_ms > SETTLES_MS {
                        self.distant.insert(node);
                    }
                    Sum { calls: near * self.trips_per_byte(node), bytes: near }
                }
                _ => {
                    left -= through_home.bytes;
                    through_home
                }
            };
            let (calls, bytes) = self.rates.entry(node).or_default();
            calls.add(sum.calls / now.seconds, decay);
            bytes.add(sum.bytes / now.seconds, decay);
        }
        self.rates.retain(|node, (_, bytes)| bytes.rate() >= NOTHING && !self.distant.contains(node));
        self.heard.retain(|_, sum| sum.bytes >= NOTHING);
        (if now.bytes > 0.0 { now.calls * left / now.bytes } else { now.calls }, left)
    }

    /// The nodes on whose files it works.
    pub(super) fn rates(&self) -> BTreeMap<NodeId, Traffic> {
        let traffic = |(calls, bytes): &(Decayed, Decayed)| Traffic {
            calls_per_s: calls.rate(),
            bytes_per_s: bytes.rate(),
        };
        self.rates.iter().map(|(node, both)| (*node, traffic(both))).collect()
    }

    fn nodes(&self, at: Option<NodeId>) -> BTreeSet<NodeId> {
        let all = self.rates.keys().chain(self.heard.keys()).copied().chain(at);
        all.filter(|node| !self.distant.contains(node)).collect()
    }

    /// What of the bytes in this while home has asked a node for. More than it has read and written is what the kernel has
    /// read ahead, or for a mapping, of which it would have nothing there; and some of it may have been read in the while
    /// before, or be read in the next one.
    fn through_home(&mut self, node: NodeId, bytes: f64, left: f64) -> Sum {
        let Some(heard) = self.heard.get_mut(&node).filter(|heard| heard.bytes > 0.0) else {
            return Sum::default();
        };
        let part = (left / heard.bytes).clamp(0.0, 1.0);
        let taken = Sum { calls: heard.calls * part, bytes: heard.bytes * part };
        let kept = (bytes / heard.bytes).clamp(0.0, 1.0 - part);
        *heard = Sum { calls: heard.calls * kept, bytes: heard.bytes * kept };
        taken
    }

    /// As many as it was seen to make elsewhere.
    fn trips_per_byte(&self, node: NodeId) -> f64 {
        let seen = self.rates.get(&node).map(|(calls, bytes)| (calls.rate(), bytes.rate()));
        seen.filter(|(_, bytes)| *bytes > 0.0).map_or(1.0 / TRIP, |(calls, bytes)| calls / bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: NodeId = NodeId(2);

    fn told(calls: f64, bytes: f64) -> HashMap<NodeId, Sum> {
        HashMap::from([(TWO, Sum { calls, bytes })])
    }

    fn second(calls: f64, bytes: f64, away: Option<(NodeId, u64, f64)>) -> While {
        While { seconds: 1.0, calls, bytes, away }
    }

    fn is_about(got: f64, wanted: f64) -> bool {
        (got - wanted).abs() <= wanted * 0.02
    }

    #[test]
    fn what_is_read_of_another_node_is_told_from_what_is_home() {
        let mut on = OnFiles::default();
        // A tree tells each second, but the look is now before, now after that.
        let mut own = (Decayed::default(), Decayed::default());
        for at in 0..200 {
            match at % 4 {
                0 => {}
                3 => on.hear(&told(40.0, 6e6)),
                _ => on.hear(&told(20.0, 3e6)),
            }
            let left = on.count(second(400.0, 4e6, None), Decay::Slow);
            own.0.add(left.0, Decay::Slow);
            own.1.add(left.1, Decay::Slow);
        }
        let rate = on.rates()[&TWO];
        assert!((2.6e6..3.1e6).contains(&rate.bytes_per_s), "{rate:?}");
        assert!(is_about(rate.bytes_per_s / rate.calls_per_s, 150e3), "{rate:?}");
        assert!((0.9e6..1.4e6).contains(&own.1.rate()), "{own:?}");
        assert!(is_about(own.1.rate() / own.0.rate(), 1e4), "{own:?}");
    }

    #[test]
    fn pages_of_a_mapping_draw_nobody() {
        let mut on = OnFiles::default();
        for _ in 0..20 {
            on.hear(&told(1_000.0, 100e6));
            assert_eq!(on.count(second(10.0, 0.0, None), Decay::Slow), (10.0, 0.0));
        }
        assert_eq!(on.rates(), BTreeMap::new());
    }

    #[test]
    fn on_the_node_of_its_files_what_it_does_itself_counts_and_fades_when_it_ends() {
        let mut on = OnFiles::default();
        on.hear(&told(100.0, 1e6));
        assert_eq!(on.count(second(300.0, 1e6, None), Decay::Fast), (0.0, 0.0));
        on.moved();
        // It calls home for other things.
        for at in 0..100 {
            let away = Some((TWO, at * 1_000, 5e6));
            assert_eq!(on.count(second(7.0, 70.0, away), Decay::Fast), (7.0, 70.0));
        }
        let rate = on.rates()[&TWO];
        assert!(is_about(rate.bytes_per_s, 5e6) && is_about(rate.calls_per_s, 500.0), "{rate:?}");
        for _ in 0..400 {
            on.count(second(0.0, 0.0, Some((TWO, 1 << 20, 0.0))), Decay::Fast);
        }
        assert_eq!(on.rates(), BTreeMap::new());
    }

    #[test]
    fn files_that_it_could_not_open_itself_draw_it_no_more() {
        let mut on = OnFiles::default();
        on.hear(&told(100.0, 1e6));
        on.count(second(300.0, 1e6, None), Decay::Fast);
        on.moved();
        let through_home = |on: &mut OnFiles, since_ms| {
            on.hear(&told(100.0, 1e6));
            on.count(second(100.0, 1e6, Some((TWO, since_ms, 0.0))), Decay::Fast)
        };
        // Home makes these calls.
        assert_eq!(through_home(&mut on, 2_000), (100.0, 1e6));
        assert!(on.rates().contains_key(&TWO), "it may have them open itself soon");
        assert_eq!(through_home(&mut on, 6_000), (100.0, 1e6));
        on.moved();
        on.hear(&told(100.0, 1e6));
        assert_eq!(on.count(second(300.0, 1e6, None), Decay::Fast), (300.0, 1e6));
        assert_eq!(on.rates(), BTreeMap::new());
    }
}
