//! Proves that no other process shares an open file, by a scan of the descriptors of all processes.

use crate::files::delegation::Delegations;
use std::time::{Duration, Instant};
use tern_image::process::is_open_elsewhere;

/// After this time a file counts as open elsewhere. A hundred thousand descriptors take 100 ms.
const SCAN_TIMEOUT: Duration = Duration::from_millis(300);

impl Delegations {
    /// Whether a scan proves that no other process shares this open file. The scan asks no file
    /// system.
    pub(super) fn is_exclusive(&mut self, pid: i32, fd: i32) -> bool {
        // Only root can examine the descriptors of all processes.
        if !rustix::process::geteuid().is_root() {
            return false;
        }
        let exclusive = is_open_elsewhere(pid, fd, Instant::now() + SCAN_TIMEOUT) == Some(false);
        if !exclusive {
            self.not_exclusive.insert(fd);
        }
        exclusive
    }
}
