//! Names of home's files that are cached at guests, so that lookups need no round trip
//! (docs/design/delegation.md, "Names").
//!
//! A directory in which a process has looked up several names is scanned and watched. The listing
//! is sent with the result of a later call that has looked up a name there. That successful lookup
//! proves that the process may still traverse this path and that nothing on it has changed. From
//! then on every change is sent before any other message, so the program never observes an effect
//! that follows a change while it still sees the state before.
//!
//! A listing is valid until the epoch ends, or the process changes its working directory, its root
//! or its credentials.

mod access;
mod delegated;
mod scanner;
#[cfg(test)]
mod tests;
mod tracking;
mod watcher;

use crate::links::peers::PeerId;
use crate::waker::Waker;
pub(crate) use delegated::DelegatedNames;
use scanner::ScanRequest;
use std::collections::{BTreeSet, HashMap};
use std::os::fd::BorrowedFd;
use tern_ids::HomePid;
use tern_migrate::names::NameNotice;
use watcher::{DirEvent, DirWatch, Watcher};

/// Upper bound on changes recorded while directories are scanned.
const MAX_CHANGES_DURING_SCANS: usize = 10_000;
/// Upper bound on scans in progress.
const MAX_PENDING_SCANS: usize = 8;
/// Number of watch entries above which unused ones are removed.
const MAX_WATCH_ENTRIES: usize = 16 << 10;

/// The watched directories of all processes of the shim.
#[derive(Debug, Default)]
pub(crate) struct NameTracker {
    watcher: Option<Watcher>,
    /// No names are cached any more: processes share their working directory, which cannot be
    /// tracked.
    is_disabled: bool,
    /// Number of scans in progress, and the numbered changes since the first of them began.
    pending_scans: usize,
    changes_during_scans: Vec<(u64, DirEvent)>,
    change_count: u64,
    /// The directories that each watch is for, and the number of these entries. Some may be
    /// outdated.
    entries: HashMap<i32, BTreeSet<(HomePid, Vec<u8>)>>,
    entry_count: usize,
}

/// A notice to a process, and its peer.
type Notice = (HomePid, PeerId, NameNotice);

impl NameTracker {
    /// Readable when something has changed.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.watcher.as_ref().map(Watcher::fd)
    }

    /// Records changes, which also apply to the scans in progress.
    fn record_changes(&mut self, events: Vec<DirEvent>) {
        if self.pending_scans == 0 {
            return;
        }
        for event in events {
            self.change_count += 1;
            self.changes_during_scans.push((self.change_count, event));
        }
        if self.changes_during_scans.len() > MAX_CHANGES_DURING_SCANS {
            self.changes_during_scans = vec![(self.change_count, DirEvent::ALL)];
        }
    }

    /// The changes with higher numbers than this.
    fn changes_since(&mut self, changes: u64) -> Vec<DirEvent> {
        let since = self.changes_during_scans.iter().filter(|(number, _)| *number > changes);
        let since = since.map(|(_, event)| event.clone()).collect();
        if self.pending_scans == 0 {
            self.changes_during_scans.clear();
        }
        since
    }

    fn request_scan(&mut self, request: ScanRequest, waker: &Waker, uid: u32) -> bool {
        if self.watcher.is_none() {
            // If this fails it is tried again with the next scan.
            let opened = Watcher::open(waker.clone(), uid);
            self.watcher =
                opened.inspect_err(|error| tracing::info!(%error, "directories cannot be watched")).ok();
        }
        let Some(watcher) = &self.watcher else { return false };
        watcher.request(request);
        self.pending_scans += 1;
        true
    }

    /// Records that these watches are for a directory of a process.
    fn add_entries(&mut self, pid: HomePid, path: &[u8], watched: &DirWatch) {
        for watch in watched.watches() {
            let new = self.entries.entry(watch).or_default().insert((pid, path.to_vec()));
            self.entry_count += usize::from(new);
        }
    }
}
