//! How long a process waits for calls made at home and for files of other nodes, for each second of
//! its own work.
//!
//! Home performs the process's calls. For files of a third node, home sends requests to that node.
//! So an access to such files waits for no round trip if the process runs on the node of the files,
//! for one if it runs at home, and for two if it runs on any other node.

use crate::effective_view::EffectiveView;
use crate::process::{ProcessSnapshot, Traffic};
use crate::view::NodeSnapshot;
use tern_ids::NodeId;

/// The calls that a process waits for, for each second of its own work.
#[derive(Debug)]
pub(crate) struct RemoteWaits {
    /// Calls that home performs by itself.
    calls: Traffic,
    /// Calls on files of these nodes.
    files: Vec<(NodeId, Traffic)>,
}

impl RemoteWaits {
    /// The waits of a process that does `work` standard CPU seconds of work a second.
    pub(crate) fn of(process: &ProcessSnapshot, work: f64) -> Self {
        let per_work = |rate: f64| if rate.is_finite() { rate.clamp(0.0, 1e12) / work } else { 0.0 };
        let traffic = |each: &Traffic| Traffic {
            calls_per_s: per_work(each.calls_per_s),
            bytes_per_s: per_work(each.bytes_per_s),
        };
        let calls = Traffic { calls_per_s: process.calls_per_s, bytes_per_s: process.bytes_per_s };
        let files = process.files.iter().map(|(node, each)| (*node, traffic(each)));
        Self { calls: traffic(&calls), files: files.collect() }
    }

    /// For a process whose calls are ignored.
    pub(crate) fn none() -> Self {
        Self { calls: Traffic::default(), files: Vec::new() }
    }

    /// Seconds of waiting if it runs on this node.
    pub(crate) fn wait(&self, view: &EffectiveView<'_>, on: &NodeSnapshot) -> f64 {
        let reach = |node: &NodeSnapshot, traffic: &Traffic| {
            if node.id == view.cluster.me() {
                return 0.0;
            }
            let call = f64::from(node.link.rtt_us) * 1e-6 + view.policy.per_call_s;
            traffic.calls_per_s * call + traffic.bytes_per_s / node.link.bytes_per_s as f64
        };
        let elsewhere = self.files.iter().filter(|(node, _)| *node != on.id);
        let files = elsewhere.filter_map(|(node, traffic)| {
            // The cost of reaching a node that is not in the view is unknown.
            Some(reach(view.cluster.node(*node)?, traffic) + reach(on, traffic))
        });
        reach(on, &self.calls) + files.sum::<f64>()
    }

    /// Scales the traffic that it waits for on its current node by the ratio of observed to
    /// estimated waiting. The estimate is assumed to be wrong by the same factor on other nodes.
    pub(crate) fn scale(&mut self, view: &EffectiveView<'_>, at: NodeId, part: f64) {
        let away = at != view.cluster.me();
        let waited_for = self.files.iter_mut().filter(|(node, _)| *node != at).map(|(_, traffic)| traffic);
        for traffic in waited_for.chain(away.then_some(&mut self.calls)) {
            traffic.calls_per_s *= part;
            traffic.bytes_per_s *= part;
        }
    }

    /// Whether it uses files of a node.
    pub(crate) fn has_files_on(&self, node: NodeId) -> bool {
        self.files.iter().any(|(on, traffic)| *on == node && traffic.bytes_per_s > 0.0)
    }

    /// The nodes whose files it uses.
    pub(crate) fn files_on(&self) -> impl Iterator<Item = NodeId> {
        self.files.iter().map(|(node, _)| *node)
    }
}
