//! State that a home keeps between two decisions.

use crate::admit::OfferRefusal;
use crate::candidate::Obstacle;
use crate::decide::Move;
use crate::policy::Policy;
use crate::process::ProcessSnapshot;
use crate::trend::Trend;
use crate::view::Cluster;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use tern_ids::{HomePid, NodeId};

/// Limit of remembered refusals.
const MAX_REPORTS: usize = 256;

/// Why a process stays where it is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StayReason {
    /// It cannot be moved now, or its user or an administrator forbids it.
    NotMovable,
    /// It is locked.
    Locked,
    /// A move of it is under way.
    Moving,
    /// Its node is not known to be alive, or is not in the view.
    NodeUnknown,
    /// It hardly uses a CPU.
    Idle,
    /// It has used too little CPU time.
    TooYoung {
        /// CPU seconds used.
        cpu_s: f64,
        /// CPU seconds required.
        needed_s: f64,
    },
    /// It came to its node too recently.
    TooRecent {
        /// Seconds since it came.
        here_s: f64,
        /// Seconds required.
        needed_s: f64,
    },
    /// No node is better. The obstacle is that of the fastest other node.
    NoBetter(Option<Obstacle>),
    /// A better node exists, but other processes of this home move first.
    Queued,
}

/// The last decision about a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// To move.
    Moved(Box<Move>),
    /// To stay.
    Stayed(StayReason),
}

/// A move that the view does not show yet.
#[derive(Debug, Clone)]
pub(crate) struct PendingMove {
    pub(crate) from: NodeId,
    pub(crate) to: NodeId,
    pub(crate) threads: f64,
    pub(crate) memory: u64,
    decided_ms: u64,
    /// When the target accepted it; from then on the target's load includes it.
    accepted_ms: Option<u64>,
    arrived_ms: Option<u64>,
}

/// A program started on a node whose load does not include it yet.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    pub(crate) on: NodeId,
    pub(crate) threads: f64,
    pub(crate) memory: u64,
    at_ms: u64,
}

/// A process of this home that ended on another node, whose load may still include it.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) on: NodeId,
    pub(crate) threads: f64,
    at_ms: u64,
}

/// A node's state as reported in a refusal.
#[derive(Debug, Clone, Copy)]
struct ReportedState {
    at_ms: u64,
    refusal: OfferRefusal,
}

/// Recent moves of a process.
#[derive(Debug, Clone, Default)]
struct History {
    moves: f64,
    counted_ms: u64,
    left: Vec<(NodeId, u64)>,
    failures: u32,
    failed_target: Option<NodeId>,
    not_before_ms: u64,
}

/// State that a home keeps between decisions: moves under way, charged in advance; how often each process
/// moved; memory trends; and the last decision about each process.
#[derive(Debug, Clone, Default)]
pub struct DecisionState {
    pub(crate) moves: BTreeMap<HomePid, PendingMove>,
    pub(crate) placed: Vec<Placed>,
    pub(crate) ended: Vec<Ended>,
    /// The node and the number of threads of each process, as of the last decision.
    last_run: BTreeMap<HomePid, (NodeId, f64)>,
    /// Seconds until the first process that is too young will have used enough CPU time, as of the
    /// last decision.
    pub(crate) eligible_in_s: Option<f64>,
    history: BTreeMap<HomePid, History>,
    trends: BTreeMap<NodeId, Trend>,
    reports: BTreeMap<NodeId, ReportedState>,
    pub(crate) decisions: BTreeMap<HomePid, (u64, Decision)>,
}

impl DecisionState {
    /// The target has accepted the process; from now on its own load includes it.
    pub fn accepted(&mut self, pid: HomePid, now_ms: u64) {
        if let Some(under_way) = self.moves.get_mut(&pid) {
            under_way.accepted_ms = Some(now_ms);
        }
    }

