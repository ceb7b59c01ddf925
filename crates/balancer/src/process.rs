//! What a home knows of its own processes.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use tern_ids::{HomePid, NodeId};

/// What the user said about a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hint {
    /// Nothing: what is measured counts.
    #[default]
    None,
    /// `cpujob`, `mosrun -c`: its calls are not looked at.
    Cpu,
    /// `iojob`: it belongs where its files are, at home.
    Io,
}

/// Calls, and what they carry.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Traffic {
    /// Round trips a second.
    pub calls_per_s: f64,
    /// Bytes a second.
    pub bytes_per_s: f64,
}

/// One process of this home, wherever it runs; also a family that moves as one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// Which.
    pub pid: HomePid,
    /// Where it runs now. While it moves: where it still runs.
    pub at: NodeId,
    /// What it would use if it did not wait for a CPU, in percent of one CPU: run and wait, of wall time.
    pub demand: f64,
    /// CPU seconds that it has used.
    pub cpu_s: f64,
    /// Seconds since it started.
    pub age_s: f64,
    /// Seconds since it came to where it is; its age if it never moved.
    pub resident_s: f64,
    /// Bytes that would have to be sent.
    pub rss: u64,
    /// How fast that grows, in bytes a second.
    pub growth: u64,
    /// How fast it writes pages that have been sent, in bytes a second.
    pub dirty: u64,
    /// Calls to home a second: those that go there, or, at home, that would.
    pub calls_per_s: f64,
    /// What these calls carry, in bytes a second.
    pub bytes_per_s: f64,
    /// What it reads and writes of other nodes' files, which is in neither of these: what home asks that node for, or,
    /// where it runs on it, would.
    pub files: BTreeMap<NodeId, Traffic>,
    /// Bytes that it will need (`mosrun -m`); 0: what it has.
    pub claim: u64,
    /// What the user said.
    pub hint: Hint,
    /// Locked: it stays, whatever the numbers say.
    pub locked: bool,
    /// Nodes where it may run; `None`: all but the forbidden ones.
    pub allowed: Option<BTreeSet<NodeId>>,
    /// Nodes where it must not run.
    pub forbidden: BTreeSet<NodeId>,
    /// Whether it can be moved, and its administrator lets it be.
    pub movable: bool,
    /// The node where it runs wants it gone (`expel`, its owner, a shutdown): it leaves also if it is locked.
    pub evicted: bool,
}

impl Process {
    /// A process at home of which nothing is known but what is named here; for the rest see the fields.
    #[must_use]
    pub fn new(pid: HomePid, at: NodeId, demand: f64, cpu_s: f64) -> Self {
        Self {
            pid,
            at,
            demand,
            cpu_s,
            age_s: cpu_s,
            resident_s: cpu_s,
            rss: 0,
            growth: 0,
            dirty: 0,
            calls_per_s: 0.0,
            bytes_per_s: 0.0,
            files: BTreeMap::new(),
            claim: 0,
            hint: Hint::None,
            locked: false,
            allowed: None,
            forbidden: BTreeSet::new(),
            movable: true,
            evicted: false,
        }
    }

    /// Whether it may run on `node`; at home it always may.
    #[must_use]
    pub fn may_run_on(&self, node: NodeId, home: NodeId) -> bool {
        node == home
            || !self.forbidden.contains(&node)
                && self.allowed.as_ref().is_none_or(|allowed| allowed.contains(&node))
    }

    /// How many threads of it run or wait, on average.
    pub(crate) fn threads(&self) -> f64 {
        if self.demand.is_finite() { (self.demand / 100.0).clamp(0.0, 65_536.0) } else { 0.0 }
    }

    /// What it will need where it goes.
    pub(crate) fn memory(&self) -> u64 {
        self.claim.max(self.rss)
    }
}
