//! One process on one node: its pace there, the cost of the move, and the gain.
//!
//! The pace of a process is the wall time in which it does one standard CPU second of work. It
//! consists of running and waiting for a CPU, of sleep, which is the same everywhere, and of
//! waiting for calls made at home and for files of other nodes.

use crate::effective_view::EffectiveView;
use crate::policy::{Objective, Policy};
use crate::process::{Hint, ProcessSnapshot};
use crate::remote_waits::RemoteWaits;
use crate::state::DecisionState;
use crate::view::{LinkCost, NodeSnapshot, STANDARD_SPEED};
use serde::{Deserialize, Serialize};
use tern_ids::NodeId;

/// The reason that rules out a node for a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Obstacle {
    /// The process is already there.
    AlreadyThere,
    /// The node is dead or suspected.
    Dead,
    /// The information about the node is too old.
    Stale,
    /// The node takes no guests.
    NoGuests,
    /// The process may not run there.
    Forbidden,
    /// It is an I/O job (`iojob`), which belongs at home.
    FilesAtHome,
    /// Too little memory is free.
    NoMemory,
    /// The node reported a load higher than the home estimated.
    Overloaded,
    /// The process left that node a short time ago.
    JustLeft,
    /// The last attempt failed, and the retry delay is not over.
    RetryDelay,
    /// It would not be faster there, or not by a reliable margin.
    NotFaster,
    /// The move costs more than it gains.
    NotWorthwhile,
    /// Enough moves are under way between the two nodes.
    LinkBusy,
}

/// The cost of a move.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MoveCost {
    /// Seconds from start to end; the process runs for most of it.
    pub duration_s: f64,
    /// Seconds for which it is frozen.
    pub frozen_s: f64,
    /// CPU seconds on both nodes together.
    pub cpu_s: f64,
}

/// One process on one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// The node.
    pub node: NodeId,
    /// Wall seconds for one standard CPU second of work on that node.
    pub pace: f64,
    /// The pace on the node where it runs.
    pub pace_here: f64,
    /// The part of `pace` spent waiting for calls to home and for files of other nodes.
    pub remote_wait: f64,
    /// Standard CPU seconds that it is expected to use from now on.
    pub rest_s: f64,
    /// The cost of the move.
    pub cost: MoveCost,
    /// Seconds by which the process ends earlier, after the cost; negative: later.
    pub gain_s: f64,
    /// Decrease of the opportunity cost of the cluster, the sum over its nodes of a cost that grows
    /// exponentially with their load (Amir et al. 2000). 0 under the greedy policy.
    pub opportunity_gain: f64,
    /// The reason that rules out the node, if there is one.
    pub obstacle: Option<Obstacle>,
}

/// A process on its current node: the values common to all its candidates.
#[derive(Debug)]
pub(crate) struct Mover<'a> {
    pub(crate) process: &'a ProcessSnapshot,
    pub(crate) index: usize,
    pub(crate) threads: f64,
    pub(crate) pace: f64,
    /// The part of `pace` spent waiting for calls to home and for files of other nodes.
    pub(crate) remote_wait: f64,
    /// Sleep for each second of work, the same on every node.
    sleep: f64,
    pub(crate) remote: RemoteWaits,
    pub(crate) rest_s: f64,
    /// Wall seconds that one CPU second takes here.
    pub(crate) wall_per_cpu: f64,
}

impl<'a> Mover<'a> {
    /// `None` if its node is not in the view.
    pub(crate) fn new(view: &EffectiveView<'_>, process: &'a ProcessSnapshot) -> Option<Self> {
        let index = view.cluster.index_of(process.at)?;
        let (node, effective) = (view.cluster.nodes().get(index)?, view.nodes.get(index)?);
        let threads = process.threads().max(0.001);
        let share = node.share(effective.runnable.max(threads));
        let work = threads * share;
        let busy = threads.min(1.0);
        let sleep = (1.0 - busy) / (busy * share);
        let mut remote =
            if process.hint == Hint::Cpu { RemoteWaits::none() } else { RemoteWaits::of(process, work) };
        // The observed sleep includes the waiting for calls, so the waiting cannot exceed it. The
        // estimate can: the link's cost is estimated from messages to a daemon, and a process that
        // is observed to compute all the time does not wait. The estimate is then assumed to be
        // wrong by the same factor on other nodes.
        let estimated = remote.wait(view, node);
        let remote_wait = estimated.min(sleep);
        if estimated > 0.0 {
            remote.scale(view, node.id, remote_wait / estimated);
        }
        let sleep = sleep - remote_wait;
        let cpu_s = if process.cpu_s.is_finite() { process.cpu_s.max(0.0) } else { 0.0 };
        Some(Self {
            process,
            index,
            threads,
            pace: 1.0 / share + sleep + remote_wait,
            remote_wait,
            sleep,
            remote,
            rest_s: cpu_s * f64::from(node.speed) / STANDARD_SPEED,
            wall_per_cpu: effective.runnable.max(threads) / node.cpus.min(effective.runnable.max(threads)),
        })
    }

