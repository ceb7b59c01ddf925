//! Why a process is at home, and how often it had to come there.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A process that was fetched home this often within [`FORCED_RETURN_WINDOW`] stays at home.
const MAX_FORCED_RETURNS: usize = 3;
const FORCED_RETURN_WINDOW: Duration = Duration::from_secs(60);

/// Why a process came home, or stays there.
#[derive(Debug, Default)]
pub(crate) struct HomeRecord {
    /// Shown by `mps`; empty if there is no reason.
    reason: String,
    /// The times at which it was recently fetched home.
    forced_returns: VecDeque<Instant>,
    /// It has executed a program that was to run away. If that program stays at home, no caller gets
    /// the reason.
    has_executed: bool,
    /// It was already fetched home once to dump core for a fault.
    fetched_for_core: bool,
}

impl HomeRecord {
    /// The record of a process that is seized again.
    pub(crate) fn continued(&self) -> Self {
        Self { forced_returns: self.forced_returns.clone(), ..Self::default() }
    }

    pub(crate) fn reason(&self) -> &str {
        &self.reason
    }

    pub(crate) fn set_reason(&mut self, why: impl Into<String>) {
        self.reason = why.into();
    }

    /// Its program runs away: a reason that does not concern a forced return is out of date.
    pub(crate) fn clear_stale_reason(&mut self) {
        if self.forced_returns.is_empty() {
            self.reason.clear();
        }
        self.has_executed = false;
    }

    /// Records that it has executed a program that is to run away.
    pub(crate) fn record_exec(&mut self) {
        self.has_executed = true;
    }

    /// Records that it was fetched home. Returns true if it has been fetched so often that it
    /// stays.
    pub(crate) fn record_forced_return(&mut self) -> bool {
        let now = Instant::now();
        self.forced_returns.push_back(now);
        self.forced_returns.retain(|when| now.duration_since(*when) < FORCED_RETURN_WINDOW);
        self.forced_returns.len() >= MAX_FORCED_RETURNS
    }

    /// Whether `mps` is to show why it is at home: it was fetched home recently, or stays there since
    /// it executed its program.
    pub(crate) fn is_shown(&self) -> bool {
        !self.forced_returns.is_empty() || self.has_executed && !self.reason.is_empty()
    }

    /// Whether it may be fetched home to dump core: once.
    pub(crate) fn may_fetch_for_core(&mut self) -> bool {
        !std::mem::replace(&mut self.fetched_for_core, true)
    }
}
