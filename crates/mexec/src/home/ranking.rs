//! Ranks the nodes for a command: pure functions of the state of all nodes.
//!
//! Commands sent in the last second are not in the published loads yet. So a node counts as busy
//! with the commands sent to it from here, or by its load, whichever is more. (Home knows how much
//! of its load is due to its commands, and subtracts that.) A command gets the share of a CPU that
//! is left for one more. The node where the command is expected to end first ranks first. The
//! estimate uses the CPU time that such commands need, if known, and the cost of starting one on
//! another node. Home ranks first while it is idle: a command there needs no link, and no remote
//! files. When it is busy it takes up to one command more than it has CPUs, as other nodes do, and
//! ranks last among equally fast nodes, since it serves files to all of them.

use crate::messages::PlacementReason;
use std::time::Duration;
use tern_ids::NodeId;

/// Cost in seconds of starting a command on another node, with its files: 24 ms on nodes of half a
/// CPU (docs/benchmarks.md, "Placed commands").
const REMOTE_START_COST: f32 = 0.02;

/// In seconds of a standard CPU. If a command needs less than this and no other one is running, one
/// busy CPU of home is attributed to its caller, a script that now waits for it. If that is wrong,
/// the command ends soon all the same.
const LIGHT_COMMAND_SECONDS: f32 = 0.2;

/// How long a command waits for a slot on other nodes while home is busy with other work. Other
/// nodes may have none for weeks.
const BUSY_HOME_TIMEOUT: Duration = Duration::from_secs(30);

/// The state of a node.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct NodeInfo {
    /// The node.
    pub(super) node: NodeId,
    /// The speed of one of its CPUs; 10,000 is a standard CPU.
    pub(super) speed: u32,
    /// Number of CPUs; a fraction under a CPU quota.
    pub(super) cpus: f32,
    /// Runnable threads, divided by the speed and the number of CPUs (docs/design/load.md): 100 if
    /// a node with one standard CPU keeps that CPU busy.
    pub(super) load: f32,
    /// Commands of this node that run there.
    pub(super) our_commands: u32,
    /// How many busy CPUs of `load` are due to commands of this node, running or just ended; 0 for
    /// other nodes, where this is not known.
    pub(super) in_load: f32,
    /// It is up, and accepts commands.
    pub(super) is_open: bool,
    /// It is not known to be dead. A command that names it is sent there even if the node's load
    /// was never received.
    pub(super) is_reachable: bool,
}

/// The nodes that a command may run on.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Constraint {
    /// Any node.
    Any {
        /// Whether such commands are too short to be worth sending to another node. They run here.
        is_short: bool,
        /// Seconds of a standard CPU that such commands need, if known.
        cpu_need: Option<f32>,
    },
    /// One of these.
    Among(Vec<NodeId>),
}

impl Constraint {
    /// Whether it runs here regardless of load and queue: a short command, or one that names only
    /// home.
    pub(super) fn stays_home(&self, me: NodeId) -> bool {
        match self {
            Self::Any { is_short, .. } => *is_short,
            Self::Among(named) => named.iter().all(|node| *node == me),
        }
    }

    /// The only node that it may run on, if there is just one.
    pub(super) fn single_node(&self) -> Option<NodeId> {
        match self {
            Self::Among(named) if named.len() == 1 => named.first().copied(),
            _ => None,
        }
    }

    /// The reported reason for running it here, or on another node.
    pub(super) fn reason(&self, is_home: bool) -> PlacementReason {
        match self {
            Self::Among(_) => PlacementReason::Named,
            Self::Any { is_short: true, .. } => PlacementReason::Short,
            Self::Any { .. } if is_home => PlacementReason::Idle,
            Self::Any { .. } => PlacementReason::Best,
        }
    }
}

impl NodeInfo {
    /// Number of its CPUs in use.
    fn busy_cpus(&self) -> f32 {
        let threads = self.load / 100.0 * (self.speed as f32 / 10_000.0) * self.cpus;
        ((threads - self.in_load).max(0.0) + self.our_commands as f32)
            .min(threads.max(self.our_commands as f32))
    }

    /// The speed at which one more command would run, with `busy` CPUs in use.
    fn speed_with(&self, busy: f32) -> f32 {
        self.speed as f32 * (self.cpus / (busy + 1.0)).min(1.0)
    }

    /// Estimated seconds for a command that needs `need` seconds of a standard CPU. `is_only`: the
    /// node is home, and no command of home runs anywhere.
    fn estimated_seconds(&self, need: Option<f32>, is_home: bool, is_only: bool) -> f32 {
        let caller = if is_only && need.is_some_and(|need| need < LIGHT_COMMAND_SECONDS) { 1.0 } else { 0.0 };
        let speed = self.speed_with((self.busy_cpus() - caller).max(0.0)).max(1.0);
        let remote = if is_home || need.is_none() { 0.0 } else { REMOTE_START_COST };
        need.unwrap_or(1.0) * 10_000.0 / speed + remote
    }

