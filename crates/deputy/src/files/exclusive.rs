//! Proves that no other process shares an open file, by a scan of the descriptors of all processes.

use crate::files::delegation::Delegations;
use crate::files::timed_worker::TimedWorker;
use std::time::{Duration, Instant};
use tern_image::sharing::is_open_elsewhere;

/// After this time a file counts as open elsewhere. Forty thousand descriptors take 40 ms. Less
/// than the worker waits for one operation.
const SCAN_TIMEOUT: Duration = Duration::from_millis(40);

impl Delegations {
    /// Whether a scan proves that no other process shares this open file. The scan asks no file
    /// system.
    pub(super) fn is_exclusive(&mut self, pid: i32, fd: i32, comparisons: &mut TimedWorker) -> bool {
        // Only root can examine the descriptors of all processes.
        if !rustix::process::geteuid().is_root() {
            return false;
        }
        let Some(elsewhere) = Self::scan(pid, fd, comparisons) else { return false };
        if elsewhere != Some(false) {
            self.not_exclusive.insert(fd);
        }
        elsewhere == Some(false)
    }

    /// Whether no other process shares any of these open files; none if the scans do not end in time.
    pub(super) fn are_exclusive(
        pid: i32,
        fds: impl IntoIterator<Item = i32>,
        comparisons: &mut TimedWorker,
    ) -> Option<bool> {
        for fd in fds {
            if Self::scan(pid, fd, comparisons).flatten()? {
                return Some(false);
            }
        }
        Some(true)
    }

    /// Whether the file is open elsewhere. None if earlier scans have not ended, and `Some(None)` if
    /// this one does not end in time.
    fn scan(pid: i32, fd: i32, comparisons: &mut TimedWorker) -> Option<Option<bool>> {
        let until = Instant::now() + SCAN_TIMEOUT;
        comparisons.run(move || is_open_elsewhere(pid, fd, until))
    }
}
