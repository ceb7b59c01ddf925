//! The load of one node, as it is gossiped. An entry comes from another machine, so its numbers are
//! used as plain values only, never as sizes or indices.

use serde::{Deserialize, Serialize};
use tern_control::NodeFlags;
use tern_load::Sample;

/// The load of one node, as reported by that node.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct LoadEntry {
    /// 100 is one standard CPU kept busy; includes guests that are on their way.
    pub(crate) load: f32,
    /// Speed of one thread that runs alone; 10,000 is a standard CPU.
    pub(crate) speed: u32,
    /// Number of such threads that run at full speed together.
    pub(crate) cpus: f32,
    /// In bytes, like the next four fields.
    pub(crate) mem_total: u64,
    /// Available to a further guest after the arrival of all guests that are on their way.
    pub(crate) mem_free: u64,
    /// Not used even as a cache.
    pub(crate) mem_raw_free: u64,
    pub(crate) swap_total: u64,
    pub(crate) swap_free: u64,
    /// Percent of the time during which some task waits for memory.
    pub(crate) mem_pressure: f32,
    /// Percent of the time that is spent on work and not on paging.
    pub(crate) utilisability: u8,
    pub(crate) guests: u32,
    pub(crate) away: u32,
    pub(crate) flags: NodeFlags,
    /// Whether it accepts guests.
    pub(crate) accepts_guests: bool,
}

impl LoadEntry {
    /// The entry of a sample; guests, flags and `accepts_guests` are filled in by the caller.
    pub(crate) fn from_sample(sample: &Sample) -> Self {
        Self {
            load: sample.load as f32,
            speed: sample.speed,
            cpus: sample.cpus,
            mem_total: sample.memory.total,
            mem_free: sample.memory.free,
            mem_raw_free: sample.memory.unused,
            swap_total: sample.memory.swap_total,
            swap_free: sample.memory.swap_free,
            mem_pressure: sample.pressure.map_or(0.0, |pressure| pressure.memory),
            utilisability: sample.utilisability,
            guests: 0,
            away: 0,
            flags: NodeFlags::default(),
            accepts_guests: false,
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        tern_wire::encode(self).unwrap_or_default()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        tern_wire::decode(bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_entry_fits_and_truncated_entry_is_rejected() {
        let largest = LoadEntry {
            load: f32::MAX,
            speed: u32::MAX,
            cpus: f32::MAX,
            mem_total: u64::MAX,
            mem_free: u64::MAX,
            mem_raw_free: u64::MAX,
            swap_total: u64::MAX,
            swap_free: u64::MAX,
            mem_pressure: f32::MAX,
            utilisability: u8::MAX,
            guests: u32::MAX,
            away: u32::MAX,
            flags: NodeFlags { stay: true, lstay: true, block: true, quiet: true, nomfs: true },
            accepts_guests: true,
        };
        let bytes = largest.encode();
        assert!(bytes.len() <= tern_gossip::config::MAX_PAYLOAD, "{}", bytes.len());
        assert_eq!(LoadEntry::decode(&bytes), Some(largest));
        assert_eq!(LoadEntry::decode(&bytes[..bytes.len() - 1]), None);
        assert_eq!(LoadEntry::decode(&[]), None);
    }
}
