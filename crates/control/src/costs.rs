//! Costs of sending to another node: what `tune` measures and `mosctl gettune` shows; also their
//! `--json` formats.

use serde::{Deserialize, Serialize};
use tern_ids::NodeId;

/// Costs of a node, as measured by `tune`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Costs {
    /// The node.
    pub node: NodeId,
    /// Round trip in microseconds.
    pub rtt_us: u32,
    /// Throughput to that node, in bytes per second.
    pub bytes_per_s: u64,
    /// Throughput from that node, in bytes per second.
    pub back_bytes_per_s: u64,
    /// Cost of a system call that is forwarded home, in nanoseconds; `None` if no process could be
    /// moved there.
    pub call_ns: Option<u64>,
    /// Cost of moving a process there.
    pub migration: Option<MigrationCosts>,
    /// Time of the measurement, in seconds since 1970.
    pub at: u64,
}

/// The cost of moving a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationCosts {
    /// For a process without memory, in microseconds.
    pub fixed_us: u64,
    /// For each mebibyte of memory, in microseconds; at least 1.
    pub us_per_mib: u64,
}

/// Costs of a node, as shown by `mosctl gettune`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkRow {
    /// The node.
    pub node: NodeId,
    /// Round trip that the balancer uses now, in microseconds: the measurement of `tune`, corrected
    /// by recent round trips. 0 if there is neither.
    pub rtt_us: u32,
    /// Throughput that the balancer uses now, in bytes per second: the measurement of `tune`,
    /// corrected by recent migrations. 0 if there is neither.
    pub bytes_per_s: u64,
    /// The measurement of `tune`, if there is one.
    pub tuned: Option<Costs>,
}
