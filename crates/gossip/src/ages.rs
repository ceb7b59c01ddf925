//! Measures how old information gets: an in-memory cluster that runs the daemon's own gossip code.

use crate::config::GossipConfig;
use crate::gossip::Gossip;
use crate::rng::Rng;
use tern_ids::NodeId;

/// When in a period the nodes send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phases {
    /// All at the same moment; all messages of a step are sent before the first arrives.
    Together,
    /// Each at its own moment, as on real machines; its message arrives at once.
    Spread,
}

/// Parameters of one experiment.
#[derive(Debug, Clone, Copy)]
pub struct Experiment {
    /// Number of nodes.
    pub nodes: u16,
    /// Entries in a message.
    pub window: usize,
    /// When in a period the nodes send.
    pub phases: Phases,
    /// Steps before the first measurement. Ages are stable once every node has an entry of every
    /// other: after about twice the worst age of the model in `model.rs`.
    pub warm_up: u64,
    /// Number of measurements, one every 16 steps.
    pub measurements: u64,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Results of an experiment. Ages are in steps, over all nodes' entries of all other nodes,
/// measured once the last node has sent in a step and its message has arrived.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AgeMeasurement {
    /// The average age.
    pub average_age: f64,
    /// The age of the oldest entry in a node's view, on average over nodes and measurements.
    pub worst_age: f64,
    /// Average number of entries in a view; the number of other nodes if each node has an entry of
    /// every other.
    pub entries_per_view: f64,
    /// Messages sent per node and step.
    pub messages_per_step: f64,
    /// Bytes sent per node and step.
    pub bytes_per_step: f64,
    /// Length of the longest message, in bytes.
    pub longest_message: usize,
}

/// Steps between two measurements.
const MEASUREMENT_INTERVAL: u64 = 16;

/// Runs the experiment.
#[must_use]
pub fn measure(experiment: Experiment) -> AgeMeasurement {
    let config = GossipConfig { window: experiment.window, ..GossipConfig::default() };
    let period = config.period;
    let mut rng = Rng::new(experiment.seed);
    let numbers = || (1..=experiment.nodes).map(NodeId);
    let mut nodes: Vec<Gossip> = numbers()
        .map(|me| {
            let mut node = Gossip::new(me, 1, config, rng.next_u64());
            node.set_members(numbers());
            // 40 bytes are within the limit.
            let _fits = node.set_payload(&[0; 40]);
            node
        })
        .collect();
    let mut phases: Vec<(u64, usize)> = (0..nodes.len())
        .map(|at| match experiment.phases {
            Phases::Together => (0, at),
            Phases::Spread => (rng.below(period as usize) as u64, at),
        })
        .collect();
    phases.sort_unstable();
    let mut totals = Totals::default();
    let (mut messages, mut bytes, mut longest) = (0u64, 0u64, 0);
    let steps = experiment.warm_up + experiment.measurements * MEASUREMENT_INTERVAL;
    let mut in_transit: Vec<(u64, NodeId, NodeId, Vec<u8>)> = Vec::new();
    for step in 0..steps {
        for (at, &(phase, node)) in phases.iter().enumerate() {
            let now = step * period + phase;
            if let Some((to, message)) = nodes[node].tick(now) {
                messages += 1;
                bytes += message.len() as u64;
                longest = longest.max(message.len());
                in_transit.push((now, NodeId(node as u16 + 1), to, message));
            }
            let all_sent = at + 1 == phases.len();
            if experiment.phases == Phases::Spread || all_sent {
                for (now, from, to, message) in in_transit.drain(..) {
                    // The sender is in every map, and every node can parse what another node
                    // encodes.
                    let _taken = nodes[usize::from(to.0) - 1].receive(now, from, &message);
                }
            }
        }
        if step >= experiment.warm_up && (step - experiment.warm_up).is_multiple_of(MEASUREMENT_INTERVAL) {
            let last = phases.last().map_or(0, |(phase, _)| *phase);
            nodes.iter().for_each(|node| totals.add(node, step * period + last));
        }
    }
    let (views, sent) = (totals.views as f64, (steps * nodes.len() as u64) as f64);
    AgeMeasurement {
        average_age: totals.age_sum / totals.entries as f64 / period as f64,
        worst_age: totals.worst_age_sum / views / period as f64,
        entries_per_view: totals.entries as f64 / views,
        messages_per_step: messages as f64 / sent,
        bytes_per_step: bytes as f64 / sent,
        longest_message: longest,
    }
}

/// Sums over views.
#[derive(Debug, Default)]
struct Totals {
    views: u64,
    entries: u64,
    age_sum: f64,
    worst_age_sum: f64,
}

impl Totals {
    fn add(&mut self, node: &Gossip, now: u64) {
        let mut worst = 0;
        for age in node.view(now).filter_map(|member| member.age) {
            self.entries += 1;
            self.age_sum += age as f64;
            worst = worst.max(age);
        }
        self.views += 1;
        self.worst_age_sum += worst as f64;
    }
}
