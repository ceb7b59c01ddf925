//! Traffic of a process on files of other nodes (docs/design/balancing.md): its requests through
//! home, which the mounted MFS trees report, and its own I/O while it runs on the node that has the
//! files, which that node's kernel counts.

use crate::balance::file_traffic::TrafficSum;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use tern_balancer::{Decay, DecayingRate, Traffic};
use tern_ids::NodeId;

/// The most bytes that one round trip carries. Assumed for a process of which no round trips were
/// observed.
pub(super) const BYTES_PER_ROUND_TRIP: f64 = 131_072.0;

/// A process that arrives at the node of its files may need this long, in milliseconds, to have
/// them open there.
const OPEN_DELAY_MS: u64 = 5_000;

/// A lower rate, in bytes per second, is dropped.
const MIN_BYTES_PER_S: f64 = 1.0;

/// The activity of a process in one interval.
#[derive(Debug, Clone, Copy)]
pub(super) struct Interval {
    pub(super) seconds: f64,
    /// The number and bytes of the calls that home has made for it, or that it has made at home.
    pub(super) calls: f64,
    pub(super) bytes: f64,
    /// While away: the node, how long it has been there in milliseconds, and the bytes of that
    /// node's own files that it has read and written there directly.
    pub(super) away: Option<(NodeId, u64, f64)>,
}

/// The remote file traffic of one process.
#[derive(Debug, Clone, Default)]
pub(super) struct RemoteFileUse {
    rates: BTreeMap<NodeId, (DecayingRate, DecayingRate)>,
    /// Reported by the trees and not yet in the rates: reports and counters arrive at different
    /// times.
    reported: BTreeMap<NodeId, TrafficSum>,
    /// Nodes on which the process has run while its I/O on the node's own files still went through
    /// home. Files of these nodes do not attract the process any more.
    opened_through_home: BTreeSet<NodeId>,
}

impl RemoteFileUse {
    /// Adds the reports of a tree.
    pub(super) fn add_report(&mut self, report: &HashMap<NodeId, TrafficSum>) {
        for (node, sum) in report.iter().filter(|(node, _)| !self.opened_through_home.contains(node)) {
            let reported = self.reported.entry(*node).or_default();
            (reported.calls, reported.bytes) = (reported.calls + sum.calls, reported.bytes + sum.bytes);
        }
    }

    /// The process has moved to another node; drops the pending reports.
    pub(super) fn clear_reports(&mut self) {
        self.reported.clear();
    }

