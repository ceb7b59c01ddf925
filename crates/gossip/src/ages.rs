//! How old information gets, by experiment: a cluster in memory, of the very code that the daemon runs.

use crate::config::Config;
use crate::dice::Dice;
use crate::gossip::Gossip;
use tern_ids::NodeId;

/// When in a period the nodes make their steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phases {
    /// All at the same moment; all messages of a step have then left before the first arrives.
    Together,
    /// Each at a moment of its own, as on real machines; its message arrives at once.
    Spread,
}

/// An experiment.
#[derive(Debug, Clone, Copy)]
pub struct Experiment {
    /// How many nodes.
    pub nodes: u16,
    /// Entries in a message.
    pub window: usize,
    /// When they make their steps.
    pub phases: Phases,
    /// Steps before the first measurement. Ages settle once every node has heard of all others: after about twice the
    /// worst age of the model.
    pub warm_up: u64,
    /// Measurements: one each 16 steps.
    pub measurements: u64,
    /// Chance.
    pub seed: u64,
}

/// What it showed. Ages are in steps, over all nodes' entries of all other nodes, counted at the start of a step: when
/// the messages of that moment have arrived.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ages {
    /// The average age.
    pub average: f64,
    /// The age of the oldest entry in a node's view, on average over nodes and measurements.
    pub worst: f64,
    /// Entries per view, on average: the number of other nodes if all know all.
    pub known: f64,
    /// Messages that a node sent per step.
    pub messages: f64,
    /// Bytes that a node sent per step.
    pub bytes: f64,
    /// The longest message, in bytes.
    pub longest: usize,
}

/// Steps between two measurements.
const BETWEEN: u64 = 16;

/// Makes the experiment.
#[must_use]
pub fn measure(experiment: Experiment) -> Ages {
    let config = Config { window: experiment.window, ..Config::default() };
    let period = config.period;
    let mut dice = Dice::new(experiment.seed);
    let numbers = || (1..=experiment.nodes).map(NodeId);
    let mut nodes: Vec<Gossip> = numbers()
        .map(|me| {
            let mut node = Gossip::new(me, 1, config, dice.bits());
            node.set_members(numbers());
            // The length is within limits.
            let _fits = node.set_own(&[0; 40]);
            node
        })
        .collect();
    let mut phases: Vec<(u64, usize)> = (0..nodes.len())
        .map(|at| match experiment.phases {
            Phases::Together => (0, at),
            Phases::Spread => (dice.below(period as usize) as u64, at),
        })
        .collect();
    phases.sort_unstable();
    let mut found = Found::default();
    let (mut messages, mut bytes, mut longest) = (0u64, 0u64, 0);
    let steps = experiment.warm_up + experiment.measurements * BETWEEN;
    let mut mail: Vec<(u64, NodeId, NodeId, Vec<u8>)> = Vec::new();
    for step in 0..steps {
        for (at, &(phase, node)) in phases.iter().enumerate() {
            let now = step * period + phase;
            if let Some((to, message)) = nodes[node].tick(now) {
                messages += 1;
                bytes += message.len() as u64;
                longest = longest.max(message.len());
                mail.push((now, NodeId(node as u16 + 1), to, message));
            }
            let all_sent = at + 1 == phases.len();
            if experiment.phases == Phases::Spread || all_sent {
                for (now, from, to, message) in mail.drain(..) {
                    // The sender is in every map, and what one of us writes the others can read.
                    let _taken = nodes[usize::from(to.0) - 1].receive(now, from, &message);
                }
            }
        }
        if step >= experiment.warm_up && (step - experiment.warm_up).is_multiple_of(BETWEEN) {
            let last = phases.last().map_or(0, |(phase, _)| *phase);
            nodes.iter().for_each(|node| found.add(node, step * period + last));
        }
    }
    let (views, sent) = (found.views as f64, (steps * nodes.len() as u64) as f64);
    Ages {
        average: found.sum / found.entries as f64 / period as f64,
        worst: found.worst / views / period as f64,
        known: found.entries as f64 / views,
        messages: messages as f64 / sent,
        bytes: bytes as f64 / sent,
        longest,
    }
}

/// Sums over views.
#[derive(Debug, Default)]
struct Found {
    views: u64,
    entries: u64,
    sum: f64,
    worst: f64,
}

impl Found {
    fn add(&mut self, node: &Gossip, now: u64) {
        let mut worst = 0;
        for age in node.view(now).filter_map(|seen| seen.age) {
            self.entries += 1;
            self.sum += age as f64;
            worst = worst.max(age);
        }
        self.views += 1;
        self.worst += worst as f64;
    }
}