    /// The move failed: nothing is charged any more, and the next attempt with this target waits.
    /// The delay is 1 s, and doubles with each failure, with any target, up to 64 s; an arrival
    /// resets it.
    pub fn failed(&mut self, pid: HomePid, now_ms: u64) {
        let Some(under_way) = self.undo(pid) else { return };
        let history = self.history.entry(pid).or_default();
        history.failed_target = Some(under_way.to);
        history.not_before_ms = now_ms.saturating_add(1_000 << history.failures.min(6));
        history.failures = history.failures.saturating_add(1);
    }

    /// The process did not move: undoes `record_start`.
    fn undo(&mut self, pid: HomePid) -> Option<PendingMove> {
        let under_way = self.moves.remove(&pid)?;
        if let Some(history) = self.history.get_mut(&pid) {
            history.moves = (history.moves - 1.0).max(0.0);
            history.left.retain(|(node, _)| *node != under_way.from);
        }
        Some(under_way)
    }

    /// The view, updated with what nodes reported in refusals.
    pub(crate) fn with_refusals<'a>(&self, cluster: &'a Cluster, now_ms: u64) -> Cow<'a, Cluster> {
        if self.reports.is_empty() {
            return Cow::Borrowed(cluster);
        }
        let mut cluster = cluster.clone();
        for (node, report) in &self.reports {
            let age_ms = now_ms.saturating_sub(report.at_ms);
            // A node that refused for one of these reasons takes no guests until gossip brings a
            // newer entry.
            let takes_guests = !matches!(report.refusal.obstacle, Obstacle::NoGuests | Obstacle::LinkBusy);
            cluster.apply_report(*node, age_ms, report.refusal.load, report.refusal.mem_free, takes_guests);
        }
        Cow::Owned(cluster)
    }

    /// The target refused. Nothing is charged any more, and its reported state counts until gossip
    /// is newer.
    pub fn refused(&mut self, pid: HomePid, refusal: OfferRefusal, now_ms: u64) {
        let Some(under_way) = self.moves.get(&pid) else { return };
        let to = under_way.to;
        self.undo(pid);
        if self.reports.len() < MAX_REPORTS {
            self.reports.insert(to, ReportedState { at_ms: now_ms, refusal });
        }
    }

    /// The process runs at its target. `decide` also detects this from where the process is; this
    /// call records the exact time.
    pub fn arrived(&mut self, pid: HomePid, now_ms: u64) {
        let Some(under_way) = self.moves.get_mut(&pid).filter(|under_way| under_way.arrived_ms.is_none())
        else {
            return;
        };
        under_way.arrived_ms = Some(now_ms);
        if let Some(history) = self.history.get_mut(&pid) {
            (history.failures, history.failed_target) = (0, None);
            // The time in which the process must not return begins now, since the move itself may
            // have taken longer.
            let from = under_way.from;
            history.left.iter_mut().filter(|(node, _)| *node == from).for_each(|(_, left)| *left = now_ms);
        }
    }

    /// The last decision about a process, and when it was made.
    #[must_use]
    pub fn decision(&self, pid: HomePid) -> Option<&(u64, Decision)> {
        self.decisions.get(&pid)
    }

    /// Seconds until the first process that is now too young, on a crowded node, becomes eligible.
    /// A new decision is worthwhile then, less than a second after the last.
    #[must_use]
    pub fn eligible_in_s(&self) -> Option<f64> {
        self.eligible_in_s
    }

    /// Whether a move of this process is under way.
    #[must_use]
    pub fn is_moving(&self, pid: HomePid) -> bool {
        self.moves.get(&pid).is_some_and(|under_way| under_way.arrived_ms.is_none())
    }

    /// Number of moves under way.
    #[must_use]
    pub fn moving(&self) -> usize {
        self.moves.values().filter(|under_way| under_way.arrived_ms.is_none()).count()
    }

    /// Applies what the view and the processes show, and drops what is settled.
    pub(crate) fn observe(
        &mut self,
        cluster: &Cluster,
        processes: &BTreeMap<HomePid, &ProcessSnapshot>,
        policy: &Policy,
        now_ms: u64,
    ) {
        let known = |pid: &HomePid| processes.contains_key(pid);
        self.history.retain(|pid, _| known(pid));
        // After `max_age_ms` gossip has newer entries, or the view is too old to be used.
        self.reports.retain(|_, report| now_ms.saturating_sub(report.at_ms) < policy.max_age_ms);
        self.decisions.retain(|pid, _| known(pid));
        let arrived_pids: Vec<HomePid> = self
            .moves
            .iter()
            .filter(|(pid, under_way)| processes.get(pid).is_some_and(|process| process.at == under_way.to))
            .map(|(pid, _)| *pid)
            .collect();
        for pid in arrived_pids {
            self.arrived(pid, now_ms);
        }
        let is_published =
            |node, since: u64| sample_time(cluster, node, now_ms).is_none_or(|time| time > since);
        self.moves.retain(|pid, under_way| {
            let Some(arrived) = under_way.arrived_ms else {
                return known(pid) && now_ms.saturating_sub(under_way.decided_ms) < policy.move_timeout_ms;
            };
            // The move is settled when both nodes have published an entry since, or after a minute
            // in any case.
            known(pid)
                && now_ms.saturating_sub(arrived) < 60_000
                && !(is_published(under_way.from, arrived)
                    && is_published(under_way.to, under_way.accepted_ms.unwrap_or(arrived)))
        });
        let settled = 3 * policy.load_time_constant_ms;
        self.placed.retain(|placed| {
            let since = placed.at_ms.saturating_add(settled);
            !is_published(placed.on, since) && now_ms.saturating_sub(placed.at_ms) < 60_000
        });
        self.follow_ends(cluster, processes, policy, now_ms);
        self.follow_memory(cluster, processes, now_ms);
    }

    /// A home learns at once that one of its processes has ended on another node. That node's next
    /// entry reflects it; until then the load in its last entry still includes the process.
    /// Processes on this node are left out: its own load shows their end.
    fn follow_ends(
        &mut self,
        cluster: &Cluster,
        processes: &BTreeMap<HomePid, &ProcessSnapshot>,
        policy: &Policy,
        now_ms: u64,
    ) {
        let gone =
            self.last_run.iter().filter(|(pid, (on, _))| !processes.contains_key(pid) && *on != cluster.me());
        let gone = gone.map(|(_, (on, threads))| Ended { on: *on, threads: *threads, at_ms: now_ms });
        self.ended.extend(gone);
        self.ended.retain(|ended| {
            let is_published = sample_time(cluster, ended.on, now_ms).is_none_or(|time| time > ended.at_ms);
            !is_published && now_ms.saturating_sub(ended.at_ms) < policy.max_age_ms
        });
        self.last_run =
            processes.values().map(|process| (process.pid, (process.at, process.threads()))).collect();
    }

    /// Samples the memory trend of each node with a process of this home; a home can move only its
    /// own processes away.
    fn follow_memory(
        &mut self,
        cluster: &Cluster,
        processes: &BTreeMap<HomePid, &ProcessSnapshot>,
        now_ms: u64,
    ) {
        self.trends.retain(|node, _| processes.values().any(|process| process.at == *node));
        for process in processes.values() {
            let Some(node) = cluster.node(process.at) else { continue };
            self.trends.entry(node.id).or_default().sample(node.mem_free, now_ms.saturating_sub(node.age_ms));
        }
    }

    /// How fast a node's memory fills, in bytes a second, as far as observed; never negative.
    pub(crate) fn fill_rate(&self, node: NodeId) -> f64 {
        self.trends.get(&node).map_or(0.0, Trend::fill_rate)
    }

    /// Charges a move when it starts.
    pub(crate) fn record_start(
        &mut self,
        process: &ProcessSnapshot,
        to: NodeId,
        policy: &Policy,
        now_ms: u64,
    ) {
        let under_way = PendingMove {
            from: process.at,
            to,
            threads: process.threads(),
            memory: process.memory(),
            decided_ms: now_ms,
            accepted_ms: None,
            arrived_ms: None,
        };
        self.moves.insert(process.pid, under_way);
        let history = self.history.entry(process.pid).or_default();
        history.moves = recent_moves(history, policy, now_ms) + 1.0;
        history.counted_ms = now_ms;
        history.left.retain(|(_, left)| now_ms.saturating_sub(*left) < policy.no_return_ms);
        history.left.push((process.at, now_ms));
    }

    /// Charges a program that starts on a node.
    pub(crate) fn placed(&mut self, on: NodeId, threads: f64, memory: u64, now_ms: u64) {
        // Beyond this many, one more makes no difference.
        if self.placed.len() < 100_000 {
            self.placed.push(Placed { on, threads, memory, at_ms: now_ms });
        }
    }

    /// Seconds that a process must stay where it is.
    pub(crate) fn residence_s(&self, pid: HomePid, policy: &Policy, now_ms: u64) -> f64 {
        let moves = self.history.get(&pid).map_or(0.0, |history| recent_moves(history, policy, now_ms));
        (policy.residence_s * moves.exp2()).min(policy.max_residence_s)
    }

    /// The fraction by which the pace elsewhere must be better for a process. [`Policy::moved_margin`]
    /// decays with the count of its recent moves.
    pub(crate) fn margin(&self, pid: HomePid, policy: &Policy, now_ms: u64) -> f64 {
        let moves = self.history.get(&pid).map_or(0.0, |history| recent_moves(history, policy, now_ms));
        policy.margin + policy.moved_margin * moves.min(1.0)
    }

    /// Whether it left this node a short time ago.
    pub(crate) fn has_just_left(&self, pid: HomePid, node: NodeId, policy: &Policy, now_ms: u64) -> bool {
        self.history.get(&pid).is_some_and(|history| {
            history
                .left
                .iter()
                .any(|(left, at)| *left == node && now_ms.saturating_sub(*at) < policy.no_return_ms)
        })
    }

    /// Whether the last attempt to move it there failed, and the retry delay is not over.
    pub(crate) fn is_in_retry_delay(&self, pid: HomePid, node: NodeId, now_ms: u64) -> bool {
        self.history
            .get(&pid)
            .is_some_and(|history| history.failed_target == Some(node) && now_ms < history.not_before_ms)
    }

    pub(crate) fn record_decision(&mut self, pid: HomePid, now_ms: u64, decision: Decision) {
        self.decisions.insert(pid, (now_ms, decision));
    }
}

