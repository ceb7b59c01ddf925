//! The directories of one process whose names are cached at its guest, and when to add more.

use super::scanner::DirListing;
use super::watcher::{DirEvent, DirWatch, Impact};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tern_ids::Epoch;
use tern_migrate::names::{MAX_LISTED_NAMES, NameNotice};
use tern_syscall::ByteBuf;

/// A directory is scanned after this many lookups in it within a second; next time after twice as
/// many.
const MIN_LOOKUPS: u32 = 4;
/// Number of names that each lookup justifies sending: they take about as long as one more call.
const NAMES_PER_LOOKUP: u32 = 32;
/// The number of listings after which the required lookups are not doubled any more.
const MAX_DOUBLINGS: u32 = 6;
const SECOND: Duration = Duration::from_secs(1);
/// Upper bounds on the directories cached for a process, and on their names in all.
const MAX_DIRECTORIES: usize = 256;
const MAX_TOTAL_NAMES: usize = 32 << 10;
/// Maximum age at which the result of a scan is still sent.
const MAX_LISTING_AGE: Duration = Duration::from_millis(500);
/// A directory with more changes than this within a second is not watched any more, since each
/// wakes the shim. It is scanned again after the same number of lookups.
const MAX_CHANGES_PER_SECOND: u32 = 2000;

/// The directories of one process whose names are cached at its guest, or may be soon.
#[derive(Debug, Default)]
pub(crate) struct DelegatedNames {
    pub(super) epoch: Epoch,
    /// Incremented when the cached names are invalidated. Results of earlier scans are then
    /// dropped.
    pub(super) generation: u64,
    /// No names are cached any more: the process's threads may differ in root, working directory or
    /// credentials.
    pub(super) is_disabled: bool,
    pub(super) directories: BTreeMap<Vec<u8>, Directory>,
}

/// A directory in which a process looks up names.
#[derive(Debug, Default)]
pub(super) struct Directory {
    /// Number of lookups that were sent home since `since`.
    lookups: u32,
    since: Option<Instant>,
    /// Number of lookups at which it is scanned.
    next_scan_at: u32,
    listings: u32,
    pub(super) is_being_scanned: bool,
    /// The result of a scan, to be sent, and the names that have changed since.
    pub(super) listing: Option<(DirListing, BTreeSet<Vec<u8>>)>,
    pub(super) delegated: Option<DelegatedDir>,
    /// Number of changes since `events_since`.
    events: u32,
    events_since: Option<Instant>,
}

/// A directory that is cached at the guest.
#[derive(Debug)]
pub(super) struct DelegatedDir {
    pub(super) watched: DirWatch,
    pub(super) names: usize,
    /// Names that were invalidated since.
    pub(super) changed: BTreeSet<Vec<u8>>,
}

/// Counts events within about a second.
fn count(count: &mut u32, since: &mut Option<Instant>) {
    if since.is_none_or(|since| since.elapsed() > SECOND) {
        (*since, *count) = (Some(Instant::now()), 0);
    }
    *count += 1;
}

impl DelegatedNames {
    /// Invalidates everything, including scans in progress. Returns whether the guest had anything
    /// cached.
    pub(crate) fn forget(&mut self) -> bool {
        self.generation += 1;
        std::mem::take(&mut self.directories).into_values().any(|directory| directory.delegated.is_some())
    }

    /// Whether one more directory can be cached. Directories that are not cached make room for it.
    pub(super) fn can_add(&mut self, path: &[u8]) -> bool {
        if self.directories.len() >= MAX_DIRECTORIES && !self.directories.contains_key(path) {
            self.directories.retain(|_, directory| directory.delegated.is_some());
        }
        let names: usize = self.directories.values().map(Directory::names).sum();
        self.directories.len() < MAX_DIRECTORIES && names < MAX_TOTAL_NAMES
    }

    /// Drops results of scans that are too old to be sent.
    pub(super) fn drop_stale(&mut self) {
        for directory in self.directories.values_mut() {
            directory.listing.take_if(|(listing, _)| listing.at.elapsed() >= MAX_LISTING_AGE);
        }
    }
}

impl Directory {
    fn names(&self) -> usize {
        let listing = self.listing.as_ref().map_or(0, |(listing, _)| listing.entries.len());
        listing + self.delegated.as_ref().map_or(0, |delegated| delegated.names)
    }

    /// Counts a lookup that was sent home and would have been answered from a cached directory.
    pub(super) fn record_lookup(&mut self) {
        count(&mut self.lookups, &mut self.since);
    }

    /// Whether the result of a scan may be sent with a call that began at this time.
    pub(super) fn can_be_sent(&self, made_since: Instant) -> bool {
        self.listing
            .as_ref()
            .is_some_and(|(listing, _)| listing.at < made_since && listing.at.elapsed() < MAX_LISTING_AGE)
    }

    /// The number of names that the lookups justify, if the directory is to be scanned now.
    pub(super) fn names_to_scan(&mut self) -> Option<usize> {
        let next_scan_at = self.next_scan_at.max(MIN_LOOKUPS << self.listings.min(MAX_DOUBLINGS));
        if self.lookups < next_scan_at || self.is_being_scanned {
            return None;
        }
        (self.next_scan_at, self.listing) = (self.lookups.saturating_mul(2), None);
        Some(MAX_LISTED_NAMES.min(self.lookups.saturating_mul(NAMES_PER_LOOKUP) as usize))
    }

    /// Prevents further scans of a directory that cannot be cached.
    pub(super) fn disable(&mut self) {
        self.next_scan_at = u32::MAX;
    }

    pub(super) fn set_delegated(&mut self, delegated: DelegatedDir) {
        (self.lookups, self.next_scan_at, self.listings) = (0, 0, self.listings.saturating_add(1));
        self.delegated = Some(delegated);
    }

    /// Whether this watch is one of its watches.
    pub(super) fn uses_watch(&self, watch: i32) -> bool {
        let delegated = self.delegated.as_ref().map(|delegated| &delegated.watched);
        let listing = self.listing.as_ref().map(|(listing, _)| &listing.watched);
        delegated.into_iter().chain(listing).flat_map(DirWatch::watches).any(|needed| needed == watch)
    }

    /// Applies an event to the result of a scan that was not sent yet.
    pub(super) fn apply_to_listing(&mut self, event: &DirEvent) {
        let Some((listing, changed)) = &mut self.listing else { return };
        match listing.watched.impact_of(event) {
            Impact::Name(name) => drop(changed.insert(name)),
            Impact::Directory => self.listing = None,
            Impact::Nothing => {}
        }
    }

    /// Applies an event. Returns the notice for the guest, if one is needed.
    pub(super) fn apply(&mut self, path: &[u8], event: &DirEvent) -> Option<NameNotice> {
        self.apply_to_listing(event);
        let delegated = self.delegated.as_mut()?;
        let here = || ByteBuf::from(path.to_vec());
        let impact = delegated.watched.impact_of(event);
        if impact != Impact::Nothing {
            count(&mut self.events, &mut self.events_since);
        }
        match impact {
            Impact::Nothing => None,
            Impact::Name(name) if self.events <= MAX_CHANGES_PER_SECOND => {
                let new = delegated.changed.insert(name.clone());
                new.then(|| NameNotice::Changed(here(), ByteBuf::from(name)))
            }
            Impact::Name(_) => {
                (self.delegated, self.listing, self.next_scan_at) = (None, None, MAX_CHANGES_PER_SECOND);
                Some(NameNotice::InvalidateDirectory(here()))
            }
            Impact::Directory => {
                self.delegated = None;
                Some(NameNotice::InvalidateDirectory(here()))
            }
        }
    }
}
