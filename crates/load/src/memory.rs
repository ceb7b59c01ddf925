//! Memory and swap available to an arriving process: what the kernel could provide without
//! swapping, within the limits of the control groups.

use crate::group::{Limits, MemoryLimit};
use crate::task::number_after;
use serde::{Deserialize, Serialize};

/// Memory of a node, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NodeMemory {
    /// Memory in total.
    pub total: u64,
    /// Memory available to an arriving process: caches can be dropped, nothing need be swapped.
    pub free: u64,
    /// Memory that nothing uses, not even as a cache, on the whole machine.
    pub unused: u64,
    /// Swap space in total.
    pub swap_total: u64,
    /// Free swap space.
    pub swap_free: u64,
}

impl NodeMemory {
    /// From the text of `/proc/meminfo` and the limits; `None` if the text is malformed.
    #[must_use]
    pub fn of(meminfo: &str, limits: &Limits) -> Option<Self> {
        let bytes = |key| Some(number_after(meminfo, key)?.saturating_mul(1024));
        // Kernels before 3.14 have no MemAvailable.
        let free = bytes("MemAvailable:").or_else(|| bytes("MemFree:"))?;
        let memory = limited(MemoryLimit { total: bytes("MemTotal:")?, free }, limits.memory);
        let swap =
            MemoryLimit { total: bytes("SwapTotal:").unwrap_or(0), free: bytes("SwapFree:").unwrap_or(0) };
        let swap = limited(swap, limits.swap);
        let unused = bytes("MemFree:").unwrap_or(0);
        let (swap_total, swap_free) = (swap.total, swap.free);
        Some(Self { total: memory.total, free: memory.free, unused, swap_total, swap_free })
    }
}

/// The machine's memory, within the limit of the control groups.
fn limited(machine: MemoryLimit, limit: Option<MemoryLimit>) -> MemoryLimit {
    let limit = limit.unwrap_or(machine);
    MemoryLimit { total: machine.total.min(limit.total), free: machine.free.min(limit.free) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MEMINFO: &str = "MemTotal:       24684092 kB\nMemFree:        21722612 kB\nMemAvailable:   24157172 kB\n\
                           Buffers:           14112 kB\nSwapTotal:         1000 kB\nSwapFree:           900 kB\n";

    #[test]
    fn machine_memory_is_that_of_meminfo() {
        let memory = NodeMemory::of(MEMINFO, &Limits::default()).unwrap();
        assert_eq!((memory.total, memory.free), (24_684_092 << 10, 24_157_172 << 10));
        assert_eq!(memory.unused, 21_722_612 << 10);
        assert_eq!((memory.swap_total, memory.swap_free), (1_024_000, 921_600));
    }

    #[test]
    fn container_memory_is_limited_by_group_and_machine() {
        let tight = Some(MemoryLimit { total: 4096, free: 1024 });
        let wide = Some(MemoryLimit { total: u64::MAX, free: u64::MAX });
        let memory = NodeMemory::of(MEMINFO, &Limits { memory: tight, swap: wide }).unwrap();
        assert_eq!((memory.total, memory.free, memory.swap_free), (4096, 1024, 921_600));
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_harmless(text in "[A-Za-z: 0-9\n]{0,200}") {
            let _ = NodeMemory::of(&text, &Limits::default());
        }
    }
}
