//! What a home remembers between two decisions.

use crate::admit::Refusal;
use crate::decide::Move;
use crate::policy::Policy;
use crate::process::Process;
use crate::prospect::Bar;
use crate::trend::Trend;
use crate::view::Cluster;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use tern_ids::{HomePid, NodeId};

/// Refusals that are remembered.
const MOST_TOLD: usize = 256;

/// Why a process was left where it is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stay {
    /// It cannot be moved, or its administrator does not let it.
    NotMovable,
    /// It is locked.
    Locked,
    /// It is moving.
    UnderWay,
    /// Its node is not known to live, or is not in the view.
    OutOfSight,
    /// It hardly uses a CPU.
    Idle,
    /// It has used so many CPU seconds, and would have to have used so many.
    Young {
        /// Used.
        cpu_s: f64,
        /// Needed.
        needed_s: f64,
    },
    /// It has been here for so many seconds, and would have to have been for so many.
    Resident {
        /// Since it came.
        here_s: f64,
        /// Needed.
        needed_s: f64,
    },
    /// No node is better; this is what speaks against the best of them.
    NoBetter(Option<Bar>),
    /// There is one, but others of this home move now; its turn comes.
    InTurn,
}

/// The last word about a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It was to move.
    Moved(Box<Move>),
    /// It was to stay.
    Stayed(Stay),
}

/// A move that the view does not show yet.
#[derive(Debug, Clone)]
pub(crate) struct UnderWay {
    pub(crate) from: NodeId,
    pub(crate) to: NodeId,
    pub(crate) threads: f64,
    pub(crate) memory: u64,
    decided_ms: u64,
    /// Since when the target counts it as its own.
    accepted_ms: Option<u64>,
    arrived_ms: Option<u64>,
}

/// A program that was started somewhere, and is not in that node's load yet.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    pub(crate) on: NodeId,
    pub(crate) threads: f64,
    pub(crate) memory: u64,
    at_ms: u64,
}

/// A process of this home that has ended on another node, which may not have told of that yet.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) on: NodeId,
    pub(crate) threads: f64,
    at_ms: u64,
}

/// How a node stands, from its own mouth.
#[derive(Debug, Clone, Copy)]
struct Told {
    at_ms: u64,
    refusal: Refusal,
}

/// A process' moves of late.
#[derive(Debug, Clone, Default)]
struct History {
    moves: f64,
    counted_ms: u64,
    left: Vec<(NodeId, u64)>,
    failures: u32,
    failed_at: Option<NodeId>,
    not_before_ms: u64,
}

/// What a home remembers: moves under way and charged in advance, how often each process moved, how memory
/// shrinks, and the last word about each process.
#[derive(Debug, Clone, Default)]
pub struct State {
    pub(crate) moves: BTreeMap<HomePid, UnderWay>,
    pub(crate) placed: Vec<Placed>,
    pub(crate) ended: Vec<Ended>,
    /// Where each process ran when it was looked at last, and with how many threads.
    ran: BTreeMap<HomePid, (NodeId, f64)>,
    /// Seconds until the first of those that are too young here will have used enough, by the last decision.
    pub(crate) ripe_s: Option<f64>,
    history: BTreeMap<HomePid, History>,
    trends: BTreeMap<NodeId, Trend>,
    told: BTreeMap<NodeId, Told>,
    pub(crate) verdicts: BTreeMap<HomePid, (u64, Verdict)>,
}

impl State {
    /// The target has agreed; from now on its own load counts the arrival.
    pub fn accepted(&mut self, pid: HomePid, now_ms: u64) {
        if let Some(under_way) = self.moves.get_mut(&pid) {
            under_way.accepted_ms = Some(now_ms);
        }
    }

    /// The move failed: nothing is charged any more, and the next try there waits, twice as long each time (1 s
    /// to 64 s).
    pub fn failed(&mut self, pid: HomePid, now_ms: u64) {
        let Some(under_way) = self.take_back(pid) else { return };
        let history = self.history.entry(pid).or_default();
        history.failed_at = Some(under_way.to);
        history.not_before_ms = now_ms.saturating_add(1_000 << history.failures.min(6));
        history.failures = history.failures.saturating_add(1);
    }

    /// It did not move: what `began` counted is taken back.
    fn take_back(&mut self, pid: HomePid) -> Option<UnderWay> {
        let under_way = self.moves.remove(&pid)?;
        if let Some(history) = self.history.get_mut(&pid) {
            history.moves = (history.moves - 1.0).max(0.0);
            history.left.retain(|(node, _)| *node != under_way.from);
        }
        Some(under_way)
    }

