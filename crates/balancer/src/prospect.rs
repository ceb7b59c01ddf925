//! One process on one node: its pace there, what the way costs, what is gained.
//!
//! A process' pace is the wall time in which it gets one standard CPU second of work done: it runs, or waits for
//! its turn; it sleeps as it does everywhere; and it waits for what is made elsewhere.

use crate::ground::Ground;
use crate::policy::{Objective, Policy};
use crate::process::{Hint, Process};
use crate::state::State;
use crate::talk::Talk;
use crate::view::{LinkCost, Node, STANDARD_SPEED};
use serde::{Deserialize, Serialize};
use tern_ids::NodeId;

/// What speaks against a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bar {
    /// It is there.
    Here,
    /// The node is dead, or in doubt.
    Dead,
    /// What is known of it is too old.
    OldNews,
    /// The node takes no guests.
    NoGuests,
    /// The process may not run there.
    Forbidden,
    /// It does much input and output (`iojob`), which is made at home.
    FilesAtHome,
    /// Too little memory is free.
    NoMemory,
    /// The node said that its load is higher than the home believed.
    Crowded,
    /// It left that node just now.
    JustLeft,
    /// The last try failed, and the next one waits.
    FailedBefore,
    /// It would not be faster there, or not by enough to be sure.
    NotFaster,
    /// The way costs more than is gained.
    NotWorth,
    /// Enough moves are under way between the two nodes.
    WayBusy,
}

/// What a move costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Passage {
    /// Seconds from beginning to end; most of it the process runs on.
    pub duration_s: f64,
    /// Seconds for which it stands still.
    pub frozen_s: f64,
    /// CPU seconds of both nodes.
    pub cpu_s: f64,
}

/// One process on one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prospect {
    /// Which node.
    pub node: NodeId,
    /// Seconds for one standard CPU second of work, there.
    pub pace: f64,
    /// The same where it is.
    pub pace_here: f64,
    /// The part of `pace` in which it waits for calls to home, and for files of other nodes.
    pub talk: f64,
    /// Standard CPU seconds that it is expected to go on for.
    pub rest_s: f64,
    /// What the move costs.
    pub passage: Passage,
    /// Seconds by which the process ends earlier, the cost subtracted; negative: later.
    pub gain_s: f64,
    /// By how much the cluster's opportunity cost falls (0 under the greedy policy).
    pub relief: f64,
    /// What speaks against it, if anything.
    pub bar: Option<Bar>,
}

/// A process where it is: what its prospects have in common.
#[derive(Debug)]
pub(crate) struct Mover<'a> {
    pub(crate) process: &'a Process,
    pub(crate) place: usize,
    pub(crate) threads: f64,
    pub(crate) pace: f64,
    /// The part of that in which it waits for calls to home, and for files of other nodes.
    pub(crate) talk: f64,
    /// Sleep that belongs to it wherever it runs, for each second of work.
    sleep: f64,
    pub(crate) talks: Talk,
    pub(crate) rest_s: f64,
    /// How long a second of CPU takes it here.
    pub(crate) stretch: f64,
}

impl<'a> Mover<'a> {
    /// `None` if its node is not in the view.
    pub(crate) fn new(ground: &Ground<'_>, process: &'a Process) -> Option<Self> {
        let place = ground.cluster.place_of(process.at)?;
        let (node, stand) = (ground.cluster.nodes().get(place)?, ground.stands.get(place)?);
        let threads = process.threads().max(0.001);
        let share = node.share(stand.runnable.max(threads));
        let work = threads * share;
        let busy = threads.min(1.0);
        let sleep = (1.0 - busy) / (busy * share);
        let mut talks = if process.hint == Hint::Cpu { Talk::silent() } else { Talk::of(process, work) };
        // What it waits for its calls here is no sleep of its own. Nor can it be more than it is seen to sleep: what is
        // believed of the link comes from messages to a daemon, and whoever is seen to compute all the time does not
        // wait. It will be as wrong elsewhere.
        let believed = talks.wait(ground, node);
        let talk = believed.min(sleep);
        if believed > 0.0 {
            talks.lessen(ground, node.id, talk / believed);
        }
        let sleep = sleep - talk;
        let cpu_s = if process.cpu_s.is_finite() { process.cpu_s.max(0.0) } else { 0.0 };
        Some(Self {
            process,
            place,
            threads,
            pace: 1.0 / share + sleep + talk,
            talk,
            sleep,
            talks,
            rest_s: cpu_s * f64::from(node.speed) / STANDARD_SPEED,
            stretch: stand.runnable.max(threads) / node.cpus.min(stand.runnable.max(threads)),
        })
    }