    /// CPU seconds that it must have used to be considered.
    pub(crate) fn needed_s(&self, policy: &Policy) -> f64 {
        (policy.min_cpu_s / self.wall_per_cpu.max(1.0)).max(policy.min_crowded_cpu_s.min(policy.min_cpu_s))
    }

    /// Whether it waits for a CPU longer than it runs.
    pub(crate) fn is_crowded(&self) -> bool {
        self.wall_per_cpu > 2.0
    }

    /// The best pace that a node with this CPU share could give it.
    pub(crate) fn pace_of_share(&self, share: f64) -> f64 {
        1.0 / share + self.sleep
    }

    /// The candidate on node `to` (an index), and the reason that rules that node out.
    pub(crate) fn candidate(
        &self,
        view: &EffectiveView<'_>,
        state: &DecisionState,
        to: usize,
    ) -> Option<Candidate> {
        let (node, effective) = (view.cluster.nodes().get(to)?, view.nodes.get(to)?);
        let runnable = if to == self.index { effective.runnable } else { effective.runnable + self.threads };
        let share = node.share(runnable.max(self.threads));
        let remote_wait = self.remote.wait(view, node);
        let pace = 1.0 / share + self.sleep + remote_wait;
        let from = view.cluster.nodes().get(self.index)?;
        let cost = self.cost(view, from, node);
        let left = (self.rest_s - cost.duration_s / self.pace).max(0.0);
        let gain_s = left * (self.pace - pace) - cost.frozen_s - cost.cpu_s * self.wall_per_cpu;
        let opportunity_gain = match view.policy.objective {
            Objective::Greedy => 0.0,
            Objective::Opportunity => self.opportunity_gain(view, from, node, to),
        };
        let mut candidate = Candidate {
            node: node.id,
            pace,
            pace_here: self.pace,
            remote_wait,
            rest_s: self.rest_s,
            cost,
            gain_s,
            opportunity_gain,
            obstacle: None,
        };
        let room = self.memory_left(view, to, view.policy.ordinary_growth_s);
        candidate.obstacle = self
            .hard_obstacle(view, state, to)
            .or_else(|| room.is_some_and(|room| room < 0.0).then_some(Obstacle::NoMemory))
            .or_else(|| self.soft_obstacle(view, state, &candidate, runnable <= node.cpus + 0.05));
        Some(candidate)
    }

    /// The obstacle that rules out a node even for an urgent move.
    pub(crate) fn hard_obstacle(
        &self,
        view: &EffectiveView<'_>,
        state: &DecisionState,
        to: usize,
    ) -> Option<Obstacle> {
        let (node, effective) = (view.cluster.nodes().get(to)?, view.nodes.get(to)?);
        let process = self.process;
        if to == self.index {
            return Some(Obstacle::AlreadyThere);
        }
        effective
            .obstacle
            .or_else(|| (!process.may_run_on(node.id, view.cluster.me())).then_some(Obstacle::Forbidden))
            .or_else(|| {
                state.is_in_retry_delay(process.pid, node.id, view.now_ms).then_some(Obstacle::RetryDelay)
            })
    }

    /// Bytes left above the reserve after the process has arrived, and after its memory and the
    /// node's memory in use have grown for this many seconds. The result is also negative if the
    /// node's memory pressure is too high. `None` if the node does not report its memory.
    pub(crate) fn memory_left(&self, view: &EffectiveView<'_>, to: usize, seconds: f64) -> Option<f64> {
        let (node, effective) = (view.cluster.nodes().get(to)?, view.nodes.get(to)?);
        if node.mem_total == 0 {
            return None;
        }
        if node.mem_pressure > view.policy.max_pressure {
            return Some(-1.0);
        }
        let growth = (self.process.growth as f64 + effective.fill_rate) * seconds;
        Some(effective.available() - self.process.memory() as f64 - growth)
    }