    /// The view, with what nodes have told since.
    pub(crate) fn informed<'a>(&self, cluster: &'a Cluster, now_ms: u64) -> Cow<'a, Cluster> {
        if self.told.is_empty() {
            return Cow::Borrowed(cluster);
        }
        let mut cluster = cluster.clone();
        for (node, told) in &self.told {
            let age_ms = now_ms.saturating_sub(told.at_ms);
            // Until gossip says otherwise.
            let takes_guests = !matches!(told.refusal.bar, Bar::NoGuests | Bar::WayBusy);
            cluster.hear(*node, age_ms, told.refusal.load, told.refusal.mem_free, takes_guests);
        }
        Cow::Owned(cluster)
    }

    /// The target refused. Nothing is charged any more, and what it said of itself counts until gossip is newer.
    pub fn refused(&mut self, pid: HomePid, refusal: Refusal, now_ms: u64) {
        let Some(under_way) = self.moves.get(&pid) else { return };
        let to = under_way.to;
        self.take_back(pid);
        if self.told.len() < MOST_TOLD {
            self.told.insert(to, Told { at_ms: now_ms, refusal });
        }
    }

    /// The process runs at its target. `decide` also sees that by itself, from where the process is; told so it
    /// is known at the right time.
    pub fn arrived(&mut self, pid: HomePid, now_ms: u64) {
        let Some(under_way) = self.moves.get_mut(&pid).filter(|under_way| under_way.arrived_ms.is_none())
        else {
            return;
        };
        under_way.arrived_ms = Some(now_ms);
        if let Some(history) = self.history.get_mut(&pid) {
            (history.failures, history.failed_at) = (0, None);
            // The way may have taken longer than the time for which it must not go back.
            let from = under_way.from;
            history.left.iter_mut().filter(|(node, _)| *node == from).for_each(|(_, left)| *left = now_ms);
        }
    }

    /// The last word about a process, and when it was said.
    #[must_use]
    pub fn verdict(&self, pid: HomePid) -> Option<&(u64, Verdict)> {
        self.verdicts.get(&pid)
    }

    /// In how many seconds the first process that is too young now, on a crowded node, will be looked at: by then it is
    /// worth to decide again, and not a second later.
    #[must_use]
    pub fn ripe_s(&self) -> Option<f64> {
        self.ripe_s
    }

    /// Whether a move of it is under way.
    #[must_use]
    pub fn is_moving(&self, pid: HomePid) -> bool {
        self.moves.get(&pid).is_some_and(|under_way| under_way.arrived_ms.is_none())
    }

    /// How many moves are under way.
    #[must_use]
    pub fn moving(&self) -> usize {
        self.moves.values().filter(|under_way| under_way.arrived_ms.is_none()).count()
    }

    /// Takes in what the view and the processes show, and forgets what is past.
    pub(crate) fn observe(
        &mut self,
        cluster: &Cluster,
        processes: &BTreeMap<HomePid, &Process>,
        policy: &Policy,
        now_ms: u64,
    ) {
        let known = |pid: &HomePid| processes.contains_key(pid);
        self.history.retain(|pid, _| known(pid));
        // By then gossip knows it, or the view is too old to be used.
        self.told.retain(|_, told| now_ms.saturating_sub(told.at_ms) < policy.max_age_ms);
        self.verdicts.retain(|pid, _| known(pid));
        let landed: Vec<HomePid> = self
            .moves
            .iter()
            .filter(|(pid, under_way)| processes.get(pid).is_some_and(|process| process.at == under_way.to))
            .map(|(pid, _)| *pid)
            .collect();
        for pid in landed {
            self.arrived(pid, now_ms);
        }
        let shown = |node, since: u64| sample_time(cluster, node, now_ms).is_none_or(|time| time > since);
        self.moves.retain(|pid, under_way| {
            let Some(arrived) = under_way.arrived_ms else {
                return known(pid) && now_ms.saturating_sub(under_way.decided_ms) < policy.lost_after_ms;
            };
            // Both ends must have spoken since; a minute is enough in any case.
            known(pid)
                && now_ms.saturating_sub(arrived) < 60_000
                && !(shown(under_way.from, arrived)
                    && shown(under_way.to, under_way.accepted_ms.unwrap_or(arrived)))
        });
        let settled = 3 * policy.load_settle_ms;
        self.placed.retain(|placed| {
            let since = placed.at_ms.saturating_add(settled);
            !shown(placed.on, since) && now_ms.saturating_sub(placed.at_ms) < 60_000
        });
        self.follow_ends(cluster, processes, policy, now_ms);
        self.follow_memory(cluster, processes, now_ms);
    }

    /// A home knows at once that a process of its own has ended, wherever that was. The node where it ran has it in its
    /// next word; until then what it has told before is too much by that. Of this node itself its own load knows.
    fn follow_ends(
        &mut self,
        cluster: &Cluster,
        processes: &BTreeMap<HomePid, &Process>,
        policy: &Policy,
        now_ms: u64,
    ) {
        let gone =
            self.ran.iter().filter(|(pid, (on, _))| !processes.contains_key(pid) && *on != cluster.me());
        let gone = gone.map(|(_, (on, threads))| Ended { on: *on, threads: *threads, at_ms: now_ms });
        self.ended.extend(gone);
        self.ended.retain(|ended| {
            let told = sample_time(cluster, ended.on, now_ms).is_none_or(|time| time > ended.at_ms);
            !told && now_ms.saturating_sub(ended.at_ms) < policy.max_age_ms
        });
        self.ran = processes.values().map(|process| (process.pid, (process.at, process.threads()))).collect();
    }

    /// Only where own processes are, since only those can be taken away.
    fn follow_memory(&mut self, cluster: &Cluster, processes: &BTreeMap<HomePid, &Process>, now_ms: u64) {
        self.trends.retain(|node, _| processes.values().any(|process| process.at == *node));
        for process in processes.values() {
            let Some(node) = cluster.node(process.at) else { continue };
            self.trends.entry(node.id).or_default().sample(node.mem_free, now_ms.saturating_sub(node.age_ms));
        }
    }

    /// How fast a node's memory fills, in bytes a second, as far as it has been watched; never negative.
    pub(crate) fn filling(&self, node: NodeId) -> f64 {
        self.trends.get(&node).map_or(0.0, Trend::filling)
    }

    /// Charges a move, before its report.
    pub(crate) fn began(&mut self, process: &Process, to: NodeId, policy: &Policy, now_ms: u64) {
        let under_way = UnderWay {
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
        history.moves = faded(history, policy, now_ms) + 1.0;
        history.counted_ms = now_ms;
        history.left.retain(|(_, left)| now_ms.saturating_sub(*left) < policy.return_ms);
        history.left.push((process.at, now_ms));
    }

    /// Charges a program that starts on a node.
    pub(crate) fn placed(&mut self, on: NodeId, threads: f64, memory: u64, now_ms: u64) {
        // More than that at once are no longer told apart by one more.
        if self.placed.len() < 100_000 {
            self.placed.push(Placed { on, threads, memory, at_ms: now_ms });
        }
    }

    /// Seconds for which a process must stay where it is.
    pub(crate) fn residence_s(&self, pid: HomePid, policy: &Policy, now_ms: u64) -> f64 {
        let moves = self.history.get(&pid).map_or(0.0, |history| faded(history, policy, now_ms));
        (policy.residence_s * moves.exp2()).min(policy.longest_residence_s)
    }

    /// Whether it left this node just now.
    pub(crate) fn just_left(&self, pid: HomePid, node: NodeId, policy: &Policy, now_ms: u64) -> bool {
        self.history.get(&pid).is_some_and(|history| {
            history
                .left
                .iter()
                .any(|(left, at)| *left == node && now_ms.saturating_sub(*at) < policy.return_ms)
        })
    }

    /// Whether the last try to move it there failed, and the next one waits.
    pub(crate) fn waits_after_failure(&self, pid: HomePid, node: NodeId, now_ms: u64) -> bool {
        self.history
            .get(&pid)
            .is_some_and(|history| history.failed_at == Some(node) && now_ms < history.not_before_ms)
    }

    pub(crate) fn say(&mut self, pid: HomePid, now_ms: u64, verdict: Verdict) {
        self.verdicts.insert(pid, (now_ms, verdict));
    }
}

