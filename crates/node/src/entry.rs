//! What each node tells the others of itself: the payload of its gossip. It comes from another machine, so its
//! numbers are only numbers.

use serde::{Deserialize, Serialize};
use tern_control::NodeFlags;
use tern_load::Sample;

/// A node, as it says.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// 100 is one standard CPU kept busy; as it will be when those who are on their way have come.
    pub(crate) load: f32,
    /// Of a thread that is alone, 10,000 for a standard CPU.
    pub(crate) speed: u32,
    /// How many such threads it carries.
    pub(crate) cpus: f32,
    /// Bytes, as are the next four.
    pub(crate) mem_total: u64,
    /// For a newcomer, when those who are on their way have come.
    pub(crate) mem_free: u64,
    /// Not even used as a cache.
    pub(crate) mem_raw_free: u64,
    pub(crate) swap_total: u64,
    pub(crate) swap_free: u64,
    /// Percent of the time in which somebody waits for memory.
    pub(crate) mem_pressure: f32,
    /// Percent of the time that goes into work rather than into paging.
    pub(crate) utilisability: u8,
    pub(crate) guests: u32,
    pub(crate) away: u32,
    pub(crate) flags: NodeFlags,
    /// It takes guests.
    pub(crate) open: bool,
}

impl Entry {
    /// Of a sample, as it was taken.
    pub(crate) fn of(sample: &Sample) -> Self {
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
            open: false,
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
    fn the_largest_entry_fits_and_nonsense_is_none() {
        let most = Entry {
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
            open: true,
        };
        let bytes = most.encode();
        assert!(bytes.len() <= tern_gossip::config::MOST_PAYLOAD, "{}", bytes.len());
        assert_eq!(Entry::decode(&bytes), Some(most));
        assert_eq!(Entry::decode(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Entry::decode(&[]), None);
    }
}
