//! The results of a simulation.

use crate::fair::{Pool, earliest_end, ideal};
use crate::information::InformationSource;
use crate::job::{End, Running};
use crate::machine::Hardware;
use crate::mix::{NodeEvent, Scenario};
use crate::world::{PlacementPolicy, STEP_MS, SimSettings, run};
use serde::Serialize;
use std::collections::BTreeMap;
use tern_balancer::MoveReason;

/// The age of the nodes' information about each other.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct InformationAges {
    /// Mean over all nodes and their entries (milliseconds).
    pub average_ms: f64,
    /// Mean over all nodes of the age of their oldest entry (milliseconds).
    pub worst_ms: f64,
    /// Mean number of entries of a node.
    pub known: f64,
}

/// The time in which nodes detect the death of a node.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Deaths {
    /// Mean over deaths and nodes (seconds).
    pub mean_s: f64,
    /// The longest time (seconds).
    pub most_s: f64,
}

/// The CPU time of jobs, compared with their fair share, in windows of ten seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Fairness {
    /// The largest ratio of fair work to actual work, over all jobs and windows.
    pub worst: f64,
    /// The 99th percentile of this ratio.
    pub p99: f64,
}

/// The results of one run.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct RunResult {
    /// Jobs that arrived.
    pub jobs: usize,
    /// Jobs that finished.
    pub finished: usize,
    /// Jobs that were still running at the end.
    pub unfinished: usize,
    /// Jobs lost with a failed node.
    pub lost: usize,
    /// Jobs killed for lack of memory.
    pub out_of_memory: usize,
    /// When the last job finished, if all did (seconds).
    pub makespan_s: Option<f64>,
    /// Mean slowdown: time from arrival to end, divided by the time alone on the fastest CPU.
    pub mean_slowdown: f64,
    /// 95th percentile of the slowdown.
    pub p95_slowdown: f64,
    /// CPU time compared with fair shares.
    pub fairness: Fairness,
    /// Moves made.
    pub moves: u64,
    /// Moves by reason.
    pub reasons: BTreeMap<&'static str, u64>,
    /// Number of moves of the job that moved most.
    pub most_moves: u32,
    /// Moves to the node that the job had left less than ten seconds before.
    pub back_within_10s: u64,
    /// Refused offers.
    pub refused: u64,
    /// Moves that failed because a node failed.
    pub broken: u64,
    /// The most swap that one node used, in bytes.
    pub most_swap: f64,
    /// Age of information; only with gossip.
    pub ages: Option<InformationAges>,
    /// Time until deaths of nodes were detected; only with gossip.
    pub deaths_known: Option<Deaths>,
}

impl RunResult {
    /// Moves per job.
    #[must_use]
    pub fn moves_per_job(&self) -> f64 {
        self.moves as f64 / self.jobs.max(1) as f64
    }
}

/// Counters kept during a run.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) moves: u64,
    pub(crate) back: u64,
    pub(crate) refused: u64,
    pub(crate) broken: u64,
    reasons: BTreeMap<&'static str, u64>,
    most_swap: f64,
    shares: (f64, u32),
    ratios: Vec<f32>,
    ages: Option<InformationAges>,
    deaths_s: Vec<f64>,
}

/// Length of a fairness window.
const WINDOW_MS: u64 = 10_000;

impl Counters {
    pub(crate) fn record_reason(&mut self, reason: MoveReason) {
        let name = match reason {
            MoveReason::Faster => "faster",
            MoveReason::HomeCalls => "calls",
            MoveReason::Home => "home",
            MoveReason::Memory => "memory",
            MoveReason::Evicted => "evicted",
            MoveReason::Files => "files",
        };
        *self.reasons.entry(name).or_default() += 1;
    }

    pub(crate) fn record_memory(&mut self, used: f64, hardware: &Hardware) {
        self.most_swap = self.most_swap.max(used - hardware.memory);
    }

    pub(crate) fn record_information(&mut self, information: &InformationSource) {
        self.ages = information.ages();
        self.deaths_s = information.deaths_s();
    }

    /// Records the fair share of this step; returns whether a window ends with it.
    pub(crate) fn record_share(&mut self, share: f64, now_ms: u64) -> bool {
        self.shares.0 += share;
        self.shares.1 += 1;
        (now_ms + STEP_MS).is_multiple_of(WINDOW_MS)
    }

    /// At the end of a window, compares the work that each job did in it with the job's fair work.
    pub(crate) fn compare_shares(
        &mut self,
        running: impl Iterator<Item = usize>,
        jobs: &mut [Running],
        now_ms: u64,
        counts: bool,
    ) {
        let share = self.shares.0 / f64::from(self.shares.1.max(1));
        self.shares = (0.0, 0);
        for index in running {
            let job = &mut jobs[index];
            let had = std::mem::take(&mut job.window_s);
            let whole = now_ms >= job.job.arrives_ms + WINDOW_MS && job.job.alternation_ms == 0;
            if counts && whole && share > 0.0 {
                let fair = WINDOW_MS as f64 / 1000.0 / (1.0 / share + job.job.sleep);
                self.ratios.push((fair / had.max(1e-6)) as f32);
            }
        }
    }