    /// Adds an interval to the rates. Returns the remaining calls and bytes, which concern files of
    /// home or no files.
    pub(super) fn add_interval(&mut self, now: Interval, decay: Decay) -> (f64, f64) {
        let mut left = now.bytes;
        for node in self.nodes(now.away.map(|(at, ..)| at)) {
            let through_home = self.take_reported(node, now.bytes, left);
            let sum = match now.away {
                Some((at, since_ms, local_bytes)) if at == node => {
                    if local_bytes < through_home.bytes && since_ms > OPEN_DELAY_MS {
                        self.opened_through_home.insert(node);
                    }
                    TrafficSum { calls: local_bytes * self.round_trips_per_byte(node), bytes: local_bytes }
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
        self.rates.retain(|node, (_, bytes)| {
            bytes.rate() >= MIN_BYTES_PER_S && !self.opened_through_home.contains(node)
        });
        self.reported.retain(|_, sum| sum.bytes >= MIN_BYTES_PER_S);
        (if now.bytes > 0.0 { now.calls * left / now.bytes } else { now.calls }, left)
    }

    /// The traffic by node.
    pub(super) fn rates(&self) -> BTreeMap<NodeId, Traffic> {
        let traffic = |(calls, bytes): &(DecayingRate, DecayingRate)| Traffic {
            calls_per_s: calls.rate(),
            bytes_per_s: bytes.rate(),
        };
        self.rates.iter().map(|(node, both)| (*node, traffic(both))).collect()
    }

    fn nodes(&self, at: Option<NodeId>) -> BTreeSet<NodeId> {
        let all = self.rates.keys().chain(self.reported.keys()).copied().chain(at);
        all.filter(|node| !self.opened_through_home.contains(node)).collect()
    }

    /// Takes from the reports about a node at most `left` bytes: the bytes of this interval that
    /// are not attributed to other nodes. Keeps at most `bytes`, the bytes of the whole interval,
    /// since some reports belong to the interval before or after this one. Drops the rest, which is
    /// read-ahead or pages of a mapping: these would not be local on that node.
    fn take_reported(&mut self, node: NodeId, bytes: f64, left: f64) -> TrafficSum {
        let Some(reported) = self.reported.get_mut(&node).filter(|reported| reported.bytes > 0.0) else {
            return TrafficSum::default();
        };
        let part = (left / reported.bytes).clamp(0.0, 1.0);
        let taken = TrafficSum { calls: reported.calls * part, bytes: reported.bytes * part };
        let kept = (bytes / reported.bytes).clamp(0.0, 1.0 - part);
        *reported = TrafficSum { calls: reported.calls * kept, bytes: reported.bytes * kept };
        taken
    }

    /// Round trips per byte, as observed while it ran elsewhere.
    fn round_trips_per_byte(&self, node: NodeId) -> f64 {
        let seen = self.rates.get(&node).map(|(calls, bytes)| (calls.rate(), bytes.rate()));
        seen.filter(|(_, bytes)| *bytes > 0.0)
            .map_or(1.0 / BYTES_PER_ROUND_TRIP, |(calls, bytes)| calls / bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: NodeId = NodeId(2);

    fn report(calls: f64, bytes: f64) -> HashMap<NodeId, TrafficSum> {
        HashMap::from([(TWO, TrafficSum { calls, bytes })])
    }

    fn second(calls: f64, bytes: f64, away: Option<(NodeId, u64, f64)>) -> Interval {
        Interval { seconds: 1.0, calls, bytes, away }
    }

    fn is_about(got: f64, wanted: f64) -> bool {
        (got - wanted).abs() <= wanted * 0.02
    }

    #[test]
    fn remote_reads_are_separated_from_home_reads() {
        let mut on = RemoteFileUse::default();
        // A tree reports each second, sometimes before and sometimes after the scan.
        let mut own = (DecayingRate::default(), DecayingRate::default());
        for at in 0..200 {
            match at % 4 {
                0 => {}
                3 => on.add_report(&report(40.0, 6e6)),
                _ => on.add_report(&report(20.0, 3e6)),
            }
            let left = on.add_interval(second(400.0, 4e6, None), Decay::Slow);
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
    fn mapped_pages_do_not_attract() {
        let mut on = RemoteFileUse::default();
        for _ in 0..20 {
            on.add_report(&report(1_000.0, 100e6));
            assert_eq!(on.add_interval(second(10.0, 0.0, None), Decay::Slow), (10.0, 0.0));
        }
        assert_eq!(on.rates(), BTreeMap::new());
    }

    #[test]
    fn local_io_on_the_file_node_counts_and_decays() {
        let mut on = RemoteFileUse::default();
        on.add_report(&report(100.0, 1e6));
        assert_eq!(on.add_interval(second(300.0, 1e6, None), Decay::Fast), (0.0, 0.0));
        on.clear_reports();
        // Its calls to home concern other things.
        for at in 0..100 {
            let away = Some((TWO, at * 1_000, 5e6));
            assert_eq!(on.add_interval(second(7.0, 70.0, away), Decay::Fast), (7.0, 70.0));
        }
        let rate = on.rates()[&TWO];
        assert!(is_about(rate.bytes_per_s, 5e6) && is_about(rate.calls_per_s, 500.0), "{rate:?}");
        for _ in 0..400 {
            on.add_interval(second(0.0, 0.0, Some((TWO, 1 << 20, 0.0))), Decay::Fast);
        }
        assert_eq!(on.rates(), BTreeMap::new());
    }

    #[test]
    fn files_opened_through_home_stop_attracting() {
        let mut on = RemoteFileUse::default();
        on.add_report(&report(100.0, 1e6));
        on.add_interval(second(300.0, 1e6, None), Decay::Fast);
        on.clear_reports();
        let through_home = |on: &mut RemoteFileUse, since_ms| {
            on.add_report(&report(100.0, 1e6));
            on.add_interval(second(100.0, 1e6, Some((TWO, since_ms, 0.0))), Decay::Fast)
        };
        // Home makes these calls.
        assert_eq!(through_home(&mut on, 2_000), (100.0, 1e6));
        assert!(on.rates().contains_key(&TWO), "it may open them locally soon");
        assert_eq!(through_home(&mut on, 6_000), (100.0, 1e6));
        on.clear_reports();
        on.add_report(&report(100.0, 1e6));
        assert_eq!(on.add_interval(second(300.0, 1e6, None), Decay::Fast), (300.0, 1e6));
        assert_eq!(on.rates(), BTreeMap::new());
    }
}
