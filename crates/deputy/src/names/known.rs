//! What a process knows of names, and when it is worth it to tell it more.

use super::eyes::{Event, Meets, Watched};
use super::look::Seen;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tern_ids::Epoch;
use tern_migrate::names::{MOST_NAMES, NameWord};
use tern_syscall::ByteBuf;

/// A directory is looked at after so many calls about names in it within a second, the next time after twice as many.
const FIRST: u32 = 4;
/// So many names each of these calls is worth: they are sent in about the time that one more call would take.
const WORTH: u32 = 32;
/// After so many listings of it, that it changes is no reason for yet another one so soon.
const MOST_SOON: u32 = 6;
const SECOND: Duration = Duration::from_secs(1);
/// So many directories of a process are listed at most, with so many names in all.
const MOST_DIRECTORIES: usize = 256;
const MOST_KNOWN: usize = 32 << 10;
/// What has been seen waits so long to be told.
const FRESH: Duration = Duration::from_millis(500);
/// After so many changes within a second a directory is not watched any more: each of them wakes us. It is looked at again when it is asked for as often.
const MOST_EVENTS: u32 = 2000;

/// What a process knows of names.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(super) life: Epoch,
    /// Counts up when paths may lead elsewhere.
    pub(super) turn: u64,
    /// Its threads need not be the same before the file system.
    pub(super) off: bool,
    pub(super) directories: BTreeMap<Vec<u8>, Directory>,
}

/// A directory that a process looks names up in.
#[derive(Debug, Default)]
pub(super) struct Directory {
    /// How many calls about it came here since then.
    calls: u32,
    since: Option<Instant>,
    /// With how many it is looked at.
    due: u32,
    listed: u32,
    pub(super) is_looked_at: bool,
    /// What has been seen, and has changed since: to be told.
    pub(super) seen: Option<(Seen, BTreeSet<Vec<u8>>)>,
    pub(super) told: Option<Told>,
    /// How much has changed since then.
    events: u32,
    events_since: Option<Instant>,
}

/// What has been told.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) watched: Watched,
    pub(super) names: usize,
    /// Of these names that it is so no more.
    pub(super) changed: BTreeSet<Vec<u8>>,
}

/// Counts what happens within about a second.
fn count(count: &mut u32, since: &mut Option<Instant>) {
    if since.is_none_or(|since| since.elapsed() > SECOND) {
        (*since, *count) = (Some(Instant::now()), 0);
    }
    *count += 1;
}

impl Known {
    /// Nothing is known any more, and what is being looked at is of no use; whether the process had been told anything.
    pub(crate) fn forget(&mut self) -> bool {
        self.turn += 1;
        std::mem::take(&mut self.directories).into_values().any(|directory| directory.told.is_some())
    }

    /// Whether there is room for this directory too. What has not been told makes place for it.
    pub(super) fn has_room_for(&mut self, path: &[u8]) -> bool {
        if self.directories.len() >= MOST_DIRECTORIES && !self.directories.contains_key(path) {
            self.directories.retain(|_, directory| directory.told.is_some());
        }
        let names: usize = self.directories.values().map(Directory::names).sum();
        self.directories.len() < MOST_DIRECTORIES && names < MOST_KNOWN
    }

    /// What has been seen long ago is not told any more.
    pub(super) fn drop_stale(&mut self) {
        for directory in self.directories.values_mut() {
            directory.seen.take_if(|(seen, _)| seen.at.elapsed() >= FRESH);
        }
    }
}

impl Directory {
    fn names(&self) -> usize {
        let seen = self.seen.as_ref().map_or(0, |(seen, _)| seen.names.len());
        seen + self.told.as_ref().map_or(0, |told| told.names)
    }

    /// A call has come here that would have been answered by who knows it.
    pub(super) fn is_asked_for(&mut self) {
        count(&mut self.calls, &mut self.since);
    }

    /// Whether what has been seen may be told with a call that was made since then.
    pub(super) fn is_to_be_told(&self, made_since: Instant) -> bool {
        self.seen.as_ref().is_some_and(|(seen, _)| seen.at < made_since && seen.at.elapsed() < FRESH)
    }

    /// If it is to be looked at: how many names are worth it.
    pub(super) fn worth(&mut self) -> Option<usize> {
        let due = self.due.max(FIRST << self.listed.min(MOST_SOON));
        if self.calls < due || self.is_looked_at {
            return None;
        }
        (self.due, self.seen) = (self.calls.saturating_mul(2), None);
        Some(MOST_NAMES.min(self.calls.saturating_mul(WORTH) as usize))
    }

    /// It cannot be told.
    pub(super) fn never(&mut self) {
        self.due = u32::MAX;
    }

    pub(super) fn is_told(&mut self, told: Told) {
        (self.calls, self.due, self.listed) = (0, 0, self.listed.saturating_add(1));
        self.told = Some(told);
    }

    /// Whether it is watched by this watch, among others.
    pub(super) fn needs(&self, watch: i32) -> bool {
        let told = self.told.as_ref().map(|told| &told.watched);
        let seen = self.seen.as_ref().map(|(seen, _)| &seen.watched);
        told.into_iter().chain(seen).flat_map(Watched::watches).any(|needed| needed == watch)
    }

    /// Takes what has changed since it was seen.
    pub(super) fn hear_since_seen(&mut self, event: &Event) {
        let Some((seen, changed)) = &mut self.seen else { return };
        match seen.watched.meets(event) {
            Meets::Name(name) => drop(changed.insert(name)),
            Meets::Directory => self.seen = None,
            Meets::Nothing => {}
        }
    }

    /// Takes what has changed: what the process is to be told.
    pub(super) fn hear(&mut self, path: &[u8], event: &Event) -> Option<NameWord> {
        self.hear_since_seen(event);
        let told = self.told.as_mut()?;
        let here = || ByteBuf::from(path.to_vec());
        let meets = told.watched.meets(event);
        if meets != Meets::Nothing {
            count(&mut self.events, &mut self.events_since);
        }
        match meets {
            Meets::Nothing => None,
            Meets::Name(name) if self.events <= MOST_EVENTS => {
                let new = told.changed.insert(name.clone());
                new.then(|| NameWord::Changed(here(), ByteBuf::from(name)))
            }
            Meets::Name(_) => {
                (self.told, self.seen, self.due) = (None, None, MOST_EVENTS);
                Some(NameWord::Forget(here()))
            }
            Meets::Directory => {
                self.told = None;
                Some(NameWord::Forget(here()))
            }
        }
    }
}
