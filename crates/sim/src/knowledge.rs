//! What each node knows of the others.

use crate::chance::Chance;

/// What a node says of itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Entry {
    pub(crate) speed: u32,
    pub(crate) cpus: f32,
    pub(crate) load: f32,
    pub(crate) free: u64,
    pub(crate) total: u64,
    pub(crate) pressure: f32,
    pub(crate) takes_guests: bool,
}

/// What a node knows of another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known {
    pub(crate) node: usize,
    pub(crate) age_ms: u64,
    pub(crate) alive: bool,
    pub(crate) entry: Entry,
}

/// Everybody knows everything, as it was a given time ago: for comparison.
#[derive(Debug)]
pub(crate) struct Ideal {
    entries: Vec<Option<(u64, Entry)>>,
    chance: Chance,
}

/// Views of more nodes than this are drawn at random, as gossip would, or each decision would look at all.
const MOST: usize = 256;

impl Ideal {
    pub(crate) fn new(nodes: usize, seed: u64) -> Self {
        Self { entries: vec![None; nodes], chance: Chance::new(seed) }
    }

    pub(crate) fn tell(&mut self, node: usize, now_ms: u64, entry: Entry) {
        if let Some(slot) = self.entries.get_mut(node) {
            *slot = Some((now_ms, entry));
        }
    }

    pub(crate) fn view(&mut self, now_ms: u64, alive: &[bool], into: &mut Vec<Known>) {
        let all = self.entries.len();
        for pick in 0..all.min(MOST) {
            let node = if all <= MOST { pick } else { self.chance.below(all) };
            if let Some((at, entry)) = self.entries[node] {
                into.push(Known { node, age_ms: now_ms - at, alive: alive[node], entry });
            }
        }
    }
}
