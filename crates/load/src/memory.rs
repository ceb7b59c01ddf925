//! Memory and swap that a newcomer would find: what the kernel could give without swapping, and not more than the
//! control groups allow.

use crate::group::{Limits, MemoryLimit};
use crate::task::keyed;
use serde::{Deserialize, Serialize};

/// In bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Memory {
    /// All that there is.
    pub total: u64,
    /// What is free for a newcomer: caches can be given up, and nothing need be swapped.
    pub free: u64,
    /// What nothing uses, not even as a cache, on the whole machine.
    pub unused: u64,
    /// Swap space.
    pub swap_total: u64,
    /// Of it, free.
    pub swap_free: u64,
}

impl Memory {
    /// Of `/proc/meminfo` and the limits; nothing if that is something else.
    #[must_use]
    pub fn of(meminfo: &str, limits: &Limits) -> Option<Self> {
        let bytes = |key| Some(keyed(meminfo, key)?.saturating_mul(1024));
        // Kernels before 3.14 do not say what is available.
        let free = bytes("MemAvailable:").or_else(|| bytes("MemFree:"))?;
        let memory = within(MemoryLimit { total: bytes("MemTotal:")?, free }, limits.memory);
        let swap =
            MemoryLimit { total: bytes("SwapTotal:").unwrap_or(0), free: bytes("SwapFree:").unwrap_or(0) };
        let swap = within(swap, limits.swap);
        let unused = bytes("MemFree:").unwrap_or(0);
        let (swap_total, swap_free) = (swap.total, swap.free);
        Some(Self { total: memory.total, free: memory.free, unused, swap_total, swap_free })
    }
}

fn within(machine: MemoryLimit, limit: Option<MemoryLimit>) -> MemoryLimit {
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
    fn a_machine_has_what_it_says() {
        let memory = Memory::of(MEMINFO, &Limits::default()).unwrap();
        assert_eq!((memory.total, memory.free), (24_684_092 << 10, 24_157_172 << 10));
        assert_eq!(memory.unused, 21_722_612 << 10);
        assert_eq!((memory.swap_total, memory.swap_free), (1_024_000, 921_600));
    }

    #[test]
    fn a_container_has_no_more_than_its_group_and_no_more_than_its_machine() {
        let tight = Some(MemoryLimit { total: 4096, free: 1024 });
        let wide = Some(MemoryLimit { total: u64::MAX, free: u64::MAX });
        let memory = Memory::of(MEMINFO, &Limits { memory: tight, swap: wide }).unwrap();
        assert_eq!((memory.total, memory.free, memory.swap_free), (4096, 1024, 921_600));
    }

    proptest! {
        #[test]
        fn no_text_can_harm(text in "[A-Za-z: 0-9\n]{0,200}") {
            let _ = Memory::of(&text, &Limits::default());
        }
    }
}