impl UnderWay {
    /// Whether the target's load lacks it still.
    pub(crate) fn charges(&self, cluster: &Cluster, now_ms: u64) -> bool {
        self.accepted_ms.or(self.arrived_ms).is_none_or(|since| !spoke_since(cluster, self.to, since, now_ms))
    }

    /// Whether the source's load still has it.
    pub(crate) fn credits(&self, cluster: &Cluster, now_ms: u64) -> bool {
        self.arrived_ms.is_none_or(|since| !spoke_since(cluster, self.from, since, now_ms))
    }

    pub(crate) fn arrived(&self) -> bool {
        self.arrived_ms.is_some()
    }
}

fn spoke_since(cluster: &Cluster, node: NodeId, since: u64, now_ms: u64) -> bool {
    sample_time(cluster, node, now_ms).is_some_and(|time| time > since)
}

/// When a node's entry was made, by our clock.
fn sample_time(cluster: &Cluster, node: NodeId, now_ms: u64) -> Option<u64> {
    cluster.node(node).map(|node| now_ms.saturating_sub(node.age_ms))
}

/// How many moves of late there are now: each halves in `forget_move_ms`.
fn faded(history: &History, policy: &Policy, now_ms: u64) -> f64 {
    let halves = now_ms.saturating_sub(history.counted_ms) as f64 / policy.forget_move_ms.max(1) as f64;
    history.moves * (-halves).exp2()
}