    /// The obstacle that rules out a node unless the move is urgent.
    fn soft_obstacle(
        &self,
        view: &EffectiveView<'_>,
        state: &DecisionState,
        candidate: &Candidate,
        idle_cpu: bool,
    ) -> Option<Obstacle> {
        let (policy, process) = (view.policy, self.process);
        let is_homeward = candidate.node == view.cluster.me();
        if process.hint == Hint::Io && !is_homeward {
            return Some(Obstacle::FilesAtHome);
        }
        if state.has_just_left(process.pid, candidate.node, policy, view.now_ms) {
            return Some(Obstacle::JustLeft);
        }
        let worth = |times: f64| self.rest_s >= times * candidate.cost.cpu_s;
        let is_worthwhile = worth(policy.min_rest_per_cost);
        // Home is preferred to an equal node if the move slows down no process at home: the cluster
        // then has one guest less, and the process no longer depends on a link. The objective must
        // not undo the move afterwards.
        let is_stable = policy.objective == Objective::Greedy || candidate.opportunity_gain >= 0.0;
        let prefers_home = is_homeward && idle_cpu && is_stable && candidate.pace <= self.pace;
        if is_homeward && process.hint == Hint::Io {
            return (!is_worthwhile).then_some(Obstacle::NotWorthwhile);
        }
        if prefers_home && worth(policy.min_rest_per_home_cost) {
            return None;
        }
        let better = match policy.objective {
            Objective::Greedy => {
                self.pace - self.unsaved_wait(policy, is_homeward && !idle_cpu)
                    >= candidate.pace * (1.0 + state.margin(process.pid, policy, view.now_ms))
            }
            Objective::Opportunity => {
                candidate.opportunity_gain > 0.0 && self.pace * (1.0 + policy.margin / 2.0) >= candidate.pace
            }
        };
        if !better {
            return Some(Obstacle::NotFaster);
        }
        let gains = candidate.gain_s >= policy.min_gain_s || policy.objective == Objective::Opportunity;
        if !gains || !is_worthwhile {
            return Some(Obstacle::NotWorthwhile);
        }
        let pair = view.moves_between(process.at, candidate.node);
        // Large processes go one after the other: sent together, all would arrive when the last one
        // does.
        let second = link_bytes_per_s(view, candidate.node);
        let in_turn = view.leaving_bytes(process.at) > second && process.memory() as f64 > second / 2.0;
        let busy = pair >= policy.max_moves_per_pair || in_turn || view.filling_up.contains(&process.at);
        busy.then_some(Obstacle::LinkBusy)
    }

    /// The part of the process's waiting for calls that a return to a busy home is assumed not to
    /// save. On a busy node other processes compute while this one waits for a call, so the waiting
    /// costs less than it seems.
    fn unsaved_wait(&self, policy: &Policy, to_busy_home: bool) -> f64 {
        if to_busy_home { policy.call_wait_discount * self.remote_wait } else { 0.0 }
    }

    /// The estimated cost of a move with pre-copy. The memory is sent, then the pages written
    /// meanwhile, in up to five rounds or until little is left. The remainder is sent while the
    /// process is frozen.
    pub(crate) fn cost(&self, view: &EffectiveView<'_>, from: &NodeSnapshot, to: &NodeSnapshot) -> MoveCost {
        const MAX_ROUNDS: u32 = 5;
        const STOP_COPY_BYTES: f64 = 2.0 * 1024.0 * 1024.0;
        let home = view.cluster.me();
        let link = |node: &NodeSnapshot| {
            if node.id == home { LinkCost { rtt_us: 0, bytes_per_s: u64::MAX } } else { node.link }
        };
        let (one, other) = (link(from), link(to));
        let sharers = f64::from(view.moves_from(from.id) + 1);
        let bytes_per_s = one.bytes_per_s.min(other.bytes_per_s) as f64 / sharers;
        let rtt = f64::from(one.rtt_us.max(other.rtt_us)) * 1e-6;
        let dirty = self.process.dirty.max(self.process.growth) as f64;
        let (mut left, mut sent, mut time) = (self.process.rss as f64, 0.0, 0.0);
        for _ in 0..MAX_ROUNDS {
            if left < STOP_COPY_BYTES {
                break;
            }
            let round = left / bytes_per_s;
            (sent, time) = (sent + left, time + round);
            left = (dirty * round).min(self.process.rss as f64);
        }
        let frozen_s = view.policy.freeze_s + 2.0 * rtt + left / bytes_per_s;
        MoveCost { duration_s: time + frozen_s, frozen_s, cpu_s: (sent + left) / view.policy.bytes_per_cpu_s }
    }

