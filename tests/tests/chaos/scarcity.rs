//! Faults that limit the tasks of a shim, and the memory of a node's guests.

use crate::faults::programs_on;
use crate::{Chaos, lock};
use anyhow::Result;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tern_tests::cluster::limits::{MemoryLimit, PidsLimit, killed_for_memory};

/// Bytes that the guests of a node may use beyond their use when the limit is set.
const MIN_MORE: u64 = 1 << 20;
const MAX_MORE: u64 = 32 << 20;

/// How often the programs of a limited node are listed, and a limit without effect is tried again.
const INTERVAL: Duration = Duration::from_millis(500);

/// The programs that may be affected by a limit on memory.
#[derive(Debug, Default)]
pub(crate) struct Scarcity {
    programs: BTreeSet<i32>,
    /// A limit is in force.
    is_limiting: bool,
    /// The node that was limited last.
    node: u16,
    /// When the last process was killed there because of a limit, in seconds since boot.
    last_kill: f64,
    /// Killed processes that no lost program has accounted for.
    unclaimed: u64,
}

impl Scarcity {
    fn begin(&mut self, chaos: &Chaos, node: u16) -> Result<()> {
        self.update(chaos)?;
        let earlier = killed_for_memory(&chaos.cluster, node)?.last().copied();
        (self.node, self.last_kill) = (node, earlier.unwrap_or_default());
        self.is_limiting = true;
        Ok(())
    }

    /// A program begins to move. It may arrive, and be killed for its memory, between two listings
    /// of the limited node's programs.
    pub(crate) fn note_move(&mut self, pid: i32) {
        if self.is_limiting {
            self.programs.insert(pid);
        }
    }

    fn update(&mut self, chaos: &Chaos) -> Result<()> {
        if self.node != 0 {
            let mut kills = killed_for_memory(&chaos.cluster, self.node)?;
            kills.retain(|time| *time > self.last_kill);
            let killed = kills.len() as u64;
            chaos.count_all("processes killed by the limit on memory", killed);
            self.last_kill = kills.last().copied().unwrap_or(self.last_kill);
            self.unclaimed += killed;
        }
        Ok(())
    }

    /// Forgets a program that has ended. Returns whether it was on a limited node.
    pub(crate) fn remove(&mut self, pid: i32) -> bool {
        self.programs.remove(&pid)
    }

    /// Whether a process was killed because of a limit, and no other lost program has accounted for
    /// that process. From now on, the caller's program accounts for it.
    pub(crate) fn claim(&mut self, chaos: &Chaos) -> Result<bool> {
        self.update(chaos)?;
        let is_killed = self.unclaimed > 0;
        self.unclaimed = self.unclaimed.saturating_sub(1);
        Ok(is_killed)
    }
}

/// For this time, prevents a shim from having more tasks than now.
pub(crate) fn limit_pids(chaos: &Chaos, shim: &[i32], time: Duration) -> Result<()> {
    let Some(limit) = PidsLimit::set(&chaos.cluster, shim, None)? else { return Ok(()) };
    chaos.sleep(time);
    chaos.count_all("tasks refused by a limit on them", limit.refused()?);
    Ok(())
}

/// Limits the memory of a node's guests, to little more than their use, for this time.
pub(crate) fn limit_memory(chaos: &Chaos, node: u16, time: Duration, chance: u64) -> Result<()> {
    lock(&chaos.scarcity).begin(chaos, node)?;
    let note = || -> Result<()> {
        let there = programs_on(chaos, node)?;
        lock(&chaos.scarcity).programs.extend(there);
        Ok(())
    };
    let begun = Instant::now();
    let mut limit = None;
    while begun.elapsed() < time && !chaos.is_over() {
        note()?;
        if limit.is_none() {
            limit = MemoryLimit::set(&chaos.cluster, node, MIN_MORE + chance % (MAX_MORE - MIN_MORE))?;
        }
        chaos.sleep(INTERVAL);
    }
    note()?;
    if limit.is_some() {
        chaos.count("limits on memory");
    }
    drop(limit);
    let mut scarcity = lock(&chaos.scarcity);
    scarcity.is_limiting = false;
    scarcity.update(chaos)
}
