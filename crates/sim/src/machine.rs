//! One node: its CPUs shared by its jobs, and its sampled load.

use crate::job::{End, Running};
use tern_balancer::{DecisionState, LinkCost, NodeSnapshot, PendingChanges};
use tern_ids::NodeId;

/// The hardware of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Hardware {
    /// Speed of one CPU; 10,000 is a standard CPU.
    pub speed: u32,
    /// Number of CPUs.
    pub cpus: f64,
    /// Bytes of memory.
    pub memory: f64,
    /// Bytes of swap.
    pub swap: f64,
    /// Throughput of its link, in bytes a second.
    pub link: f64,
}

impl Default for Hardware {
    fn default() -> Self {
        Self { speed: 10_000, cpus: 1.0, memory: 4e9, swap: 4e9, link: 117e6 }
    }
}

/// The state of a node.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) hardware: Hardware,
    pub(crate) alive: bool,
    /// Whether it moves its guests away in order to leave.
    pub(crate) leaving: bool,
    /// Jobs that run here.
    pub(crate) here: Vec<usize>,
    /// Jobs whose home this is.
    pub(crate) own: Vec<usize>,
    /// Number of threads that run or wait for a CPU.
    pub(crate) runnable: f64,
    /// `runnable`, smoothed as a sampler does.
    pub(crate) sampled_runnable: f64,
    /// Bytes of memory in use.
    pub(crate) used: f64,
    pub(crate) pending: PendingChanges,
    pub(crate) state: DecisionState,
    /// Number of moves on its link now.
    pub(crate) moves: u32,
}

/// Time constant of the simulated nodes' sampled load, in seconds. tern-load's is 1.25 s, but it
/// averages whole seconds. The results in docs/design/balancing.md were measured with this value.
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
            sampled_runnable: 0.0,
            used: 0.0,
            pending: PendingChanges::default(),
            state: DecisionState::default(),
            moves: 0,
        }
    }

    /// Speed of one CPU in standard CPUs.
    pub(crate) fn speed(&self) -> f64 {
        f64::from(self.hardware.speed) / 10_000.0
    }

    /// The share of one of its threads, in standard CPUs.
    fn share(&self) -> f64 {
        self.speed() * self.hardware.cpus / self.runnable.max(self.hardware.cpus).max(1.0)
    }

    /// Runs its jobs for a step; jobs that end are removed from `here`.
    pub(crate) fn run(&mut self, me: usize, jobs: &mut [Running], call_s: f64, now_ms: u64, step_s: f64) {
        let (share, speed, link) = (self.share(), self.speed(), self.hardware.link);
        let (mut runnable, mut used) = (0.0, 0.0);
        self.here.retain(|&index| {
            let Some(running) = jobs.get_mut(index) else { return false };
            if running.job.growth > 0.0 && !running.frozen {
                running.memory = (running.memory + running.job.growth * step_s).min(running.job.max_memory);
            }
            used += running.memory;
            if running.frozen || running.is_resting(now_ms) {
                running.busy = 0.0;
                running.pace = 0.0;
                running.demand -= if running.frozen { 0.0 } else { running.demand * (step_s / SAMPLER_S) };
                return true;
            }
            let pace = 1.0 / share + running.job.sleep + running.job.remote_wait(me, call_s, link);
            running.pace = pace;
            running.busy = 1.0 / (share * pace);
            running.demand += (running.busy - running.demand) * (step_s / SAMPLER_S);
            let done = step_s / pace;
            running.cpu_s += done.min(running.remaining_s) / speed;
            running.window_s += done;
            if running.remaining_s <= done {
                running.end = Some(End::Done(now_ms as f64 / 1000.0 + running.remaining_s * pace));
                running.remaining_s = 0.0;
                used -= running.memory;
                return false;
            }
            running.remaining_s -= done;
            runnable += running.busy;
            true
        });
        self.runnable = runnable;
        self.used = used;
        self.sampled_runnable += (runnable - self.sampled_runnable) * (step_s / SAMPLER_S);
    }

    /// The sample that its own daemon takes.
    pub(crate) fn sample(&self, id: NodeId) -> NodeSnapshot {
        let free = (self.hardware.memory - self.used).max(0.0) as u64;
        let swapped = (self.used - self.hardware.memory).max(0.0);
        let mut node = NodeSnapshot {
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
        node.load = node.load_of(self.sampled_runnable);
        node
    }
}
