//! The simulated cluster, in steps of 100 ms.

use crate::fair::Pool;
use crate::information::{InformationSource, LoadEntry, NodeInfo};
use crate::job::{End, Running};
use crate::machine::Machine;
use crate::migration::Migration;
use crate::mix::{NodeEvent, Scenario};
use crate::report::{Counters, RunResult};
use crate::rng::Rng;
use serde::Serialize;
use std::collections::BTreeSet;
use tern_balancer::{
    Cluster, DecisionState, Move, OfferReply, Policy, ProcessSnapshot, decide, reply_to_offer,
};
use tern_ids::{HomePid, NodeId};

/// Length of a step.
pub(crate) const STEP_MS: u64 = 100;
const STEP_S: f64 = 0.1;
/// How often a home decides.
const DECIDE_MS: u64 = 1_000;
/// Maximum number of decisions of a home in one turn. After a refusal it decides again.
const MAX_DECISIONS: usize = 3;
/// Interval between a node's gossip messages, as in MOSIX.
pub(crate) const GOSSIP_MS: u64 = 500;
/// Round trip of a call to home, including processing at both ends.
const CALL_S: f64 = 250e-6;

/// How jobs are placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PlacementPolicy {
    /// They start at home, and the balancer moves them.
    Balanced,
    /// They start on one node after the other, and stay.
    RoundRobin,
    /// They start on a random node, and stay.
    Random,
    /// They start where they arrive, and stay.
    Home,
}

/// The source of the nodes' information about each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Information {
    /// The daemon's own gossip.
    Gossip,
    /// All information is always current: to measure the cost of gossip.
    Ideal,
}

