//! Scenarios by name.

use crate::job::Job;
use crate::machine::Hardware;
use crate::rng::Rng;

/// Events that can happen to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeEvent {
    /// It joins, without jobs.
    Joins(usize),
    /// It moves its guests away, and then leaves.
    Leaves(usize),
    /// It fails without warning.
    Fails(usize),
}

/// A cluster, its jobs and its events.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// The nodes, including those that join later.
    pub nodes: Vec<Hardware>,
    /// Nodes that are absent at first.
    pub absent: Vec<usize>,
    /// Jobs, in the order of their arrival.
    pub jobs: Vec<Job>,
    /// Events and their times (milliseconds), in order.
    pub events: Vec<(u64, NodeEvent)>,
    /// When the simulation ends, unless all is done before (milliseconds).
    pub until_ms: u64,
    /// The time from which shares are compared with fair shares (milliseconds). Before it, jobs are
    /// still being spread.
    pub settled_ms: u64,
}

/// A named family of scenarios.
#[derive(Debug, Clone, Copy)]
pub struct Mix {
    /// Its name.
    pub name: &'static str,
    /// A description.
    pub about: &'static str,
    make: fn(usize, u64, &mut Rng) -> Scenario,
}

impl Mix {
    /// The mix with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        MIXES.into_iter().find(|mix| mix.name == name)
    }

    /// Generates a scenario. `tutorial` and `login` have a fixed number of nodes and a fixed
    /// length.
    #[must_use]
    pub fn scenario(&self, nodes: usize, minutes: u64, seed: u64) -> Scenario {
        let mut scenario = (self.make)(nodes.clamp(2, 65_000), minutes * 60_000, &mut Rng::new(seed));
        scenario.jobs.sort_by_key(|job| job.arrives_ms);
        scenario.events.sort_by_key(|(at, _)| *at);
        scenario
    }
}

/// All mixes.
pub const MIXES: [Mix; 9] = [
    Mix {
        name: "mixed",
        about: "four fifths of the jobs arrive at a fifth of the nodes; sizes with a heavy tail, some with much input and output; nodes of several speeds",
        make: mixed,
    },
    Mix {
        name: "heavy",
        about: "like mixed, but the jobs only compute and all nodes are equal",
        make: heavy,
    },
    Mix { name: "equal", about: "equal jobs, all at once, on a tenth of equal nodes", make: equal },
    Mix {
        name: "compile",
        about: "short jobs with many calls to home, which gain nothing by moving",
        make: compile,
    },
    Mix {
        name: "memory",
        about: "processes that fill their nodes at up to half the speed of a link",
        make: memory,
    },
    Mix { name: "churn", about: "heavy, while nodes fail, join and leave", make: churn },
    Mix {
        name: "adversarial",
        about: "jobs that all run and rest at the same time, to provoke swings",
        make: adversarial,
    },
    Mix {
        name: "tutorial",
        about: "13 equal jobs on one of two nodes with speeds 900 and 650",
        make: tutorial,
    },
    Mix {
        name: "login",
        about: "100 sessions on one of four nodes, a fifth node joins and leaves",
        make: login,
    },
];

/// The fraction of all CPUs that arriving jobs demand.
const UTILISATION: f64 = 0.7;

fn empty_scenario(nodes: Vec<Hardware>, until_ms: u64) -> Scenario {
    Scenario { nodes, absent: Vec::new(), jobs: Vec::new(), events: Vec::new(), until_ms, settled_ms: 30_000 }
}

/// Adds jobs that keep arriving, most of them at the first fifth of the nodes.
fn arrivals(scenario: &mut Scenario, mean_s: f64, rng: &mut Rng, make: impl Fn(&mut Rng) -> Job) {
    let capacity: f64 = scenario.nodes.iter().map(|node| f64::from(node.speed) / 10_000.0 * node.cpus).sum();
    let between = mean_s / (capacity * UTILISATION);
    let mut time_s = 0.0;
    loop {
        time_s += rng.exponential(between);
        let arrives_ms = (time_s * 1000.0) as u64;
        if arrives_ms >= scenario.until_ms {
            return;
        }
        let nodes = scenario.nodes.len();
        let crowd = if rng.unit() < 0.8 { nodes.div_ceil(5) } else { nodes };
        let job = make(rng);
        scenario.jobs.push(Job { home: rng.below(crowd), arrives_ms, ..job });
    }
}

/// The mean of `Rng::heavy_tailed(0.5, 600.0)`.
const HEAVY_MEAN_S: f64 = 3.55;

fn heavy_job(rng: &mut Rng) -> Job {
    let mut job = Job::computing(0, 0, rng.heavy_tailed(0.5, 600.0));
    job.memory = rng.heavy_tailed(4e6, 400e6);
    job
}

fn heavy(nodes: usize, until_ms: u64, rng: &mut Rng) -> Scenario {
    let mut scenario = empty_scenario(vec![Hardware::default(); nodes], until_ms);
    arrivals(&mut scenario, HEAVY_MEAN_S, rng, heavy_job);
    scenario
}