impl PendingMove {
    /// Whether the target's load does not include it yet.
    pub(crate) fn charges(&self, cluster: &Cluster, now_ms: u64) -> bool {
        self.accepted_ms
            .or(self.arrived_ms)
            .is_none_or(|since| !published_since(cluster, self.to, since, now_ms))
    }

    /// Whether the source's load still includes it.
    pub(crate) fn credits(&self, cluster: &Cluster, now_ms: u64) -> bool {
        self.arrived_ms.is_none_or(|since| !published_since(cluster, self.from, since, now_ms))
    }

    pub(crate) fn arrived(&self) -> bool {
        self.arrived_ms.is_some()
    }
}

fn published_since(cluster: &Cluster, node: NodeId, since: u64, now_ms: u64) -> bool {
    sample_time(cluster, node, now_ms).is_some_and(|time| time > since)
}

/// When a node's entry was made, by this node's clock.
fn sample_time(cluster: &Cluster, node: NodeId, now_ms: u64) -> Option<u64> {
    cluster.node(node).map(|node| now_ms.saturating_sub(node.age_ms))
}

/// The number of recent moves as of now: each move counts half after `recent_move_half_life_ms`.
fn recent_moves(history: &History, policy: &Policy, now_ms: u64) -> f64 {
    let halves =
        now_ms.saturating_sub(history.counted_ms) as f64 / policy.recent_move_half_life_ms.max(1) as f64;
    history.moves * (-halves).exp2()
}
