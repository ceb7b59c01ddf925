//! The CPU time of this thread, which other load on the CPU does not change.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// CPU time of this thread.
pub(crate) fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs().try_into().unwrap_or(0))
}