    /// Whether one more command would have a CPU of its own. A fraction of a CPU counts as one.
    fn is_idle(&self) -> bool {
        self.busy_cpus() + 1.0 <= self.cpus.max(1.0) + 0.5
    }

    /// The time that a command which took `took` on this node would take on a standard CPU of its
    /// own.
    pub(super) fn standard_time(&self, took: Duration) -> Duration {
        Self::to_standard(self.speed, took.mul_f32((self.cpus / self.busy_cpus().max(1.0)).clamp(0.0, 1.0)))
    }

    /// Converts CPU time of a node to that of a standard CPU.
    pub(super) fn to_standard(speed: u32, used: Duration) -> Duration {
        used.mul_f32(speed as f32 / 10_000.0)
    }

    /// Whether home accepts one more command. (Other nodes decide that themselves.) Home's other
    /// work may go on for weeks, so it counts only if a slot on another node is likely
    /// (`elsewhere`).
    fn has_slot(&self, elsewhere: bool) -> bool {
        let busy = if elsewhere { self.busy_cpus() } else { self.our_commands as f32 };
        busy <= self.cpus.max(1.0) + 0.5
    }
}

/// The nodes that a command may run on, now or later.
pub(super) fn eligible(nodes: &[NodeInfo], constraint: &Constraint) -> Vec<NodeId> {
    eligible_nodes(nodes, constraint).map(|known| known.node).collect()
}

fn eligible_nodes<'a>(
    nodes: &'a [NodeInfo],
    constraint: &'a Constraint,
) -> impl Iterator<Item = &'a NodeInfo> {
    nodes.iter().filter(move |known| match constraint {
        Constraint::Any { .. } => known.is_open,
        Constraint::Among(named) => known.is_reachable && named.contains(&known.node),
    })
}

