//! The statistics of a build, for the summary and the report. Pure arithmetic.

use super::build::{Build, Command};
use super::event_log::NodeInfo;

/// The maximum number of commands in the list of the longest.
const MAX_LISTED: usize = 10;

/// The statistics of one node.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct NodeStatistics {
    /// The node.
    pub(super) node: NodeInfo,
    /// Commands that ran there.
    pub(super) commands: usize,
    /// How many of them failed.
    pub(super) failed: usize,
    /// CPU time in seconds, of the commands for which it is known.
    pub(super) cpu: f64,
    /// The sum of the run times, in seconds.
    pub(super) run_time: f64,
    /// The sum of the waiting times before the starts, in seconds.
    pub(super) wait_time: f64,
    /// The maximum number of commands at a time.
    pub(super) max_running: usize,
}

/// The statistics of a build.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Statistics {
    /// Seconds from the start of the build to its end.
    pub(super) elapsed: f64,
    /// By node number.
    pub(super) nodes: Vec<NodeStatistics>,
    /// The number of commands with unknown CPU time.
    pub(super) unknown_cpu: usize,
    /// Seconds in which no command ran.
    pub(super) idle: f64,
    /// Seconds in which exactly one command ran.
    pub(super) single: f64,
    /// The maximum number of commands at a time.
    pub(super) max_running: usize,
    /// Seconds from the last moment at which at least half of the maximum ran, to the end.
    pub(super) tail: f64,
    /// The commands that ended in the tail, the longest first, as indices.
    pub(super) in_tail: Vec<usize>,
    /// The longest commands, as indices.
    pub(super) longest: Vec<usize>,
    /// The reasons for placements with the number of commands of each, the most frequent first.
    pub(super) reasons: Vec<(String, usize)>,
}

impl Statistics {
    /// Computes the statistics of a build.
    pub(super) fn new(build: &Build) -> Self {
        let mut nodes: Vec<_> = build.nodes().into_iter().map(|node| node_statistics(build, node)).collect();
        let levels = levels(build);
        let time_at_level = |count: usize| -> u64 {
            levels.iter().filter(|level| level.1 == count).map(|level| level.2 - level.0).sum()
        };
        let max_running = levels.iter().map(|level| level.1).max().unwrap_or(0);
        let busy_until = levels
            .iter()
            .rfind(|level| max_running > 1 && level.1 * 2 >= max_running)
            .map_or(build.elapsed, |l| l.2);
        let mut longest: Vec<usize> =
            (0..build.commands.len()).filter(|at| build.commands[*at].run_time() > 0).collect();
        longest.sort_by_key(|at| std::cmp::Reverse(build.commands[*at].run_time()));
        let mut in_tail = longest.clone();
        in_tail.retain(|at| build.commands[*at].ended_at.is_some_and(|ended| ended > busy_until));
        in_tail.truncate(MAX_LISTED);
        longest.truncate(MAX_LISTED);
        for (node, max_running) in max_running_by_node(build) {
            if let Some(on) = nodes.iter_mut().find(|on| on.node.node == node) {
                on.max_running = max_running;
            }
        }
        Self {
            elapsed: seconds(build.elapsed),
            unknown_cpu: build.commands.iter().filter(|c| c.started_at.is_some() && c.cpu.is_none()).count(),
            idle: seconds(time_at_level(0)),
            single: seconds(time_at_level(1)),
            max_running,
            tail: seconds(build.elapsed.saturating_sub(busy_until)),
            in_tail,
            longest,
            reasons: reasons(build),
            nodes,
        }
    }

    /// The number of commands that ran.
    pub(super) fn commands(&self) -> usize {
        self.nodes.iter().map(|on| on.commands).sum()
    }

    /// CPU time in seconds.
    pub(super) fn cpu(&self) -> f64 {
        self.nodes.iter().map(|on| on.cpu).sum()
    }

    /// The mean number of commands at a time.
    pub(super) fn mean_running(&self) -> f64 {
        self.nodes.iter().map(|on| on.run_time).sum::<f64>() / self.elapsed.max(1e-6)
    }

    /// Seconds of waiting, summed over the commands.
    pub(super) fn wait_time(&self) -> f64 {
        self.nodes.iter().map(|on| on.wait_time).sum()
    }

