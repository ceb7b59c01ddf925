//! Moves under way: pre-copy of the memory, then of pages written meanwhile, then a short freeze.

use crate::job::Running;
use crate::machine::Machine;

/// A move under way.
#[derive(Debug, Clone)]
pub(crate) struct Migration {
    pub(crate) job: usize,
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Bytes of this round still to be sent.
    left: f64,
    /// Bytes written since the round began.
    written: f64,
    rounds: u32,
    frozen: bool,
    /// Seconds of the freeze that do not depend on memory.
    pause_s: f64,
}

const MAX_ROUNDS: u32 = 5;
const STOP_COPY_BYTES: f64 = 2.0 * 1024.0 * 1024.0;
/// docs/benchmarks.md: 5 to 12 ms.
const PAUSE_S: f64 = 0.012;

impl Migration {
    /// A move that begins now.
    pub(crate) fn new(job: usize, from: usize, to: usize, memory: f64) -> Self {
        Self { job, from, to, left: memory, written: 0.0, rounds: 0, frozen: false, pause_s: PAUSE_S }
    }

    /// Advances the move by a step; returns whether the process has arrived.
    pub(crate) fn advance(&mut self, machines: &[Machine], running: &mut Running, step_s: f64) -> bool {
        let bytes_per_s =
            |index: usize| machines.get(index).map_or(1.0, |m| m.hardware.link / f64::from(m.moves.max(1)));
        let speed = bytes_per_s(self.from).min(bytes_per_s(self.to));
        let mut time = step_s;
        loop {
            let needed = self.left / speed;
            if needed > time {
                self.left -= speed * time;
                self.write(running, time);
                return false;
            }
            time -= needed;
            self.write(running, needed);
            if self.frozen {
                self.pause_s -= time;
                return self.pause_s <= 0.0;
            }
            self.rounds += 1;
            (self.left, self.written) = (self.written, 0.0);
            if self.left < STOP_COPY_BYTES || self.rounds >= MAX_ROUNDS {
                self.frozen = true;
                running.frozen = true;
            }
        }
    }

    fn write(&mut self, running: &Running, time: f64) {
        if !self.frozen {
            let rate = running.job.dirty * running.busy.min(1.0) + running.job.growth;
            self.written = (self.written + rate * time).min(running.memory);
        }
    }
}