    /// CPU seconds that it must have used to be considered.
    pub(crate) fn needed_s(&self, policy: &Policy) -> f64 {
        (policy.young_cpu_s / self.stretch.max(1.0)).max(policy.least_cpu_s.min(policy.young_cpu_s))
    }

    /// Whether it waits for a CPU longer than it has one.
    pub(crate) fn is_crowded(&self) -> bool {
        self.stretch > 2.0
    }

    /// The best pace that a node with this share could give it.
    pub(crate) fn pace_of_share(&self, share: f64) -> f64 {
        1.0 / share + self.sleep
    }

    /// What it has to hope for at a place of the cluster, and what speaks against it.
    pub(crate) fn prospect(&self, ground: &Ground<'_>, state: &State, to: usize) -> Option<Prospect> {
        let (node, stand) = (ground.cluster.nodes().get(to)?, ground.stands.get(to)?);
        let runnable = if to == self.place { stand.runnable } else { stand.runnable + self.threads };
        let share = node.share(runnable.max(self.threads));
        let talk = self.talks.wait(ground, node);
        let pace = 1.0 / share + self.sleep + talk;
        let from = ground.cluster.nodes().get(self.place)?;
        let passage = self.passage(ground, from, node);
        let left = (self.rest_s - passage.duration_s / self.pace).max(0.0);
        let gain_s = left * (self.pace - pace) - passage.frozen_s - passage.cpu_s * self.stretch;
        let relief = match ground.policy.objective {
            Objective::Greedy => 0.0,
            Objective::Opportunity => self.relief(ground, from, node, to),
        };
        let mut prospect = Prospect {
            node: node.id,
            pace,
            pace_here: self.pace,
            talk,
            rest_s: self.rest_s,
            passage,
            gain_s,
            relief,
            bar: None,
        };
        let room = self.room_left(ground, to, ground.policy.calm_room_s);
        prospect.bar = self
            .must_not(ground, state, to)
            .or_else(|| room.is_some_and(|room| room < 0.0).then_some(Bar::NoMemory))
            .or_else(|| self.should_not(ground, state, &prospect, runnable <= node.cpus + 0.05));
        Some(prospect)
    }

    /// What forbids it, also in an emergency.
    pub(crate) fn must_not(&self, ground: &Ground<'_>, state: &State, to: usize) -> Option<Bar> {
        let (node, stand) = (ground.cluster.nodes().get(to)?, ground.stands.get(to)?);
        let process = self.process;
        if to == self.place {
            return Some(Bar::Here);
        }
        stand
            .bar
            .or_else(|| (!process.may_run_on(node.id, ground.cluster.me())).then_some(Bar::Forbidden))
            .or_else(|| {
                state.waits_after_failure(process.pid, node.id, ground.now_ms).then_some(Bar::FailedBefore)
            })
    }

    /// Bytes that are left above the reserve when it is there and all has grown for so many seconds more; `None`
    /// if the node does not say how much memory it has.
    pub(crate) fn room_left(&self, ground: &Ground<'_>, to: usize, seconds: f64) -> Option<f64> {
        let (node, stand) = (ground.cluster.nodes().get(to)?, ground.stands.get(to)?);
        if node.mem_total == 0 {
            return None;
        }
        if node.mem_pressure > ground.policy.full_pressure {
            return Some(-1.0);
        }
        let growth = (self.process.growth as f64 + stand.filling) * seconds;
        Some(stand.room() - self.process.memory() as f64 - growth)
    }

