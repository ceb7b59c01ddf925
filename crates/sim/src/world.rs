//! The cluster, in steps of 100 ms.

use crate::chance::Chance;
use crate::fair::Pool;
use crate::job::{End, Running};
use crate::knowledge::{Entry, Knowledge, Known};
use crate::machine::Machine;
use crate::mix::{Event, Scenario};
use crate::report::{Outcome, Tally};
use crate::transit::Transit;
use serde::Serialize;
use std::collections::BTreeSet;
use tern_balancer::{Answer, Cluster, Move, Policy, Process, State, accepts, decide};
use tern_ids::{HomePid, NodeId};

/// One step.
pub(crate) const STEP_MS: u64 = 100;
const STEP_S: f64 = 0.1;
/// How often a home decides.
const DECIDE_MS: u64 = 1_000;
/// How often it asks in one of them.
const ASKS: usize = 3;
/// How often each node gossips (ALG-1).
pub(crate) const GOSSIP_MS: u64 = 500;
/// Round trip of a call to home, with what is not the link's.
const CALL_S: f64 = 250e-6;

/// Who decides where jobs run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placing {
    /// They start at home, and the balancer moves them.
    Balanced,
    /// They start on one node after the other, and stay.
    RoundRobin,
    /// They start on a random node, and stay.
    Random,
    /// They start where they arrive, and stay.
    Home,
}

/// Where nodes know of each other from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Information {
    /// The daemon's own gossip.
    Gossip,
    /// Everybody knows everything at once, as if by magic: to see what gossip costs.
    Ideal,
}

/// How it is run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Who decides.
    pub placing: Placing,
    /// Where nodes know of each other from.
    pub information: Information,
    /// The balancer's knobs.
    pub policy: Policy,
    /// For everything that is by chance.
    pub seed: u64,
}

/// Runs a scenario to its end.
#[must_use]
pub fn run(scenario: &Scenario, settings: &Settings) -> Outcome {
    let mut world = World::new(scenario, settings);
    let mut now_ms = 0;
    while now_ms < scenario.until_ms && !world.is_over() {
        world.step(now_ms);
        now_ms += STEP_MS;
    }
    world.tally.knowledge(&world.knowledge);
    world.tally.close(scenario, &world.jobs, now_ms)
}

