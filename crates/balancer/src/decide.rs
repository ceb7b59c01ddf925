//! Decides once a second which processes of this home move, and where.

use crate::admit::MoveOffer;
use crate::candidate::{Candidate, Mover, Obstacle};
use crate::effective_view::EffectiveView;
use crate::memory;
use crate::policy::{Objective, Policy};
use crate::process::{Hint, ProcessSnapshot};
use crate::rng::Rng;
use crate::state::{Decision, DecisionState, StayReason};
use crate::view::Cluster;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tern_ids::{HomePid, NodeId};

/// Number of nodes considered for each process: those with the largest free share of a CPU. The moves
/// of one round ([`Policy::max_moves`]) cannot fill all of them.
const MAX_SHORTLIST: usize = 32;
/// A process whose average number of runnable threads is below this is idle, and gains nothing from
/// a move.
const IDLE_THREADS: f64 = 0.005;

/// Why a process moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MoveReason {
    /// It will finish earlier there.
    Faster,
    /// It makes so many calls to home that it is faster there, or its user declared it an I/O job.
    HomeCalls,
    /// Home has an idle CPU, which is no slower.
    Home,
    /// Its node is about to run out of memory.
    Memory,
    /// Its node wants it to leave.
    Evicted,
    /// It uses files of that node so much that it is faster there.
    Files,
}

impl MoveReason {
    /// Whether the move is made regardless of load.
    #[must_use]
    pub fn is_urgent(self) -> bool {
        matches!(self, Self::Memory | Self::Evicted)
    }
}

/// A move to make.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Move {
    /// The process.
    pub pid: HomePid,
    /// Where it runs.
    pub from: NodeId,
    /// Where it moves to; this home's own number brings it home.
    pub to: NodeId,
    /// Why.
    pub reason: MoveReason,
    /// The numbers behind the decision.
    pub candidate: Candidate,
    /// The offer for the target.
    pub offer: MoveOffer,
}

/// Decides which processes move now. The moves are charged to `state` as under way; the caller
/// reports their outcome ([`DecisionState::accepted`], [`DecisionState::arrived`],
/// [`DecisionState::failed`]). The result depends on the arguments only.
///
/// `now_ms` is any monotonic clock; `processes` are all of this home's, wherever they run.
pub fn decide(
    cluster: &Cluster,
    processes: &[ProcessSnapshot],
    state: &mut DecisionState,
    policy: &Policy,
    now_ms: u64,
    seed: u64,
) -> Vec<Move> {
    let processes: BTreeMap<HomePid, &ProcessSnapshot> = processes.iter().map(|p| (p.pid, p)).collect();
    let cluster = &*state.with_refusals(cluster, now_ms);
    state.observe(cluster, &processes, policy, now_ms);
    let view = EffectiveView::new(cluster, state, policy, now_ms);
    let mut round = Round { view, state, rng: Rng::new(seed), moves: Vec::new() };
    round.evict(&processes);
    memory::usher(&mut round, &processes);
    round.balance(&processes);
    round.moves
}

/// One decision in progress.
#[derive(Debug)]
pub(crate) struct Round<'a> {
    pub(crate) view: EffectiveView<'a>,
    pub(crate) state: &'a mut DecisionState,
    pub(crate) rng: Rng,
    moves: Vec<Move>,
}