    /// The share of the time in which only one command ran, which more nodes cannot shorten.
    pub(super) fn single_share(&self) -> f64 {
        self.single / self.elapsed.max(1e-6)
    }
}

fn node_statistics(build: &Build, node: NodeInfo) -> NodeStatistics {
    let commands = || build.commands.iter().filter(|c| c.started_at.is_some() && c.node == node.node);
    let sum = |of: &dyn Fn(&Command) -> u64| seconds(commands().map(of).sum());
    NodeStatistics {
        commands: commands().count(),
        failed: commands().filter(|c| c.exit != 0).count(),
        cpu: sum(&|c| c.cpu.unwrap_or(0)),
        run_time: sum(&|c| c.run_time()),
        wait_time: sum(&|c| c.started_at.map_or(0, |start| start.saturating_sub(c.requested_at))),
        max_running: 0,
        node,
    }
}

/// The number of running commands over time: start, count, end.
fn levels(build: &Build) -> Vec<(u64, usize, u64)> {
    let mut changes: Vec<(u64, i64)> = Vec::new();
    for command in &build.commands {
        if let Some((start, end)) = command.started_at.zip(command.ended_at) {
            changes.extend([(start, 1), (end, -1)]);
        }
    }
    // Sorting puts an end before a start at the same time.
    changes.sort_unstable();
    let (mut levels, mut at, mut count) = (Vec::new(), 0, 0i64);
    for (when, change) in changes {
        let when = when.min(build.elapsed);
        if when > at {
            levels.push((at, usize::try_from(count).unwrap_or(0), when));
            at = when;
        }
        count += change;
    }
    if build.elapsed > at {
        levels.push((at, 0, build.elapsed));
    }
    levels
}

/// The maximum number of commands at a time on each node: its number of lanes.
fn max_running_by_node(build: &Build) -> Vec<(u16, usize)> {
    let mut lanes: std::collections::BTreeMap<u16, usize> = std::collections::BTreeMap::new();
    for command in build.commands.iter().filter(|c| c.started_at.is_some()) {
        let count = lanes.entry(command.node).or_default();
        *count = (*count).max(command.lane + 1);
    }
    lanes.into_iter().collect()
}

fn reasons(build: &Build) -> Vec<(String, usize)> {
    let mut reasons: std::collections::BTreeMap<&str, usize> = std::collections::BTreeMap::new();
    for command in build.commands.iter().filter(|c| c.started_at.is_some()) {
        *reasons.entry(&command.why).or_default() += 1;
    }
    let mut reasons: Vec<_> = reasons.into_iter().map(|(why, count)| (why.to_owned(), count)).collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    reasons
}

/// Converts microseconds to seconds.
pub(super) fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::super::build::tests::EVENTS;
    use super::*;

    #[test]
    fn statistics_of_a_build() {
        let statistics = Statistics::new(&Build::read(EVENTS.as_bytes()));
        assert_eq!((statistics.elapsed, statistics.cpu(), statistics.max_running), (10.0, 10.0, 2));
        // One alone: 0–2, 2.5–3, 6–7, 7–10; none: 2–2.5.
        assert_eq!((statistics.single, statistics.idle, statistics.wait_time()), (6.5, 0.5, 1.5));
        assert_eq!(statistics.mean_running(), 1.25);
        let of: Vec<_> = statistics
            .nodes
            .iter()
            .map(|n| (n.node.node, n.commands, n.cpu, n.failed, n.max_running))
            .collect();
        assert_eq!(of, [(1, 2, 3.5, 1, 1), (2, 2, 6.5, 0, 2)]);
        assert_eq!(statistics.longest, [2, 1, 3, 0].map(|at| [0, 1, 2, 3][at]), "4, 3.5, 3 and 2 s");
        assert_eq!(statistics.reasons[0], ("this node was idle".to_owned(), 2));
    }

    #[test]
    fn statistics_of_an_empty_build_are_zero() {
        let statistics = Statistics::new(&Build::default());
        assert_eq!((statistics.commands(), statistics.max_running, statistics.tail), (0, 0, 0.0));
        assert!(statistics.single_share() == 0.0 && statistics.mean_running() == 0.0);
    }
}