    /// What speaks against it where nothing is urgent.
    fn should_not(
        &self,
        ground: &Ground<'_>,
        state: &State,
        prospect: &Prospect,
        idle_cpu: bool,
    ) -> Option<Bar> {
        let (policy, process) = (ground.policy, self.process);
        let homeward = prospect.node == ground.cluster.me();
        if process.hint == Hint::Io && !homeward {
            return Some(Bar::FilesAtHome);
        }
        if state.just_left(process.pid, prospect.node, policy, ground.now_ms) {
            return Some(Bar::JustLeft);
        }
        let worth = |times: f64| self.rest_s >= times * prospect.passage.cpu_s;
        let worth_the_way = worth(policy.rest_per_cost);
        // Home is better than an equal place, if nobody there is put out: a guest less, a link less to break.
        // Nor may it be what the policy would undo again.
        let lasts = policy.objective == Objective::Greedy || prospect.relief >= 0.0;
        let welcome_home = homeward && idle_cpu && lasts && prospect.pace <= self.pace;
        if homeward && process.hint == Hint::Io {
            return (!worth_the_way).then_some(Bar::NotWorth);
        }
        if welcome_home && worth(policy.rest_per_home_cost) {
            return None;
        }
        let better = match policy.objective {
            Objective::Greedy => {
                self.pace - self.doubt(policy, homeward && !idle_cpu) >= prospect.pace * (1.0 + policy.margin)
            }
            Objective::Opportunity => {
                prospect.relief > 0.0 && self.pace * (1.0 + policy.margin / 2.0) >= prospect.pace
            }
        };
        if !better {
            return Some(Bar::NotFaster);
        }
        let gains = prospect.gain_s >= policy.least_gain_s || policy.objective == Objective::Opportunity;
        if !gains || !worth_the_way {
            return Some(Bar::NotWorth);
        }
        let pair = ground.pair(process.at, prospect.node);
        // Large ones go one after the other: sent together, all would arrive when the last one does.
        let second = node_carries(ground, prospect.node);
        let in_turn = ground.leaving_bytes(process.at) > second && process.memory() as f64 > second / 2.0;
        let busy = pair >= policy.moves_per_pair || in_turn || ground.filling_up.contains(&process.at);
        busy.then_some(Bar::WayBusy)
    }

    /// The part of its pace here that may not be gone at home. While it waits for a call others compute, and while they
    /// wait it does: on a busy node waiting costs less than it seems, and going from one busy node to another gains less.
    fn doubt(&self, policy: &Policy, to_busy_home: bool) -> f64 {
        if to_busy_home { policy.talk_doubt * self.talk } else { 0.0 }
    }

    /// Pre-copy: the memory, then what was written meanwhile, in up to five rounds or until little is left;
    /// then what remains, while it stands still.
    pub(crate) fn passage(&self, ground: &Ground<'_>, from: &Node, to: &Node) -> Passage {
        const ROUNDS: u32 = 5;
        const LITTLE: f64 = 2.0 * 1024.0 * 1024.0;
        let home = ground.cluster.me();
        let link = |node: &Node| {
            if node.id == home { LinkCost { rtt_us: 0, bytes_per_s: u64::MAX } } else { node.link }
        };
        let (one, other) = (link(from), link(to));
        let sharers = f64::from(ground.leaving(from.id) + 1);
        let carries = one.bytes_per_s.min(other.bytes_per_s) as f64 / sharers;
        let rtt = f64::from(one.rtt_us.max(other.rtt_us)) * 1e-6;
        let dirty = self.process.dirty.max(self.process.growth) as f64;
        let (mut left, mut sent, mut time) = (self.process.rss as f64, 0.0, 0.0);
        for _ in 0..ROUNDS {
            if left < LITTLE {
                break;
            }
            let round = left / carries;
            (sent, time) = (sent + left, time + round);
            left = (dirty * round).min(self.process.rss as f64);
        }
        let frozen_s = ground.policy.freeze_s + 2.0 * rtt + left / carries;
        Passage {
            duration_s: time + frozen_s,
            frozen_s,
            cpu_s: (sent + left) / ground.policy.bytes_per_cpu_s,
        }
    }

