//! The measures.

use crate::fair::{Pool, earliest_end, ideal};
use crate::job::{End, Running};
use crate::knowledge::Knowledge;
use crate::machine::Hardware;
use crate::mix::{Event, Scenario};
use crate::world::{Placing, STEP_MS, Settings, run};
use serde::Serialize;
use std::collections::BTreeMap;
use tern_balancer::Reason;

/// How old what nodes know of each other is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ages {
    /// The mean over all nodes and all that they know (milliseconds).
    pub average_ms: f64,
    /// The oldest entry of each node, the mean of these.
    pub worst_ms: f64,
    /// Entries that a node knows, on average.
    pub known: f64,
}

/// How long deaths of nodes took to be known.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Deaths {
    /// Seconds until a node knew, the mean over deaths and nodes.
    pub mean_s: f64,
    /// Seconds until the last node knew of the death that took longest.
    pub most_s: f64,
}

/// What jobs had of the CPUs, against their fair share, in windows of ten seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Fairness {
    /// How many times as long as with a fair share the unluckiest job took in its worst window.
    pub worst: f64,
    /// The same, without the worst hundredth.
    pub p99: f64,
}

/// What became of a scenario.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Outcome {
    /// Jobs that came.
    pub jobs: usize,
    /// Jobs that were done.
    pub finished: usize,
    /// Jobs that were not, at the end.
    pub unfinished: usize,
    /// Jobs that died with a node.
    pub lost: usize,
    /// Jobs that died for want of memory.
    pub out_of_memory: usize,
    /// When the last was done, if all were (seconds).
    pub makespan_s: Option<f64>,
    /// Time from arrival to end, against the time alone on the fastest CPU; the mean.
    pub mean_slowdown: f64,
    /// The same, of the worst twentieth the best.
    pub p95_slowdown: f64,
    /// Against fair shares.
    pub fairness: Fairness,
    /// Moves made.
    pub moves: u64,
    /// By why they were decided.
    pub reasons: BTreeMap<&'static str, u64>,
    /// Moves of the job that moved most.
    pub most_moves: u32,
    /// Moves to where the job had been less than ten seconds before.
    pub back_within_10s: u64,
    /// Offers that were refused.
    pub refused: u64,
    /// Moves that a failing node broke.
    pub broken: u64,
    /// Most bytes of swap that one node used.
    pub most_swap: f64,
    /// How old information was; only with gossip.
    pub ages: Option<Ages>,
    /// How long deaths of nodes took to be known; only with gossip.
    pub deaths_known: Option<Deaths>,
}

impl Outcome {
    /// Moves for each job.
    #[must_use]
    pub fn moves_per_job(&self) -> f64 {
        self.moves as f64 / self.jobs.max(1) as f64
    }
}

/// Counts while the world turns.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) moves: u64,
    pub(crate) back: u64,
    pub(crate) refused: u64,
    pub(crate) broken: u64,
    reasons: BTreeMap<&'static str, u64>,
    most_swap: f64,
    shares: (f64, u32),
    ratios: Vec<f32>,
    ages: Option<Ages>,
    deaths_s: Vec<f64>,
}

/// How long a job may have less than its fair share before it counts.
const WINDOW_MS: u64 = 10_000;

impl Tally {
    pub(crate) fn reason(&mut self, reason: Reason) {
        let name = match reason {
            Reason::Faster => "faster",
            Reason::Talks => "talks",
            Reason::Home => "home",
            Reason::Memory => "memory",
            Reason::Evicted => "evicted",
            Reason::Files => "files",
        };
        *self.reasons.entry(name).or_default() += 1;
    }

    pub(crate) fn memory(&mut self, used: f64, hardware: &Hardware) {
        self.most_swap = self.most_swap.max(used - hardware.memory);
    }

    pub(crate) fn knowledge(&mut self, knowledge: &Knowledge) {
        self.ages = knowledge.ages();
        self.deaths_s = knowledge.deaths_s();
    }

    /// What a fair share is in this step; whether a window ends with it.
    pub(crate) fn fairness(&mut self, share: f64, now_ms: u64) -> bool {
        self.shares.0 += share;
        self.shares.1 += 1;
        (now_ms + STEP_MS).is_multiple_of(WINDOW_MS)
    }