impl Round<'_> {
    /// Starts the move that a candidate describes, and charges it.
    pub(crate) fn start_move(&mut self, mover: &Mover<'_>, candidate: Candidate, reason: MoveReason) {
        let (process, to) = (mover.process, candidate.node);
        let index = self.view.cluster.index_of(to);
        let load = index.and_then(|index| {
            let effective = self.view.nodes.get(index)?;
            Some(self.view.cluster.nodes().get(index)?.load_of(effective.runnable))
        });
        let max_load = if reason.is_urgent() { f64::MAX } else { mover.max_load(&self.view, &candidate) };
        let offer = MoveOffer {
            home: self.view.cluster.me(),
            pid: process.pid,
            threads: mover.threads,
            memory: process.memory(),
            estimated_load: load.unwrap_or(0.0),
            max_load,
            reason,
        };
        self.view.charge(process, to);
        self.state.record_start(process, to, self.view.policy, self.view.now_ms);
        let next = Move { pid: process.pid, from: process.at, to, reason, candidate, offer };
        self.state.record_decision(process.pid, self.view.now_ms, Decision::Moved(Box::new(next.clone())));
        self.moves.push(next);
    }

    /// Moves each process whose node wants it to leave to the node where it will be fastest. A locked
    /// process and an I/O job go home, and so does a process for which no other node is possible. All
    /// leave at once, whatever CPU time they have used.
    fn evict(&mut self, processes: &BTreeMap<HomePid, &ProcessSnapshot>) {
        let home = self.view.cluster.me();
        for process in processes.values().filter(|process| process.evicted && process.at != home) {
            if self.state.is_moving(process.pid) {
                continue;
            }
            let Some(mover) = Mover::new(&self.view, process) else { continue };
            let indices = 0..self.view.cluster.nodes().len();
            let all = indices.filter_map(|index| {
                let candidate = mover.candidate(&self.view, self.state, index)?;
                let refused = mover.hard_obstacle(&self.view, self.state, index).is_some();
                let last_resort = candidate.node == home;
                let unsuitable = candidate.obstacle == Some(Obstacle::NoMemory)
                    || (process.locked || process.hint == Hint::Io) && !last_resort;
                (last_resort || !refused && !unsuitable).then_some((unsuitable || refused, candidate))
            });
            let best = all.min_by(|(unsuitable, one), (other_unsuitable, other)| {
                unsuitable.cmp(other_unsuitable).then(one.pace.total_cmp(&other.pace))
            });
            if let Some((_, candidate)) = best {
                self.start_move(&mover, candidate, MoveReason::Evicted);
            }
        }
    }

    /// Moves processes to get more CPU or to wait less for other nodes. Makes the move that gains
    /// most and looks again, until no move gains enough or the limit of moves under way is reached.
    fn balance(&mut self, processes: &BTreeMap<HomePid, &ProcessSnapshot>) {
        let mut left: Vec<&ProcessSnapshot> = Vec::new();
        self.state.eligible_in_s = None;
        for process in processes.values() {
            match self.eligible(process) {
                Ok(()) => left.push(process),
                Err(stay) => {
                    self.note_eligibility(process, stay);
                    self.record_stay(process.pid, stay);
                }
            }
        }
        let shortlist = self.shortlist();
        while !left.is_empty() {
            let bound = self.best_share(&shortlist);
            let mut best: Option<(usize, Mover<'_>, Candidate)> = None;
            for (index, process) in left.iter().enumerate() {
                let Some(mover) = Mover::new(&self.view, process) else { continue };
                let found = self.best_candidate(&mover, &shortlist, bound);
                let candidate = match found {
                    Ok(candidate) => candidate,
                    Err(stay) => {
                        self.record_stay(process.pid, stay);
                        continue;
                    }
                };
                self.record_stay(process.pid, StayReason::Queued);
                if best.as_ref().is_none_or(|(_, _, best)| self.score(&candidate) > self.score(best)) {
                    best = Some((index, mover, candidate));
                }
            }
            let Some((index, mover, candidate)) = best else { return };
            if self.view.under_way >= self.view.policy.max_moves {
                return;
            }
            let reason = self.reason(&mover, &candidate);
            self.start_move(&mover, candidate, reason);
            left.remove(index);
        }
    }

    /// Whether a process is considered at all.
    fn eligible(&self, process: &ProcessSnapshot) -> Result<(), StayReason> {
        eligible(&self.view, self.state, process)
    }

    /// Records when a process that is too young, and mostly waits for a CPU, will have used enough
    /// CPU time.
    fn note_eligibility(&mut self, process: &ProcessSnapshot, stay: StayReason) {
        let StayReason::TooYoung { cpu_s, needed_s } = stay else { return };
        let Some(mover) = Mover::new(&self.view, process).filter(Mover::is_crowded) else { return };
        let eligible_in_s = (needed_s - cpu_s).max(0.0) * mover.wall_per_cpu / mover.threads.min(1.0);
        self.state.eligible_in_s =
            Some(self.state.eligible_in_s.map_or(eligible_in_s, |first| first.min(eligible_in_s)));
    }

    fn record_stay(&mut self, pid: HomePid, stay: StayReason) {
        self.state.record_decision(pid, self.view.now_ms, Decision::Stayed(stay));
    }

    fn score(&self, candidate: &Candidate) -> f64 {
        match self.view.policy.objective {
            Objective::Greedy => candidate.gain_s,
            Objective::Opportunity => candidate.opportunity_gain,
        }
    }

    /// The nodes where one more thread gets the largest CPU share, and home.
    fn shortlist(&self) -> Vec<usize> {
        let nodes = self.view.cluster.nodes();
        let mut open: Vec<(f64, usize)> = nodes
            .iter()
            .zip(&self.view.nodes)
            .enumerate()
            .filter(|(_, (_, effective))| effective.obstacle.is_none())
            .map(|(index, (node, effective))| (node.share(effective.runnable + 1.0), index))
            .collect();
        let by_share = |one: &(f64, usize), other: &(f64, usize)| other.0.total_cmp(&one.0);
        if open.len() > MAX_SHORTLIST {
            open.select_nth_unstable_by(MAX_SHORTLIST, |one, other| {
                by_share(one, other).then(one.1.cmp(&other.1))
            });
            open.truncate(MAX_SHORTLIST);
        }
        let mut indices: Vec<usize> = open.into_iter().map(|(_, index)| index).collect();
        indices.extend(self.view.cluster.index_of(self.view.cluster.me()));
        indices.sort_unstable();
        indices.dedup();
        indices
    }

    /// An upper bound of the CPU share that an arriving process gets.
    fn best_share(&self, shortlist: &[usize]) -> f64 {
        let share = |index: &usize| {
            let (node, effective) = (self.view.cluster.nodes().get(*index)?, self.view.nodes.get(*index)?);
            Some(node.share(effective.runnable))
        };
        shortlist.iter().filter_map(share).fold(f64::MIN_POSITIVE, f64::max)
    }

    /// The best candidate of a process, or what rules out the node where it would be fastest.
    fn best_candidate(
        &mut self,
        mover: &Mover<'_>,
        shortlist: &[usize],
        bound: f64,
    ) -> Result<Candidate, StayReason> {
        let home = self.view.cluster.me();
        let policy = self.view.policy;
        let hopeless = mover.pace < mover.pace_of_share(bound) * (1.0 + policy.margin);
        if hopeless && mover.process.at == home && policy.objective == Objective::Greedy {
            return Err(StayReason::NoBetter(Some(Obstacle::NotFaster)));
        }
        let files = mover.remote.files_on().filter_map(|node| self.view.cluster.index_of(node));
        let mut indices: Vec<usize> = shortlist.iter().copied().chain(files).collect();
        indices.sort_unstable();
        indices.dedup();
        let mut candidates: Vec<Candidate> =
            indices.iter().filter_map(|&to| mover.candidate(&self.view, self.state, to)).collect();
        // The shortlist is common to all processes; if this one cannot use any of it, consider all
        // nodes.
        let cannot_be_used = |obstacle: Option<Obstacle>| {
            !matches!(obstacle, None | Some(Obstacle::NotFaster | Obstacle::NotWorthwhile))
        };
        if candidates.iter().all(|p| cannot_be_used(p.obstacle))
            && shortlist.len() < self.view.cluster.nodes().len()
        {
            let all = 0..self.view.cluster.nodes().len();
            candidates = all.filter_map(|to| mover.candidate(&self.view, self.state, to)).collect();
        }
        let open: Vec<&Candidate> =
            candidates.iter().filter(|candidate| candidate.obstacle.is_none()).collect();
        let best = open.iter().map(|candidate| self.score(candidate)).fold(f64::NEG_INFINITY, f64::max);
        let equivalent: Vec<&Candidate> = open
            .into_iter()
            .filter(|candidate| self.score(candidate) >= best - policy.equivalent_gain * best.abs())
            .collect();
        if let Some(at_home) = equivalent.iter().find(|candidate| candidate.node == home) {
            return Ok((*at_home).clone());
        }
        if let Some(one) = equivalent.get(self.rng.below(equivalent.len())) {
            return Ok((*one).clone());
        }
        let others = candidates.iter().filter(|candidate| candidate.obstacle != Some(Obstacle::AlreadyThere));
        Err(StayReason::NoBetter(
            others.min_by(|one, other| one.pace.total_cmp(&other.pace)).and_then(|p| p.obstacle),
        ))
    }

    fn reason(&self, mover: &Mover<'_>, candidate: &Candidate) -> MoveReason {
        let faster = mover.pace - candidate.pace;
        if candidate.node != self.view.cluster.me() {
            let saved = mover.remote_wait - candidate.remote_wait;
            let is_near_files =
                mover.remote.has_files_on(candidate.node) && saved > 0.0 && saved >= faster / 2.0;
            if is_near_files { MoveReason::Files } else { MoveReason::Faster }
        } else if mover.process.hint == Hint::Io
            || (mover.remote_wait > 0.0 && mover.remote_wait >= faster / 2.0)
        {
            MoveReason::HomeCalls
        } else if mover.pace >= candidate.pace * (1.0 + self.view.policy.margin) {
            MoveReason::Faster
        } else {
            MoveReason::Home
        }
    }
}

