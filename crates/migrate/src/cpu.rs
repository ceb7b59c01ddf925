//! Resources that a process uses away from home.

use serde::{Deserialize, Serialize};

/// CPU time in nanoseconds, on all nodes but home, since the process first left home. The sum
/// travels with the process: each node adds its own share, and no node has to ask another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTime {
    /// In user mode.
    pub user: u64,
    /// In kernel mode.
    pub system: u64,
}

impl CpuTime {
    /// User and system time.
    #[must_use]
    pub fn total(self) -> u64 {
        self.user.saturating_add(self.system)
    }

    /// User and system time, in seconds.
    #[must_use]
    pub fn seconds(self) -> f64 {
        self.total() as f64 / 1e9
    }

    /// The sum, saturating.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { user: self.user.saturating_add(other.user), system: self.system.saturating_add(other.system) }
    }
}

/// Demands of a guest on its node besides CPU time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestDemand {
    /// Time in this epoch that it was runnable without a CPU, in nanoseconds.
    pub cpu_wait_ns: u64,
    /// Memory in use, in bytes.
    pub memory: u64,
    /// Bytes of the node's own files that it read and wrote directly, in this epoch.
    pub local_io: u64,
}