struct World<'a> {
    scenario: &'a Scenario,
    settings: &'a Settings,
    machines: Vec<Machine>,
    alive: Vec<bool>,
    jobs: Vec<Running>,
    transits: Vec<Transit>,
    knowledge: Knowledge,
    next_job: usize,
    next_event: usize,
    pool: Pool,
    /// Jobs that have come and not ended.
    active: usize,
    next_place: usize,
    chance: Chance,
    tally: Tally,
    /// What is used again at each decision.
    known: Vec<Known>,
    /// Homes of which a process has arrived or ended, and that decide again.
    again: BTreeSet<usize>,
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, settings: &'a Settings) -> Self {
        let machines: Vec<Machine> = scenario
            .nodes
            .iter()
            .enumerate()
            .map(|(place, hardware)| Machine::new(hardware.clone(), !scenario.absent.contains(&place)))
            .collect();
        let alive: Vec<bool> = machines.iter().map(|machine| machine.alive).collect();
        let mut world = Self {
            scenario,
            settings,
            knowledge: Knowledge::new(settings, &alive),
            machines,
            alive,
            jobs: Vec::with_capacity(scenario.jobs.len()),
            transits: Vec::new(),
            next_job: 0,
            next_event: 0,
            pool: Pool::default(),
            active: 0,
            next_place: 0,
            chance: Chance::new(settings.seed ^ 0x5eed),
            tally: Tally::default(),
            known: Vec::new(),
            again: BTreeSet::new(),
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
        self.happen(now_ms);
        self.arrive(now_ms);
        if self.settings.placing == Placing::Balanced {
            self.talk(now_ms);
            self.decide(now_ms);
            self.travel(now_ms);
        }
        self.run(now_ms);
    }

    /// What the scenario has happen to nodes.
    fn happen(&mut self, now_ms: u64) {
        while let Some((_, event)) = self.scenario.events.get(self.next_event).filter(|(at, _)| *at <= now_ms)
        {
            self.next_event += 1;
            match *event {
                Event::Joins(place) => {
                    let hardware = self.machines[place].hardware.clone();
                    self.machines[place] = Machine::new(hardware, true);
                    self.alive[place] = true;
                    self.knowledge.join(place, now_ms);
                }
                Event::Leaves(place) => self.machines[place].leaving = true,
                Event::Fails(place) => self.fail(place, now_ms),
            }
            self.count_cpus();
        }
    }

    /// A node dies, with what runs there and what has its home there.
    fn fail(&mut self, place: usize, now_ms: u64) {
        self.alive[place] = false;
        self.knowledge.failed(place, now_ms);
        let machine = &mut self.machines[place];
        machine.alive = false;
        machine.moves = 0;
        let mut lost = std::mem::take(&mut machine.here);
        lost.append(&mut machine.own);
        for index in lost {
            self.end(index, End::Lost);
        }
        let mut broken = Vec::new();
        self.transits.retain(|transit| {
            let breaks = transit.from == place || transit.to == place;
            if breaks {
                broken.push(transit.clone());
            }
            !breaks
        });
        for transit in broken {
            for end in [transit.from, transit.to] {
                self.machines[end].moves = self.machines[end].moves.saturating_sub(1);
            }
            self.call_off(&transit);
        }
    }

    fn call_off(&mut self, transit: &Transit) {
        let (home, pid) = (self.jobs[transit.job].job.home, pid(transit.job));
        self.jobs[transit.job].frozen = false;
        self.machines[transit.to].settling.cancelled(id(home), pid);
        self.tally.broken += 1;
    }

    /// Takes a job out of the world.
    fn end(&mut self, index: usize, end: End) {
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

    fn arrive(&mut self, now_ms: u64) {
        while let Some(job) = self.scenario.jobs.get(self.next_job).filter(|job| job.arrives_ms <= now_ms) {
            let mut job = job.clone();
            self.next_job += 1;
            job.home = match self.settings.placing {
                Placing::Balanced | Placing::Home => job.home,
                Placing::RoundRobin => {
                    self.next_place += 1;
                    self.next_place % self.machines.len()
                }
                Placing::Random => self.chance.below(self.machines.len()),
            };
            // Nobody starts a job on a node that is not there.
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

    /// Gossip.
    fn talk(&mut self, now_ms: u64) {
        self.knowledge.measure(now_ms, &self.alive);
        let steps = usize::try_from(GOSSIP_MS / STEP_MS).unwrap_or(1);
        let turn = usize::try_from(now_ms / STEP_MS).unwrap_or(0) % steps;
        let mut told = Vec::with_capacity(self.machines.len() / steps + 1);
        for place in (turn..self.machines.len()).step_by(steps) {
            if !self.alive[place] {
                continue;
            }
            self.look_at_own(place, now_ms);
            let machine = &mut self.machines[place];
            let own = machine.sample(id(place));
            machine.settling.sampled(&own, &self.settings.policy, now_ms);
            let entry = Entry {
                speed: own.speed,
                cpus: own.cpus as f32,
                load: machine.settling.expected_load(&own, &self.settings.policy, now_ms) as f32,
                free: machine.settling.offered_free(&own, &self.settings.policy),
                total: own.mem_total,
                pressure: own.mem_pressure as f32,
                takes_guests: own.takes_guests,
            };
            told.push((place, entry));
        }
        self.knowledge.tell(&told, now_ms, &self.alive);
    }

    /// Each home decides once a second, not all at the same time; and when a process of its own has arrived or ended.
    fn decide(&mut self, now_ms: u64) {
        let steps = usize::try_from(DECIDE_MS / STEP_MS).unwrap_or(1);
        let turn = usize::try_from(now_ms / STEP_MS).unwrap_or(0) % steps;
        // 7 and 10 have no common factor, so each home has its turn once in ten steps, neighbours apart.
        let first = turn * 3 % steps;
        let mut turn = std::mem::take(&mut self.again);
        turn.extend((first..self.machines.len()).step_by(steps));
        for place in turn {
            if self.alive[place] && !self.machines[place].own.is_empty() {
                self.decide_at(place, now_ms);
            }
        }
    }

    /// Who was refused has learnt from it, and asks elsewhere at once.
    fn decide_at(&mut self, place: usize, now_ms: u64) {
        let cluster = self.view(place, now_ms);
        let mut state = std::mem::take(&mut self.machines[place].state);
        for _ in 0..ASKS {
            let own = &self.machines[place].own;
            let processes: Vec<Process> = own.iter().map(|index| self.process(*index, now_ms)).collect();
            let seed = self.chance.bits();
            let moves = decide(&cluster, &processes, &mut state, &self.settings.policy, now_ms, seed);
            let refused =
                moves.into_iter().filter(|next| !self.offer(place, next, &mut state, now_ms)).count();
            if refused == 0 {
                break;
            }
        }
        self.machines[place].state = state;
    }

    /// Offers a process to its target; whether it is on its way.
    fn offer(&mut self, place: usize, next: &Move, state: &mut State, now_ms: u64) -> bool {
        let to = usize::from(next.to.0) - 1;
        let index = usize::try_from(next.pid.0).unwrap_or(0);
        let target = &mut self.machines[to];
        if !target.alive {
            self.tally.broken += 1;
            state.failed(next.pid, now_ms);
            return false;
        }
        let own = target.sample(next.to);
        // A home takes its own back always.
        if to != place
            && let Answer::No(refusal) =
                accepts(&own, &target.settling, &next.offer, &self.settings.policy, now_ms)
        {
            self.tally.refused += 1;
            state.refused(next.pid, refusal, now_ms);
            return false;
        }
        target.settling.coming(&next.offer, now_ms);
        state.accepted(next.pid, now_ms);
        self.tally.reason(next.reason);
        let running = &self.jobs[index];
        let from = running.at;
        self.transits.push(Transit::new(index, from, to, running.memory));
        self.machines[from].moves += 1;
        self.machines[to].moves += 1;
        true
    }

    /// What a node's own jobs want that are there.
    fn look_at_own(&mut self, place: usize, now_ms: u64) {
        let here = self.machines[place].own.iter().filter(|index| self.jobs[**index].at == place);
        let here: Vec<Process> = here.map(|index| self.process(*index, now_ms)).collect();
        self.machines[place].settling.own(here.iter(), &self.settings.policy);
    }

    fn view(&mut self, place: usize, now_ms: u64) -> Cluster {
        self.look_at_own(place, now_ms);
        self.known.clear();
        let machine = &self.machines[place];
        let guests = machine.own.iter().map(|index| self.jobs[*index].at).filter(|at| *at != place);
        self.knowledge.view(place, guests, now_ms, &self.alive, &mut self.known);
        let mut own = machine.sample(id(place));
        own.load = machine.settling.expected_load(&own, &self.settings.policy, now_ms);
        own.mem_free = machine.settling.expected_free(&own);
        let mut nodes = vec![own];
        nodes.extend(self.known.iter().filter(|known| known.node != place).map(Known::node));
        Cluster::new(id(place), nodes)
    }

    /// What the home's daemon sees of a job.
    fn process(&self, index: usize, now_ms: u64) -> Process {
        let running = &self.jobs[index];
        running.process(pid(index), self.machines[running.at].leaving, now_ms)
    }

    fn travel(&mut self, now_ms: u64) {
        let mut transits = std::mem::take(&mut self.transits);
        transits.retain_mut(|transit| {
            let running = &mut self.jobs[transit.job];
            if running.end.is_some() {
                let home = running.job.home;
                self.machines[transit.to].settling.cancelled(id(home), pid(transit.job));
            } else if !transit.go_on(&self.machines, running, STEP_S) {
                return true;
            } else {
                self.land(transit, now_ms);
            }
            for end in [transit.from, transit.to] {
                self.machines[end].moves = self.machines[end].moves.saturating_sub(1);
            }
            false
        });
        self.transits.append(&mut transits);
    }

    fn land(&mut self, transit: &Transit, now_ms: u64) {
        let Transit { job: index, from, to, .. } = *transit;
        let running = &mut self.jobs[index];
        running.frozen = false;
        running.at = to;
        running.came_ms = now_ms;
        running.moves += 1;
        self.tally.moves += 1;
        if running.left.is_some_and(|(left, at)| left == to && now_ms - at < 10_000) {
            self.tally.back += 1;
        }
        running.left = Some((from, now_ms));
        let (home, threads) = (running.job.home, running.demand);
        self.machines[from].here.retain(|other| *other != index);
        self.machines[from].settling.left(id(home), pid(index), threads, now_ms);
        self.machines[to].here.push(index);
        self.machines[to].settling.came(id(home), pid(index), now_ms);
        self.machines[home].state.arrived(pid(index), now_ms);
        self.again.insert(home);
    }

    fn run(&mut self, now_ms: u64) {
        let mut threads = 0.0;
        let (mut ended, mut full) = (Vec::new(), Vec::new());
        for (place, machine) in self.machines.iter_mut().enumerate().filter(|(_, machine)| machine.alive) {
            let before = machine.here.len();
            if before == 0 && machine.sampled == 0.0 {
                continue;
            }
            let here = if before > 0 { machine.here.clone() } else { Vec::new() };
            machine.run(place, &mut self.jobs, CALL_S, now_ms, STEP_S);
            if machine.here.len() < before {
                ended.extend(here.into_iter().filter(|index| self.jobs[*index].end.is_some()));
            }
            threads += machine.runnable;
            self.tally.memory(machine.used, &machine.hardware);
            if machine.used > machine.hardware.memory + machine.hardware.swap {
                full.push(place);
            }
        }
        for index in ended {
            let running = &self.jobs[index];
            let (home, at, threads) = (running.job.home, running.at, running.demand);
            self.machines[home].own.retain(|other| *other != index);
            self.machines[at].settling.left(id(home), pid(index), threads, now_ms);
            self.active -= 1;
            self.again.insert(home);
        }
        for place in full {
            let largest = self.machines[place].here.iter().copied();
            let largest = largest.max_by(|a, b| self.jobs[*a].memory.total_cmp(&self.jobs[*b].memory));
            if let Some(index) = largest {
                self.end(index, End::OutOfMemory);
            }
        }
        for place in 0..self.machines.len() {
            let machine = &mut self.machines[place];
            if machine.leaving && machine.alive && machine.here.is_empty() && machine.own.is_empty() {
                machine.alive = false;
                self.alive[place] = false;
            }
        }
        let share = self.pool.share(threads);
        if self.tally.fairness(share, now_ms) {
            let machines = &self.machines;
            let running = machines.iter().flat_map(|machine| machine.here.iter().copied());
            let counts = now_ms >= self.scenario.settled_ms;
            self.tally.look(running, &mut self.jobs, now_ms, counts);
        }
    }
}

/// The number of the node at a place.
pub(crate) fn id(place: usize) -> NodeId {
    NodeId(u16::try_from(place + 1).unwrap_or(u16::MAX))
}

fn pid(job: usize) -> HomePid {
    HomePid(i32::try_from(job).unwrap_or(i32::MAX))
}