/// How a scenario is run.
#[derive(Debug, Clone)]
pub struct SimSettings {
    /// How jobs are placed.
    pub placing: PlacementPolicy,
    /// The source of the nodes' information about each other.
    pub information: Information,
    /// The balancer's parameters.
    pub policy: Policy,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Runs a scenario to its end.
#[must_use]
pub fn run(scenario: &Scenario, settings: &SimSettings) -> RunResult {
    let mut world = World::new(scenario, settings);
    let mut now_ms = 0;
    while now_ms < scenario.until_ms && !world.is_over() {
        world.step(now_ms);
        now_ms += STEP_MS;
    }
    world.counters.record_information(&world.information);
    world.counters.into_result(scenario, &world.jobs, now_ms)
}

struct World<'a> {
    scenario: &'a Scenario,
    settings: &'a SimSettings,
    machines: Vec<Machine>,
    alive: Vec<bool>,
    jobs: Vec<Running>,
    migrations: Vec<Migration>,
    information: InformationSource,
    next_job: usize,
    next_event: usize,
    pool: Pool,
    /// Number of jobs that have arrived and not ended.
    active: usize,
    next_index: usize,
    rng: Rng,
    counters: Counters,
    /// Buffer reused for each decision.
    known: Vec<NodeInfo>,
    /// Homes that decide again because one of their processes has arrived or ended.
    deciding_again: BTreeSet<usize>,
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, settings: &'a SimSettings) -> Self {
        let machines: Vec<Machine> = scenario
            .nodes
            .iter()
            .enumerate()
            .map(|(node, hardware)| Machine::new(hardware.clone(), !scenario.absent.contains(&node)))
            .collect();
        let alive: Vec<bool> = machines.iter().map(|machine| machine.alive).collect();
        let mut world = Self {
            scenario,
            settings,
            information: InformationSource::new(settings, &alive),
            machines,
            alive,
            jobs: Vec::with_capacity(scenario.jobs.len()),
            migrations: Vec::new(),
            next_job: 0,
            next_event: 0,
            pool: Pool::default(),
            active: 0,
            next_index: 0,
            rng: Rng::new(settings.seed ^ 0x5eed),
            counters: Counters::default(),
            known: Vec::new(),
            deciding_again: BTreeSet::new(),
        };
        world.count_cpus();
        world
    }

    fn is_over(&self) -> bool {
        self.next_job == self.scenario.jobs.len()
            && self.active == 0
            && self.next_event == self.scenario.events.len()
    }

    fn count_cpus(&mut self) {
        let alive = self.machines.iter().filter(|machine| machine.alive && !machine.leaving);
        self.pool = Pool::new(alive.map(|machine| &machine.hardware));
    }

    fn step(&mut self, now_ms: u64) {
        self.apply_events(now_ms);
        self.start_jobs(now_ms);
        if self.settings.placing == PlacementPolicy::Balanced {
            self.gossip(now_ms);
            self.decide(now_ms);
            self.advance_migrations(now_ms);
        }
        self.run(now_ms);
    }

    /// Applies the scenario's events.
    fn apply_events(&mut self, now_ms: u64) {
        while let Some((_, event)) = self.scenario.events.get(self.next_event).filter(|(at, _)| *at <= now_ms)
        {
            self.next_event += 1;
            match *event {
                NodeEvent::Joins(node) => {
                    let hardware = self.machines[node].hardware.clone();
                    self.machines[node] = Machine::new(hardware, true);
                    self.alive[node] = true;
                    self.information.join(node, now_ms);
                }
                NodeEvent::Leaves(node) => self.machines[node].leaving = true,
                NodeEvent::Fails(node) => self.fail(node, now_ms),
            }
            self.count_cpus();
        }
    }

    /// A node fails, and with it all jobs that run there or have their home there.
    fn fail(&mut self, node: usize, now_ms: u64) {
        self.alive[node] = false;
        self.information.fail(node, now_ms);
        let machine = &mut self.machines[node];
        machine.alive = false;
        machine.moves = 0;
        let mut lost = std::mem::take(&mut machine.here);
        lost.append(&mut machine.own);
        for index in lost {
            self.end_job(index, End::Lost);
        }
        let mut broken = Vec::new();
        self.migrations.retain(|migration| {
            let breaks = migration.from == node || migration.to == node;
            if breaks {
                broken.push(migration.clone());
            }
            !breaks
        });
        for migration in broken {
            for end in [migration.from, migration.to] {
                self.machines[end].moves = self.machines[end].moves.saturating_sub(1);
            }
            self.cancel_migration(&migration);
        }
    }

    fn cancel_migration(&mut self, migration: &Migration) {
        let (home, pid) = (self.jobs[migration.job].job.home, pid(migration.job));
        self.jobs[migration.job].frozen = false;
        self.machines[migration.to].pending.record_cancelled(id(home), pid);
        self.counters.broken += 1;
    }

    /// Removes a job that has ended.
    fn end_job(&mut self, index: usize, end: End) {
        let running = &mut self.jobs[index];
        if running.end.is_some() {
            return;
        }
        running.end = Some(end);
        let (at, home) = (running.at, running.job.home);
        self.machines[at].here.retain(|other| *other != index);
        self.machines[home].own.retain(|other| *other != index);
        self.active -= 1;
    }

    fn start_jobs(&mut self, now_ms: u64) {
        while let Some(job) = self.scenario.jobs.get(self.next_job).filter(|job| job.arrives_ms <= now_ms) {
            let mut job = job.clone();
            self.next_job += 1;
            job.home = match self.settings.placing {
                PlacementPolicy::Balanced | PlacementPolicy::Home => job.home,
                PlacementPolicy::RoundRobin => {
                    self.next_index += 1;
                    self.next_index % self.machines.len()
                }
                PlacementPolicy::Random => self.rng.below(self.machines.len()),
            };
            // Jobs start only on nodes that are present.
            while !self.machines[job.home].alive || self.machines[job.home].leaving {
                job.home = (job.home + 1) % self.machines.len();
            }
            let (at, index) = (job.home, self.jobs.len());
            self.jobs.push(Running::new(job, at, now_ms));
            self.machines[at].here.push(index);
            self.machines[at].own.push(index);
            self.active += 1;
        }
    }

    /// Takes samples and sends gossip messages.
    fn gossip(&mut self, now_ms: u64) {
        self.information.measure(now_ms, &self.alive);
        let steps = usize::try_from(GOSSIP_MS / STEP_MS).unwrap_or(1);
        let turn = usize::try_from(now_ms / STEP_MS).unwrap_or(0) % steps;
        let mut entries = Vec::with_capacity(self.machines.len() / steps + 1);
        for node in (turn..self.machines.len()).step_by(steps) {
            if !self.alive[node] {
                continue;
            }
            self.update_local_demand(node, now_ms);
            let machine = &mut self.machines[node];
            let own = machine.sample(id(node));
            machine.pending.update(&own, &self.settings.policy, now_ms);
            let entry = LoadEntry {
                speed: own.speed,
                cpus: own.cpus as f32,
                load: machine.pending.expected_load(&own, &self.settings.policy, now_ms) as f32,
                free: machine.pending.advertised_free(&own, &self.settings.policy),
                total: own.mem_total,
                pressure: own.mem_pressure as f32,
                takes_guests: own.takes_guests,
            };
            entries.push((node, entry));
        }
        self.information.publish(&entries, now_ms, &self.alive);
    }

    /// Each home decides once a second, at different times, and when one of its own processes has
    /// arrived or ended.
    fn decide(&mut self, now_ms: u64) {
        let steps = usize::try_from(DECIDE_MS / STEP_MS).unwrap_or(1);
        let turn = usize::try_from(now_ms / STEP_MS).unwrap_or(0) % steps;
        // 3 and 10 have no common factor, so each home has its turn once in ten steps, apart from
        // its neighbours.
        let first = turn * 3 % steps;
        let mut deciding = std::mem::take(&mut self.deciding_again);
        deciding.extend((first..self.machines.len()).step_by(steps));
        for node in deciding {
            if self.alive[node] && !self.machines[node].own.is_empty() {
                self.decide_at(node, now_ms);
            }
        }
    }

    /// Decides for a home. After a refusal it decides again at once with the refusing node's
    /// reported state.
    fn decide_at(&mut self, node: usize, now_ms: u64) {
        let cluster = self.view(node, now_ms);
        let mut state = std::mem::take(&mut self.machines[node].state);
        for _ in 0..MAX_DECISIONS {
            let own = &self.machines[node].own;
            let processes: Vec<ProcessSnapshot> =
                own.iter().map(|index| self.process(*index, now_ms)).collect();
            let seed = self.rng.next_u64();
            let moves = decide(&cluster, &processes, &mut state, &self.settings.policy, now_ms, seed);
            let refused =
                moves.into_iter().filter(|next| !self.offer(node, next, &mut state, now_ms)).count();
            if refused == 0 {
                break;
            }
        }
        self.machines[node].state = state;
    }

    /// Offers a process to its target; returns whether the move has begun.
    fn offer(&mut self, node: usize, next: &Move, state: &mut DecisionState, now_ms: u64) -> bool {
        let to = usize::from(next.to.0) - 1;
        let index = usize::try_from(next.pid.0).unwrap_or(0);
        let target = &mut self.machines[to];
        if !target.alive {
            self.counters.broken += 1;
            state.failed(next.pid, now_ms);
            return false;
        }
        let own = target.sample(next.to);
        // A home always accepts its own processes.
        if to != node
            && let OfferReply::Refuse(refusal) =
                reply_to_offer(&own, &target.pending, &next.offer, &self.settings.policy, now_ms)
        {
            self.counters.refused += 1;
            state.refused(next.pid, refusal, now_ms);
            return false;
        }
        target.pending.record_accepted(&next.offer, now_ms);
        state.accepted(next.pid, now_ms);
        self.counters.record_reason(next.reason);
        let running = &self.jobs[index];
        let from = running.at;
        self.migrations.push(Migration::new(index, from, to, running.memory));
        self.machines[from].moves += 1;
        self.machines[to].moves += 1;
        true
    }

    /// Passes the demand of a node's own local jobs to its `PendingChanges`.
    fn update_local_demand(&mut self, node: usize, now_ms: u64) {
        let here = self.machines[node].own.iter().filter(|index| self.jobs[**index].at == node);
        let here: Vec<ProcessSnapshot> = here.map(|index| self.process(*index, now_ms)).collect();
        self.machines[node].pending.set_local(here.iter(), &self.settings.policy);
    }

    fn view(&mut self, node: usize, now_ms: u64) -> Cluster {
        self.update_local_demand(node, now_ms);
        self.known.clear();
        let machine = &self.machines[node];
        let guests = machine.own.iter().map(|index| self.jobs[*index].at).filter(|at| *at != node);
        self.information.view(node, guests, now_ms, &self.alive, &mut self.known);
        let mut own = machine.sample(id(node));
        own.load = machine.pending.expected_load(&own, &self.settings.policy, now_ms);
        own.mem_free = machine.pending.expected_free(&own);
        let mut nodes = vec![own];
        nodes.extend(self.known.iter().filter(|known| known.node != node).map(NodeInfo::node));
        Cluster::new(id(node), nodes)
    }

    /// The process of a job, as the home's daemon sees it.
    fn process(&self, index: usize, now_ms: u64) -> ProcessSnapshot {
        let running = &self.jobs[index];
        running.process(pid(index), self.machines[running.at].leaving, now_ms)
    }

    fn advance_migrations(&mut self, now_ms: u64) {
        let mut migrations = std::mem::take(&mut self.migrations);
        migrations.retain_mut(|migration| {
            let running = &mut self.jobs[migration.job];
            if running.end.is_some() {
                let home = running.job.home;
                self.machines[migration.to].pending.record_cancelled(id(home), pid(migration.job));
            } else if !migration.advance(&self.machines, running, STEP_S) {
                return true;
            } else {
                self.complete_migration(migration, now_ms);
            }
            for end in [migration.from, migration.to] {
                self.machines[end].moves = self.machines[end].moves.saturating_sub(1);
            }
            false
        });
        self.migrations.append(&mut migrations);
    }

    fn complete_migration(&mut self, migration: &Migration, now_ms: u64) {
        let Migration { job: index, from, to, .. } = *migration;
        let running = &mut self.jobs[index];
        running.frozen = false;
        running.at = to;
        running.arrived_ms = now_ms;
        running.moves += 1;
        self.counters.moves += 1;
        if running.last_departure.is_some_and(|(left, at)| left == to && now_ms - at < 10_000) {
            self.counters.back += 1;
        }
        running.last_departure = Some((from, now_ms));
        let (home, threads) = (running.job.home, running.demand);
        self.machines[from].here.retain(|other| *other != index);
        self.machines[from].pending.record_departed(id(home), pid(index), threads, now_ms);
        self.machines[to].here.push(index);
        self.machines[to].pending.record_arrived(id(home), pid(index), now_ms);
        self.machines[home].state.arrived(pid(index), now_ms);
        self.deciding_again.insert(home);
    }

    fn run(&mut self, now_ms: u64) {
        let mut threads = 0.0;
        let (mut ended, mut full) = (Vec::new(), Vec::new());
        for (node, machine) in self.machines.iter_mut().enumerate().filter(|(_, machine)| machine.alive) {
            let before = machine.here.len();
            if before == 0 && machine.sampled_runnable == 0.0 {
                continue;
            }
            let here = if before > 0 { machine.here.clone() } else { Vec::new() };
            machine.run(node, &mut self.jobs, CALL_S, now_ms, STEP_S);
            if machine.here.len() < before {
                ended.extend(here.into_iter().filter(|index| self.jobs[*index].end.is_some()));
            }
            threads += machine.runnable;
            self.counters.record_memory(machine.used, &machine.hardware);
            if machine.used > machine.hardware.memory + machine.hardware.swap {
                full.push(node);
            }
        }
        for index in ended {
            let running = &self.jobs[index];
            let (home, at, threads) = (running.job.home, running.at, running.demand);
            self.machines[home].own.retain(|other| *other != index);
            self.machines[at].pending.record_departed(id(home), pid(index), threads, now_ms);
            self.active -= 1;
            self.deciding_again.insert(home);
        }
        for node in full {
            let largest = self.machines[node].here.iter().copied();
            let largest = largest.max_by(|a, b| self.jobs[*a].memory.total_cmp(&self.jobs[*b].memory));
            if let Some(index) = largest {
                self.end_job(index, End::OutOfMemory);
            }
        }
        for node in 0..self.machines.len() {
            let machine = &mut self.machines[node];
            if machine.leaving && machine.alive && machine.here.is_empty() && machine.own.is_empty() {
                machine.alive = false;
                self.alive[node] = false;
            }
        }
        let share = self.pool.share(threads);
        if self.counters.record_share(share, now_ms) {
            let machines = &self.machines;
            let running = machines.iter().flat_map(|machine| machine.here.iter().copied());
            let counts = now_ms >= self.scenario.settled_ms;
            self.counters.compare_shares(running, &mut self.jobs, now_ms, counts);
        }
    }
}

/// The number of the node with this index.
pub(crate) fn id(node: usize) -> NodeId {
    NodeId(u16::try_from(node + 1).unwrap_or(u16::MAX))
}

fn pid(job: usize) -> HomePid {
    HomePid(i32::try_from(job).unwrap_or(i32::MAX))
}