    /// How much the sum of n^utilisation falls when it goes from one node to the other.
    fn relief(&self, ground: &Ground<'_>, from: &Node, node: &Node, to: usize) -> f64 {
        let Some(there) = ground.stands.get(to) else { return 0.0 };
        let cpu = |runnable: f64| node.load_of(runnable) / ground.top_load;
        let asked = ground.cost(cpu(there.runnable + self.threads)) - ground.cost(cpu(there.runnable))
            + self.memory_cost(ground, node, there.free);
        self.paid(ground, from) - asked * (1.0 + ground.policy.margin)
    }

    /// What it costs where it is: its part in the sum.
    fn paid(&self, ground: &Ground<'_>, from: &Node) -> f64 {
        let Some(here) = ground.stands.get(self.place) else { return 0.0 };
        let cpu = |runnable: f64| from.load_of(runnable.max(0.0)) / ground.top_load;
        ground.cost(cpu(here.runnable)) - ground.cost(cpu(here.runnable - self.threads))
            + self.memory_cost(ground, from, here.free + self.process.memory() as f64)
    }

    /// What its memory costs on a node with so much free before it comes.
    fn memory_cost(&self, ground: &Ground<'_>, node: &Node, free: f64) -> f64 {
        if node.mem_total == 0 {
            return 0.0;
        }
        let cost = |free: f64| ground.cost(1.0 - (free / node.mem_total as f64).min(1.0));
        cost(free - self.process.memory() as f64) - cost(free)
    }

    /// The load of a node above which nothing of the sum is gained: where its part there is what it pays here.
    fn relieving_load(&self, ground: &Ground<'_>, node: &Node) -> f64 {
        let seen = ground.cluster.nodes().get(self.place).zip(ground.stand(node.id));
        let Some((from, there)) = seen else { return 0.0 };
        let memory = self.memory_cost(ground, node, there.free);
        let affordable = self.paid(ground, from) / (1.0 + ground.policy.margin) - memory;
        // n^(u + own) - n^u is to be that.
        let own = node.load_of(self.threads) / ground.top_load;
        let utilisation = (affordable.max(0.0) / (ground.cost(own) - 1.0)).log(ground.base);
        (utilisation * ground.top_load).max(0.0)
    }

    /// The load of the target above which the process does not want to come: when its pace there would be worse
    /// than it was thought by more than a part, for then somebody else was faster, and there are better places;
    /// and in no case when nothing is gained. Without the latter, two homes whose jobs can be alone on a node each,
    /// and which see late, follow each other between two nodes for ever: there, both CPUs of one are as fast.
    pub(crate) fn limit_load(&self, ground: &Ground<'_>, prospect: &Prospect) -> f64 {
        let Some(node) = ground.cluster.node(prospect.node) else { return 0.0 };
        let gaining = self.pace / (1.0 + ground.policy.margin);
        let expected = prospect.pace * (1.0 + ground.policy.surprise);
        let waiting = gaining.min(expected) - self.sleep - prospect.talk;
        let speed = f64::from(node.speed) / STANDARD_SPEED;
        let limit = node.load_of((waiting.max(0.0) * speed * node.cpus - self.threads).max(0.0));
        match ground.policy.objective {
            Objective::Greedy => limit,
            Objective::Opportunity => limit.min(self.relieving_load(ground, node)),
        }
    }
}

/// Bytes that the link to a node carries in a second.
fn node_carries(ground: &Ground<'_>, node: NodeId) -> f64 {
    ground.cluster.node(node).map_or(f64::INFINITY, |node| node.link.bytes_per_s as f64)
}