    pub(crate) fn into_result(mut self, scenario: &Scenario, jobs: &[Running], now_ms: u64) -> RunResult {
        let fastest = Pool::new(scenario.nodes.iter()).fastest();
        let now_s = now_ms as f64 / 1000.0;
        let count = |end: fn(&Option<End>) -> bool| jobs.iter().filter(|job| end(&job.end)).count();
        let last = jobs.iter().filter_map(|job| match job.end {
            Some(End::Done(at)) => Some(at),
            _ => None,
        });
        let last = last.fold(0.0, f64::max);
        let slowdowns = jobs.iter().filter_map(|running| {
            let arrives = running.job.arrives_ms as f64 / 1000.0;
            let alone = running.job.alone_s(fastest);
            match running.end {
                Some(End::Done(at)) => Some((at - arrives) / alone),
                Some(_) => None,
                None => {
                    slowdown_so_far(now_s - arrives, alone, 1.0 - running.remaining_s / running.job.work_s)
                }
            }
        });
        let (mean_slowdown, p95_slowdown) = mean_and_percentile(slowdowns.collect(), 0.95);
        self.ratios.sort_by(f32::total_cmp);
        let ratio = |part: f64| {
            let last = self.ratios.len().saturating_sub(1);
            self.ratios.get((last as f64 * part) as usize).copied().map_or(0.0, f64::from)
        };
        let unfinished = count(Option::is_none);
        RunResult {
            jobs: jobs.len(),
            finished: count(|end| matches!(end, Some(End::Done(_)))),
            unfinished,
            lost: count(|end| *end == Some(End::Lost)),
            out_of_memory: count(|end| *end == Some(End::OutOfMemory)),
            makespan_s: (unfinished == 0).then_some(last),
            mean_slowdown,
            p95_slowdown,
            fairness: Fairness { worst: ratio(1.0), p99: ratio(0.99) },
            moves: self.moves,
            reasons: self.reasons,
            most_moves: jobs.iter().map(|job| job.moves).max().unwrap_or(0),
            back_within_10s: self.back,
            refused: self.refused,
            broken: self.broken,
            most_swap: self.most_swap.max(0.0),
            ages: self.ages,
            deaths_known: (!self.deaths_s.is_empty()).then(|| {
                let most = self.deaths_s.iter().copied().fold(0.0, f64::max);
                Deaths {
                    mean_s: self.deaths_s.iter().sum::<f64>() / self.deaths_s.len() as f64,
                    most_s: most,
                }
            }),
        }
    }
}

/// The slowdown of an unfinished job, from the fraction of it that is done; `None` in its first ten
/// seconds.
fn slowdown_so_far(elapsed_s: f64, alone_s: f64, part: f64) -> Option<f64> {
    (elapsed_s >= 10.0).then(|| elapsed_s / (alone_s * part.max(1e-4)))
}

fn mean_and_percentile(mut numbers: Vec<f64>, part: f64) -> (f64, f64) {
    if numbers.is_empty() {
        return (0.0, 0.0);
    }
    numbers.sort_by(f64::total_cmp);
    let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
    (mean, numbers[((numbers.len() - 1) as f64 * part) as usize])
}

/// One scenario, run with several kinds of placement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// A lower bound of the time at which any schedule ends (seconds).
    pub earliest_end_s: f64,
    /// The mean slowdown if an ideal scheduler gave each job an equal part of all CPUs, at no cost.
    pub ideal_slowdown: f64,
    /// The balancer.
    pub balanced: RunResult,
    /// Jobs start on one node after the other, and stay.
    pub round_robin: RunResult,
    /// Jobs start on random nodes, and stay.
    pub random: RunResult,
    /// Jobs stay where they arrive; left out above 1,000 nodes, where their queues take longer to
    /// simulate than the rest.
    pub home: Option<RunResult>,
}

/// Runs a scenario with the balancer and with three kinds of static placement, on two threads.
#[must_use]
pub fn compare(scenario: &Scenario, settings: &SimSettings) -> Comparison {
    let with = |placing| run(scenario, &SimSettings { placing, ..settings.clone() });
    let statically = || {
        let [round_robin, random] = [PlacementPolicy::RoundRobin, PlacementPolicy::Random].map(with);
        let home = (scenario.nodes.len() <= 1_000).then(|| with(PlacementPolicy::Home));
        (round_robin, random, home, slowdown(scenario))
    };
    let (balanced, (round_robin, random, home, ideal_slowdown)) = std::thread::scope(|scope| {
        let other = scope.spawn(statically);
        let balanced = with(PlacementPolicy::Balanced);
        (balanced, other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let all = Pool::new(scenario.nodes.iter());
    let earliest_end_s = earliest_end(&scenario.jobs, &all);
    Comparison { earliest_end_s, ideal_slowdown, balanced, round_robin, random, home }
}

/// The mean slowdown on the imaginary machine.
fn slowdown(scenario: &Scenario) -> f64 {
    let mut present: Vec<bool> =
        (0..scenario.nodes.len()).map(|index| !scenario.absent.contains(&index)).collect();
    let pool = |present: &[bool]| {
        Pool::new(scenario.nodes.iter().zip(present).filter(|(_, present)| **present).map(|(node, _)| node))
    };
    let mut pools = vec![(0, pool(&present))];
    for (at, event) in &scenario.events {
        match event {
            NodeEvent::Joins(index) => present[*index] = true,
            NodeEvent::Leaves(index) | NodeEvent::Fails(index) => present[*index] = false,
        }
        pools.push((*at, pool(&present)));
    }
    let fastest = Pool::new(scenario.nodes.iter()).fastest();
    let ends = ideal(&scenario.jobs, &pools, scenario.until_ms, STEP_MS);
    let until_s = scenario.until_ms as f64 / 1000.0;
    let slowdowns = scenario.jobs.iter().zip(ends).filter_map(|(job, (took, part))| {
        let alone = job.alone_s(fastest);
        match took {
            Some(took) => Some(took / alone),
            None => slowdown_so_far(until_s - job.arrives_ms as f64 / 1000.0, alone, part),
        }
    });
    mean_and_percentile(slowdowns.collect(), 0.95).0
}