/// The nodes to ask now, the best first. Home is included only if it should run the command at
/// once. A command that has `waited` for long does not wait for other nodes any more.
pub(super) fn rank(nodes: &[NodeInfo], me: NodeId, constraint: &Constraint, waited: Duration) -> Vec<NodeId> {
    if constraint.stays_home(me) {
        return vec![me];
    }
    let need = if let Constraint::Any { cpu_need, .. } = constraint { *cpu_need } else { None };
    let none_runs = nodes.iter().all(|known| known.our_commands == 0);
    let seconds =
        |known: &NodeInfo| known.estimated_seconds(need, known.node == me, known.node == me && none_runs);
    let elsewhere =
        waited < BUSY_HOME_TIMEOUT && eligible_nodes(nodes, constraint).any(|known| known.node != me);
    let mut now: Vec<&NodeInfo> = eligible_nodes(nodes, constraint)
        .filter(|known| known.node != me || known.has_slot(elsewhere))
        .collect();
    let first = |known: &NodeInfo| {
        matches!(constraint, Constraint::Any { .. }) && known.node == me && known.is_idle()
    };
    let last = |known: &NodeInfo| (known.node == me, known.node);
    now.sort_by(|a, b| {
        first(b).cmp(&first(a)).then(seconds(a).total_cmp(&seconds(b))).then(last(a).cmp(&last(b)))
    });
    now.into_iter().map(|known| known.node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeId = NodeId(1);
    const ANY: Constraint = Constraint::Any { is_short: false, cpu_need: None };

    fn known(node: u16, speed: u32, load: f32, our_commands: u32) -> NodeInfo {
        NodeInfo {
            node: NodeId(node),
            speed,
            cpus: 1.0,
            load,
            our_commands,
            in_load: 0.0,
            is_open: true,
            is_reachable: true,
        }
    }

    fn ids(nodes: &[NodeInfo], constraint: &Constraint) -> Vec<u16> {
        rank(nodes, ME, constraint, Duration::ZERO).iter().map(|node| node.0).collect()
    }

    #[test]
    fn home_ranks_first_while_idle_last_when_busy_and_not_when_full() {
        let others = [known(2, 20_000, 0.0, 0), known(3, 10_000, 0.0, 0)];
        let with = |home| [&[home][..], &others].concat();
        assert_eq!(ids(&with(known(1, 10_000, 10.0, 0)), &ANY), [1, 2, 3]);
        assert_eq!(ids(&with(known(1, 10_000, 95.0, 0)), &ANY), [2, 3, 1]);
        assert_eq!(ids(&with(known(1, 10_000, 0.0, 1)), &ANY), [2, 3, 1]);
        assert_eq!(ids(&with(known(1, 10_000, 0.0, 2)), &ANY), [2, 3]);
        assert_eq!(ids(&with(known(1, 10_000, 190.0, 0)), &ANY), [2, 3]);
        // Home is as fast as node 2 is now.
        let one_each = [known(1, 10_000, 0.0, 1), known(2, 10_000, 0.0, 1), known(3, 10_000, 0.0, 2)];
        assert_eq!(ids(&one_each, &ANY), [2, 1, 3]);
    }

    #[test]
    fn busy_home_accepts_commands_if_no_other_node_is_available() {
        let busy = |ours| known(1, 10_000, 900.0, ours);
        assert_eq!(ids(&[busy(1)], &ANY), [1]);
        assert_eq!(ids(&[busy(2)], &ANY), [0u16; 0]);
        let closed = NodeInfo { is_open: false, ..known(2, 10_000, 0.0, 0) };
        assert_eq!(ids(&[busy(1), closed], &ANY), [1]);
        let other = [busy(1), known(2, 10_000, 0.0, 9)];
        assert_eq!(ids(&other, &ANY), [2]);
        assert!(
            rank(&other, ME, &ANY, BUSY_HOME_TIMEOUT).contains(&ME),
            "the other node may have no slot for weeks"
        );
    }

    #[test]
    fn idleness_depends_on_threads_and_ignores_commands_that_have_just_ended() {
        let others = [known(2, 5000, 0.0, 0)];
        let with = |home: NodeInfo| ids(&[&[home][..], &others].concat(), &ANY);
        // 0.3 threads on half a CPU.
        assert_eq!(with(known(1, 5000, 60.0, 0)), [1, 2]);
        let ended = NodeInfo { in_load: 0.8, ..known(1, 5000, 200.0, 0) };
        assert_eq!(with(ended.clone()), [1, 2]);
        assert_eq!(with(NodeInfo { our_commands: 1, ..ended.clone() }), [2, 1]);
        assert_eq!(with(NodeInfo { our_commands: 2, ..ended.clone() }), [2]);
        // Other work is running there.
        assert_eq!(with(NodeInfo { load: 800.0, ..ended }), [2]);
    }

    #[test]
    fn standard_time_excludes_waiting_for_a_cpu() {
        let took = Duration::from_millis(100);
        let standard = |known: NodeInfo| known.standard_time(took).as_millis();
        assert_eq!(standard(known(1, 10_000, 0.0, 1)), 100);
        assert_eq!(standard(known(1, 10_000, 400.0, 1)), 25);
        assert_eq!(standard(known(1, 5_000, 0.0, 2)), 25);
        assert_eq!(standard(NodeInfo { cpus: 8.0, ..known(1, 20_000, 0.0, 4) }), 200);
    }

    #[test]
    fn light_command_stays_home_unless_other_work_runs_there() {
        let others = [known(2, 10_000, 0.0, 0)];
        let with = |need, home: NodeInfo| {
            ids(&[&[home][..], &others].concat(), &Constraint::Any { is_short: false, cpu_need: Some(need) })
        };
        // A script that calls compilers, one after the other.
        assert_eq!(with(0.05, known(1, 10_000, 100.0, 0)), [1, 2]);
        assert_eq!(with(0.5, known(1, 10_000, 100.0, 0)), [2, 1]);
        // Other work, or a build.
        assert_eq!(with(0.04, known(1, 10_000, 140.0, 0)), [1, 2]);
        assert_eq!(with(0.15, known(1, 10_000, 140.0, 0)), [2, 1]);
        assert_eq!(with(0.05, known(1, 10_000, 100.0, 1)), [2, 1]);
        assert_eq!(with(0.015, known(1, 10_000, 100.0, 1)), [1, 2]);
    }

    #[test]
    fn commands_just_sent_count_before_the_load_includes_them() {
        let nodes = [known(1, 10_000, 100.0, 1), known(2, 10_000, 0.0, 2), known(3, 10_000, 50.0, 0)];
        assert_eq!(ids(&nodes, &ANY), [3, 1, 2]);
    }

    #[test]
    fn fast_node_gets_more_commands_than_a_slow_one() {
        let busy = |ours| [known(2, 25_000, 0.0, ours), known(3, 10_000, 0.0, 0)];
        assert_eq!(ids(&busy(1), &ANY), [2, 3]);
        assert_eq!(ids(&busy(2), &ANY), [3, 2]);
    }

    #[test]
    fn short_commands_stay_home_and_named_nodes_are_respected() {
        let nodes = [known(1, 10_000, 900.0, 9), known(2, 10_000, 0.0, 0), known(3, 10_000, 0.0, 0)];
        assert_eq!(ids(&nodes, &Constraint::Any { is_short: true, cpu_need: Some(0.01) }), [1]);
        assert_eq!(ids(&nodes, &Constraint::Among(vec![ME])), [1]);
        assert_eq!(ids(&nodes, &Constraint::Among(vec![ME, NodeId(3)])), [3]);
        assert_eq!(ids(&nodes, &Constraint::Among(vec![NodeId(9)])), [0u16; 0]);
    }

    #[test]
    fn closed_and_dead_nodes_are_not_eligible() {
        let mut nodes = [known(2, 10_000, 0.0, 0), known(3, 10_000, 0.0, 0)];
        let named = Constraint::Among(vec![NodeId(2)]);
        nodes[0].is_open = false;
        assert_eq!(ids(&nodes, &ANY), [3]);
        assert_eq!(ids(&nodes, &named), [2], "the node itself refuses, with a reason");
        nodes[0].is_reachable = false;
        assert_eq!(ids(&nodes, &named), [0u16; 0]);
    }
}