    /// Decrease of the sum of n^utilisation if the process moves from `from` to `node`. The
    /// increase on `node` counts with the policy's margin.
    fn opportunity_gain(
        &self,
        view: &EffectiveView<'_>,
        from: &NodeSnapshot,
        node: &NodeSnapshot,
        to: usize,
    ) -> f64 {
        let Some(there) = view.nodes.get(to) else { return 0.0 };
        let cpu = |runnable: f64| node.load_of(runnable) / view.top_load;
        let increase = view.cost(cpu(there.runnable + self.threads)) - view.cost(cpu(there.runnable))
            + self.memory_cost(view, node, there.free);
        self.current_cost(view, from) - increase * (1.0 + view.policy.margin)
    }

    /// The contribution of the process to the sum on its current node.
    fn current_cost(&self, view: &EffectiveView<'_>, from: &NodeSnapshot) -> f64 {
        let Some(here) = view.nodes.get(self.index) else { return 0.0 };
        let cpu = |runnable: f64| from.load_of(runnable.max(0.0)) / view.top_load;
        view.cost(cpu(here.runnable)) - view.cost(cpu(here.runnable - self.threads))
            + self.memory_cost(view, from, here.free + self.process.memory() as f64)
    }

    /// The contribution of the process's memory to the sum on a node that has `free` bytes free
    /// before the process arrives.
    fn memory_cost(&self, view: &EffectiveView<'_>, node: &NodeSnapshot, free: f64) -> f64 {
        if node.mem_total == 0 {
            return 0.0;
        }
        let cost = |free: f64| view.cost(1.0 - (free / node.mem_total as f64).min(1.0));
        cost(free - self.process.memory() as f64) - cost(free)
    }

    /// The load of a node above which a move of the process to that node does not decrease the sum.
    /// At this load the process contributes as much there, with the margin, as it does here.
    fn max_relieving_load(&self, view: &EffectiveView<'_>, node: &NodeSnapshot) -> f64 {
        let seen = view.cluster.nodes().get(self.index).zip(view.node(node.id));
        let Some((from, there)) = seen else { return 0.0 };
        let memory = self.memory_cost(view, node, there.free);
        let affordable = self.current_cost(view, from) / (1.0 + view.policy.margin) - memory;
        // Solves n^(u + own) - n^u = affordable for u.
        let own = node.load_of(self.threads) / view.top_load;
        let utilisation = (affordable.max(0.0) / (view.cost(own) - 1.0)).log(view.base);
        (utilisation * view.top_load).max(0.0)
    }

    /// The load of the target above which the target should refuse the process: the lower of two
    /// loads. At the first load, the pace there would be worse than estimated by
    /// `max_estimate_error`: another process has arrived first, and other nodes are better. At the
    /// second load, the move gains nothing. Without the second limit, two homes with old
    /// information would follow each other between two nodes for ever, if the jobs of either home
    /// fit on one node. With [`Objective::Opportunity`] the load is also at most the one above
    /// which the sum does not decrease.
    pub(crate) fn max_load(&self, view: &EffectiveView<'_>, candidate: &Candidate) -> f64 {
        let Some(node) = view.cluster.node(candidate.node) else { return 0.0 };
        let gaining = self.pace / (1.0 + view.policy.margin);
        let expected = candidate.pace * (1.0 + view.policy.max_estimate_error);
        let waiting = gaining.min(expected) - self.sleep - candidate.remote_wait;
        let speed = f64::from(node.speed) / STANDARD_SPEED;
        let limit = node.load_of((waiting.max(0.0) * speed * node.cpus - self.threads).max(0.0));
        match view.policy.objective {
            Objective::Greedy => limit,
            Objective::Opportunity => limit.min(self.max_relieving_load(view, node)),
        }
    }
}

/// Bytes a second that the link to a node carries.
fn link_bytes_per_s(view: &EffectiveView<'_>, node: NodeId) -> f64 {
    view.cluster.node(node).map_or(f64::INFINITY, |node| node.link.bytes_per_s as f64)
}
