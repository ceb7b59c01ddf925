//! What a process waits for because it is made elsewhere than where it runs, for each second of work.
//!
//! Home makes its calls. What it does on files of a third node home asks that one for; so it is not waited for where the
//! files are, once at home, and twice elsewhere.

use crate::ground::Ground;
use crate::process::{Process, Traffic};
use crate::view::Node;
use tern_ids::NodeId;

/// For each second of work.
#[derive(Debug)]
pub(crate) struct Talk {
    /// What home makes by itself.
    calls: Traffic,
    /// What is on files of these nodes.
    files: Vec<(NodeId, Traffic)>,
}

impl Talk {
    /// Of a process that does so much work a second.
    pub(crate) fn of(process: &Process, work: f64) -> Self {
        let per_work = |rate: f64| if rate.is_finite() { rate.clamp(0.0, 1e12) / work } else { 0.0 };
        let traffic = |each: &Traffic| Traffic {
            calls_per_s: per_work(each.calls_per_s),
            bytes_per_s: per_work(each.bytes_per_s),
        };
        let calls = Traffic { calls_per_s: process.calls_per_s, bytes_per_s: process.bytes_per_s };
        let files = process.files.iter().map(|(node, each)| (*node, traffic(each)));
        Self { calls: traffic(&calls), files: files.collect() }
    }

    /// Of one whose calls are not looked at.
    pub(crate) fn silent() -> Self {
        Self { calls: Traffic::default(), files: Vec::new() }
    }

    /// Seconds of waiting on a node.
    pub(crate) fn wait(&self, ground: &Ground<'_>, on: &Node) -> f64 {
        let reach = |node: &Node, traffic: &Traffic| {
            if node.id == ground.cluster.me() {
                return 0.0;
            }
            let call = f64::from(node.link.rtt_us) * 1e-6 + ground.policy.per_call_s;
            traffic.calls_per_s * call + traffic.bytes_per_s / node.link.bytes_per_s as f64
        };
        let elsewhere = self.files.iter().filter(|(node, _)| *node != on.id);
        let files = elsewhere.filter_map(|(node, traffic)| {
            // Of a node that is not in sight nobody can say what it costs to reach it.
            Some(reach(ground.cluster.node(*node)?, traffic) + reach(on, traffic))
        });
        reach(on, &self.calls) + files.sum::<f64>()
    }

    /// Where it runs it waits only for this part of what was believed. It will be as wrong elsewhere.
    pub(crate) fn lessen(&mut self, ground: &Ground<'_>, at: NodeId, part: f64) {
        let away = at != ground.cluster.me();
        let waited_for = self.files.iter_mut().filter(|(node, _)| *node != at).map(|(_, traffic)| traffic);
        for traffic in waited_for.chain(away.then_some(&mut self.calls)) {
            traffic.calls_per_s *= part;
            traffic.bytes_per_s *= part;
        }
    }

    /// Whether it works on files of a node.
    pub(crate) fn has_files_on(&self, node: NodeId) -> bool {
        self.files.iter().any(|(on, traffic)| *on == node && traffic.bytes_per_s > 0.0)
    }

    /// The nodes on whose files it works.
    pub(crate) fn files_on(&self) -> impl Iterator<Item = NodeId> {
        self.files.iter().map(|(node, _)| *node)
    }
}
