//! A home's own processes, as the balancer sees them.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use tern_ids::{HomePid, NodeId};

/// The user's advice on a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hint {
    /// None: the measurements count.
    #[default]
    None,
    /// `cpujob`, `mosrun -c`: its calls are ignored.
    Cpu,
    /// `iojob`: it belongs where its files are, at home.
    Io,
}

/// A rate of calls, and of the data that they carry.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Traffic {
    /// Round trips a second.
    pub calls_per_s: f64,
    /// Bytes a second.
    pub bytes_per_s: f64,
}

/// A process of this home, wherever it runs; also a group of processes that migrates as one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessSnapshot {
    /// Its PID at home.
    pub pid: HomePid,
    /// The node where it runs; while it moves, the node that it is leaving.
    pub at: NodeId,
    /// Its CPU use if it never waited for a CPU, in percent of one CPU: run time plus time waiting
    /// for a CPU, divided by wall time.
    pub demand: f64,
    /// CPU seconds used.
    pub cpu_s: f64,
    /// Seconds since it started.
    pub age_s: f64,
    /// Seconds since it came to its node; its age if it never moved.
    pub resident_s: f64,
    /// Bytes that a move would send.
    pub rss: u64,
    /// Growth of `rss`, in bytes a second.
    pub growth: u64,
    /// How fast it rewrites pages already sent, in bytes a second.
    pub dirty: u64,
    /// Calls to home a second; for a process at home, those that it would send home if it were
    /// away.
    pub calls_per_s: f64,
    /// Data that these calls carry, in bytes a second.
    pub bytes_per_s: f64,
    /// Traffic to files below /mfs, by the node that has them: what home requests from that node for
    /// the process, or would if the process did not run there. Not included in `calls_per_s` and
    /// `bytes_per_s`.
    pub files: BTreeMap<NodeId, Traffic>,
    /// Bytes that it will need (`mosrun -m`); 0 if it needs no more than it has.
    pub claim: u64,
    /// The user's advice.
    pub hint: Hint,
    /// Locked: it stays, whatever the measurements.
    pub locked: bool,
    /// Nodes where it may run; `None`: all but the forbidden ones.
    pub allowed: Option<BTreeSet<NodeId>>,
    /// Nodes where it must not run.
    pub forbidden: BTreeSet<NodeId>,
    /// Whether it can be moved now, and neither its user nor an administrator forbids it.
    pub movable: bool,
    /// Its node wants it to leave (`expel`, the node's owner needs the node, a shutdown). A locked
    /// process leaves too. Only the simulator sets this: ternd evacuates by itself.
    pub evicted: bool,
}

impl ProcessSnapshot {
    /// A process with these values, and no memory, traffic or restrictions.
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

    /// Whether it may run on `node`; it always may at home.
    #[must_use]
    pub fn may_run_on(&self, node: NodeId, home: NodeId) -> bool {
        node == home
            || !self.forbidden.contains(&node)
                && self.allowed.as_ref().is_none_or(|allowed| allowed.contains(&node))
    }

    /// Average number of its threads that run or wait for a CPU.
    pub(crate) fn threads(&self) -> f64 {
        if self.demand.is_finite() { (self.demand / 100.0).clamp(0.0, 65_536.0) } else { 0.0 }
    }

    /// Bytes that it will need on its target.
    pub(crate) fn memory(&self) -> u64 {
        self.claim.max(self.rss)
    }
}