/// Whether a process is considered at all; if not, why.
pub(crate) fn eligible(
    view: &EffectiveView<'_>,
    state: &DecisionState,
    process: &ProcessSnapshot,
) -> Result<(), StayReason> {
    if !process.movable {
        return Err(StayReason::NotMovable);
    }
    if process.locked {
        return Err(StayReason::Locked);
    }
    if state.is_moving(process.pid) {
        return Err(StayReason::Moving);
    }
    let is_node_alive = view.cluster.node(process.at).is_some_and(|node| node.alive);
    let Some(mover) = Mover::new(view, process).filter(|_| is_node_alive) else {
        return Err(StayReason::NodeUnknown);
    };
    if process.threads() < IDLE_THREADS {
        return Err(StayReason::Idle);
    }
    let needed_s = mover.needed_s(view.policy);
    // A process that belongs at home may go there while it is young.
    let files_at_home = process.hint == Hint::Io && process.at != view.cluster.me();
    if process.cpu_s < needed_s && !files_at_home {
        return Err(StayReason::TooYoung { cpu_s: process.cpu_s, needed_s });
    }
    let needed_s = state.residence_s(process.pid, view.policy, view.now_ms);
    if process.resident_s < needed_s {
        return Err(StayReason::TooRecent { here_s: process.resident_s, needed_s });
    }
    Ok(())
}
