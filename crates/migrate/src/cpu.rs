//! What a process uses away from home.

use serde::{Deserialize, Serialize};

/// CPU time in nanoseconds, on all nodes but home, since the process first left it. The sum travels with the
/// process, so that each node adds its own to it and nobody has to ask another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTime {
    /// In the program's own code.
    pub user: u64,
    /// In the kernel for it.
    pub system: u64,
}

impl CpuTime {
    /// Both.
    #[must_use]
    pub fn total(self) -> u64 {
        self.user.saturating_add(self.system)
    }

    /// Both, in seconds.
    #[must_use]
    pub fn seconds(self) -> f64 {
        self.total() as f64 / 1e9
    }

    /// This and that.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { user: self.user.saturating_add(other.user), system: self.system.saturating_add(other.system) }
    }
}

/// What a guest asks of its node beside the CPU time that it gets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Demand {
    /// Nanoseconds in which it was ready to run and had no CPU, in this life.
    pub waited: u64,
    /// Bytes of memory that it has.
    pub memory: u64,
    /// Bytes of this node's own files that it has read and written itself, in this life.
    pub near: u64,
}
