//! One node: its CPUs shared by its jobs, its load as it is sampled.

use crate::job::{End, Running};
use tern_balancer::{LinkCost, Node, Settling, State};
use tern_ids::NodeId;

/// What a node is.
#[derive(Debug, Clone, PartialEq)]
pub struct Hardware {
    /// 10,000 is a standard CPU.
    pub speed: u32,
    /// CPUs.
    pub cpus: f64,
    /// Bytes.
    pub memory: f64,
    /// Bytes of swap.
    pub swap: f64,
    /// Bytes a second that its link carries.
    pub link: f64,
}

impl Default for Hardware {
    fn default() -> Self {
        Self { speed: 10_000, cpus: 1.0, memory: 4e9, swap: 4e9, link: 117e6 }
    }
}

/// One node as it is now.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) hardware: Hardware,
    pub(crate) alive: bool,
    /// Sends its guests away, and then leaves.
    pub(crate) leaving: bool,
    /// Jobs that run here.
    pub(crate) here: Vec<usize>,
    /// Jobs whose home this is.
    pub(crate) own: Vec<usize>,
    /// Threads that run or wait.
    pub(crate) runnable: f64,
    /// The same, smoothed as a sampler does.
    pub(crate) sampled: f64,
    /// Bytes in use.
    pub(crate) used: f64,
    pub(crate) settling: Settling,
    pub(crate) state: State,
    /// Moves that its link carries now.
    pub(crate) moves: u32,
}

/// Time to 63% of a step in the sampled load; what tern-load does.
pub(crate) const SAMPLER_S: f64 = 1.5;

impl Machine {
    pub(crate) fn new(hardware: Hardware, alive: bool) -> Self {
        Self {
            hardware,
            alive,
            leaving: false,
            here: Vec::new(),
            own: Vec::new(),
            runnable: 0.0,
            sampled: 0.0,
            used: 0.0,
            settling: Settling::default(),
            state: State::default(),
            moves: 0,
        }
    }

    /// Standard CPUs.
    pub(crate) fn speed(&self) -> f64 {
        f64::from(self.hardware.speed) / 10_000.0
    }

    /// What one of its threads gets, in standard CPUs.
    fn share(&self) -> f64 {
        self.speed() * self.hardware.cpus / self.runnable.max(self.hardware.cpus).max(1.0)
    }

    /// Lets its jobs run for a while; those that end are taken off.
    pub(crate) fn run(&mut self, me: usize, jobs: &mut [Running], call_s: f64, now_ms: u64, step_s: f64) {
        let (share, speed, link) = (self.share(), self.speed(), self.hardware.link);
        let (mut runnable, mut used) = (0.0, 0.0);
        self.here.retain(|&index| {
            let Some(running) = jobs.get_mut(index) else { return false };
            if running.job.growth > 0.0 && !running.frozen {
                running.memory = (running.memory + running.job.growth * step_s).min(running.job.memory_most);
            }
            used += running.memory;
            if running.frozen || running.rests(now_ms) {
                running.busy = 0.0;
                running.pace = 0.0;
                running.demand -= if running.frozen { 0.0 } else { running.demand * (step_s / SAMPLER_S) };
                return true;
            }
            let pace = 1.0 / share + running.job.sleep + running.job.talk(me, call_s, link);
            running.pace = pace;
            running.busy = 1.0 / (share * pace);
            running.demand += (running.busy - running.demand) * (step_s / SAMPLER_S);
            let done = step_s / pace;
            running.cpu_s += done.min(running.left_s) / speed;
            running.window_s += done;
            if running.left_s <= done {
                running.end = Some(End::Done(now_ms as f64 / 1000.0 + running.left_s * pace));
                running.left_s = 0.0;
                used -= running.memory;
                return false;
            }
            running.left_s -= done;
            runnable += running.busy;
            true
        });
        self.runnable = runnable;
        self.used = used;
        self.sampled += (runnable - self.sampled) * (step_s / SAMPLER_S);
    }

    /// What its own daemon samples.
    pub(crate) fn sample(&self, id: NodeId) -> Node {
        let free = (self.hardware.memory - self.used).max(0.0) as u64;
        let swapped = (self.used - self.hardware.memory).max(0.0);
        let mut node = Node {
            id,
            speed: self.hardware.speed,
            cpus: self.hardware.cpus,
            load: 0.0,
            mem_free: free,
            mem_total: self.hardware.memory as u64,
            swap_free: (self.hardware.swap - swapped).max(0.0) as u64,
            swap_total: self.hardware.swap as u64,
            mem_pressure: if swapped > 0.0 { 30.0 } else { 0.0 },
            takes_guests: !self.leaving,
            age_ms: 0,
            alive: true,
            link: LinkCost { rtt_us: 200, bytes_per_s: self.hardware.link as u64 },
        };
        node.load = node.load_of(self.sampled);
        node
    }
}