    /// Compares what jobs had in the window that ends with what was fair.
    pub(crate) fn look(
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
            let whole = now_ms >= job.job.arrives_ms + WINDOW_MS && job.job.turns_ms == 0;
            if counts && whole && share > 0.0 {
                let fair = WINDOW_MS as f64 / 1000.0 / (1.0 / share + job.job.sleep);
                self.ratios.push((fair / had.max(1e-6)) as f32);
            }
        }
    }

    pub(crate) fn close(mut self, scenario: &Scenario, jobs: &[Running], now_ms: u64) -> Outcome {
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
                None => so_far(now_s - arrives, alone, 1.0 - running.left_s / running.job.work_s),
            }
        });
        let (mean_slowdown, p95_slowdown) = mean_and_part(slowdowns.collect(), 0.95);
        self.ratios.sort_by(f32::total_cmp);
        let ratio = |part: f64| {
            let last = self.ratios.len().saturating_sub(1);
            self.ratios.get((last as f64 * part) as usize).copied().map_or(0.0, f64::from)
        };
        let unfinished = count(Option::is_none);
        Outcome {
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

/// The slowdown of a job that is not done, by the part of it that is; `None` if it has only just come.
fn so_far(elapsed_s: f64, alone_s: f64, part: f64) -> Option<f64> {
    (elapsed_s >= 10.0).then(|| elapsed_s / (alone_s * part.max(1e-4)))
}

fn mean_and_part(mut numbers: Vec<f64>, part: f64) -> (f64, f64) {
    if numbers.is_empty() {
        return (0.0, 0.0);
    }
    numbers.sort_by(f64::total_cmp);
    let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
    (mean, numbers[((numbers.len() - 1) as f64 * part) as usize])
}

/// One scenario, run in several ways.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// No schedule ends earlier than this second.
    pub earliest_end_s: f64,
    /// The mean slowdown if an all-knowing scheduler gave each job an equal part of all CPUs, at no cost.
    pub ideal_slowdown: f64,
    /// The balancer.
    pub balanced: Outcome,
    /// One node after the other.
    pub round_robin: Outcome,
    /// Random nodes.
    pub random: Outcome,
    /// Where they arrive; left out above 1,000 nodes, since jobs pile up there until that takes longer than all else.
    pub home: Option<Outcome>,
}

/// Runs a scenario with the balancer, and statically in three ways, on two threads.
#[must_use]
pub fn compare(scenario: &Scenario, settings: &Settings) -> Comparison {
    let with = |placing| run(scenario, &Settings { placing, ..settings.clone() });
    let statically = || {
        let [round_robin, random] = [Placing::RoundRobin, Placing::Random].map(with);
        let home = (scenario.nodes.len() <= 1_000).then(|| with(Placing::Home));
        (round_robin, random, home, slowdown(scenario))
    };
    let (balanced, (round_robin, random, home, ideal_slowdown)) = std::thread::scope(|scope| {
        let other = scope.spawn(statically);
        let balanced = with(Placing::Balanced);
        (balanced, other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let all = Pool::new(scenario.nodes.iter());
    let earliest_end_s = earliest_end(&scenario.jobs, &all);
    Comparison { earliest_end_s, ideal_slowdown, balanced, round_robin, random, home }
}

/// The mean slowdown on the imaginary machine.
fn slowdown(scenario: &Scenario) -> f64 {
    let mut there: Vec<bool> =
        (0..scenario.nodes.len()).map(|place| !scenario.absent.contains(&place)).collect();
    let pool = |there: &[bool]| {
        Pool::new(scenario.nodes.iter().zip(there).filter(|(_, there)| **there).map(|(node, _)| node))
    };
    let mut pools = vec![(0, pool(&there))];
    for (at, event) in &scenario.events {
        match event {
            Event::Joins(place) => there[*place] = true,
            Event::Leaves(place) | Event::Fails(place) => there[*place] = false,
        }
        pools.push((*at, pool(&there)));
    }
    let fastest = Pool::new(scenario.nodes.iter()).fastest();
    let ends = ideal(&scenario.jobs, &pools, scenario.until_ms, STEP_MS);
    let until_s = scenario.until_ms as f64 / 1000.0;
    let slowdowns = scenario.jobs.iter().zip(ends).filter_map(|(job, (took, part))| {
        let alone = job.alone_s(fastest);
        match took {
            Some(took) => Some(took / alone),
            None => so_far(until_s - job.arrives_ms as f64 / 1000.0, alone, part),
        }
    });
    mean_and_part(slowdowns.collect(), 0.95).0
}
