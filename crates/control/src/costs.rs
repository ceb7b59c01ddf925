//! What it costs to send to another node: what `tune` measures and `mosctl gettune` shows; also their `--json` formats.

use serde::{Deserialize, Serialize};
use tern_ids::NodeId;

/// A node as `tune` has measured it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Costs {
    /// Which.
    pub node: NodeId,
    /// There and back, in microseconds.
    pub rtt_us: u32,
    /// What goes there, in bytes per second.
    pub bytes_per_s: u64,
    /// What comes from there.
    pub back_bytes_per_s: u64,
    /// What a system call to home costs, in nanoseconds; `None` if no process could be moved there.
    pub call_ns: Option<u64>,
    /// What moving a process there costs.
    pub migration: Option<MigrationCosts>,
    /// When it was measured, in seconds since 1970.
    pub at: u64,
}

/// What moving a process costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationCosts {
    /// Of one without memory, in microseconds.
    pub fixed_us: u64,
    /// More for each mebibyte, in microseconds; at least 1.
    pub us_per_mib: u64,
}

/// A node as `mosctl gettune` shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkRow {
    /// Which.
    pub node: NodeId,
    /// What the balancer reckons with now, in microseconds: of late round trips. 0 if there were none.
    pub rtt_us: u32,
    /// The same in bytes per second, of late migrations; 0 if there were none.
    pub bytes_per_s: u64,
    /// What `tune` has measured, if it has.
    pub tuned: Option<Costs>,
}
