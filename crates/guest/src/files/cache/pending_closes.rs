//! Closes that are to be sent home.

use std::time::{Duration, Instant};

/// How long a close may wait for another call that goes home.
const CLOSE_DELAY: Duration = Duration::from_millis(20);

/// Descriptors that are closed here and not at home, and since when.
#[derive(Debug, Default)]
pub(super) struct PendingCloses {
    fds: Vec<i32>,
    since: Option<Instant>,
}

impl PendingCloses {
    /// Adds a descriptor that is closed here.
    pub(super) fn add(&mut self, fd: i32) {
        self.fds.push(fd);
        self.since.get_or_insert_with(Instant::now);
    }

    /// The descriptors, in the order of their closes.
    pub(super) fn fds(&self) -> &[i32] {
        &self.fds
    }

    /// The latest time at which home must close them.
    pub(super) fn due(&self) -> Option<Instant> {
        self.since.map(|since| since + CLOSE_DELAY)
    }

    /// Removes a descriptor that home has closed.
    pub(super) fn remove(&mut self, fd: i32) {
        self.fds.retain(|closing| *closing != fd);
        self.since = self.since.filter(|_| !self.fds.is_empty());
    }

    /// Postpones them: the last attempt was not completed.
    pub(super) fn retry_later(&mut self) {
        self.since = self.since.map(|_| Instant::now());
    }
}