fn mixed(nodes: usize, until_ms: u64, rng: &mut Rng) -> Scenario {
    let kinds = [(10_000, 1.0), (6_500, 1.0), (9_000, 2.0), (14_000, 1.0), (12_000, 4.0)];
    let hardware = (0..nodes).map(|_| {
        let (speed, cpus) = kinds[rng.below(kinds.len())];
        Hardware { speed, cpus, memory: 4e9 * cpus, ..Hardware::default() }
    });
    let mut scenario = empty_scenario(hardware.collect(), until_ms);
    arrivals(&mut scenario, HEAVY_MEAN_S, rng, |rng| {
        let mut job = heavy_job(rng);
        if rng.unit() < 0.2 {
            // Away, each second of work takes one to five seconds more.
            (job.sleep, job.calls) = (rng.uniform(0.2, 2.0), rng.uniform(4_000.0, 20_000.0));
            job.bytes = job.calls * 1_000.0;
        }
        job
    });
    scenario
}

fn equal(nodes: usize, until_ms: u64, rng: &mut Rng) -> Scenario {
    let mut scenario = empty_scenario(vec![Hardware::default(); nodes], until_ms);
    let crowd = nodes.div_ceil(10);
    let work_s = until_ms as f64 / 1000.0 / 6.0;
    for _ in 0..nodes * 3 {
        scenario.jobs.push(Job::computing(rng.below(crowd), 0, work_s));
    }
    scenario
}

fn compile(nodes: usize, until_ms: u64, rng: &mut Rng) -> Scenario {
    let mut scenario = empty_scenario(vec![Hardware::default(); nodes], until_ms);
    arrivals(&mut scenario, 0.6, rng, |rng| {
        let mut job = Job::computing(0, 0, rng.uniform(0.1, 1.1));
        (job.memory, job.calls, job.bytes) = (60e6, 8_000.0, 20e6);
        job
    });
    // Users build on their own nodes, so the homes are random.
    for job in &mut scenario.jobs {
        job.home = rng.below(nodes);
    }
    scenario
}

fn memory(nodes: usize, until_ms: u64, rng: &mut Rng) -> Scenario {
    let mut scenario = empty_scenario(vec![Hardware::default(); nodes], until_ms);
    // A fifth of the nodes is filled, at up to half the speed of the link. The cluster has enough
    // memory for all jobs.
    for home in 0..nodes.div_ceil(5) {
        let rate = rng.uniform(0.5, 1.0) * 58e6;
        for index in 0..8 {
            let mut job = Job::computing(home, index * 2_000, until_ms as f64 / 1000.0);
            (job.memory, job.growth, job.max_memory) = (20e6, rate / 8.0, 1.2e9);
            (job.dirty, job.sleep) = (rate / 8.0, 4.0);
            scenario.jobs.push(job);
        }
    }
    scenario
}

fn churn(nodes: usize, until_ms: u64, rng: &mut Rng) -> Scenario {
    let mut scenario = heavy(nodes, until_ms, rng);
    // The first fifth are the homes of most jobs, and stay.
    let first = nodes.div_ceil(5);
    for index in first..nodes {
        let at = rng.uniform(0.1, 0.9) * until_ms as f64;
        match rng.below(20) {
            0 => scenario.events.push((at as u64, NodeEvent::Fails(index))),
            1 => {
                scenario.absent.push(index);
                scenario.events.push((at as u64, NodeEvent::Joins(index)));
            }
            2 => scenario.events.push((at as u64, NodeEvent::Leaves(index))),
            _ => {}
        }
    }
    scenario
}

fn adversarial(nodes: usize, until_ms: u64, rng: &mut Rng) -> Scenario {
    let mut scenario = empty_scenario(vec![Hardware::default(); nodes], until_ms);
    for index in 0..nodes * 4 {
        let mut job = Job::computing(rng.below(nodes), 0, until_ms as f64 / 1000.0);
        // All jobs with the same period run at the same time, and rest at the same time.
        job.alternation_ms = [2_000, 3_000, 5_000, 0][index % 4];
        scenario.jobs.push(job);
    }
    scenario
}

fn tutorial(_: usize, _: u64, _: &mut Rng) -> Scenario {
    let node = |speed| Hardware { speed, link: 12.5e6, ..Hardware::default() };
    let mut scenario = empty_scenario(vec![node(9_000), node(6_500)], 3_600_000);
    // If all of them stay on the faster node, they take 11 min 11 s.
    let work_s = 671.0 / 13.0 * 0.9;
    scenario.jobs =
        (0..13).map(|_| Job { memory: 4e6, dirty: 1e6, ..Job::computing(0, 0, work_s) }).collect();
    scenario
}

fn login(_: usize, _: u64, rng: &mut Rng) -> Scenario {
    let mut scenario = empty_scenario(vec![Hardware::default(); 5], 300_000);
    scenario.absent = vec![4];
    scenario.events = vec![(120_000, NodeEvent::Joins(4)), (210_000, NodeEvent::Leaves(4))];
    scenario.settled_ms = 60_000;
    for index in 0..100 {
        let mut job = Job::computing(0, index * 200, 1_000.0);
        job.memory = rng.heavy_tailed(4e6, 200e6);
        // Every fourth job is an editor, a shell or a build.
        if index % 4 == 3 {
            (job.sleep, job.calls) = (rng.uniform(0.5, 5.0), rng.uniform(10.0, 100.0));
        }
        scenario.jobs.push(job);
    }
    scenario
}
