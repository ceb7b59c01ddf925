//! A time limit for injected calls, so that a tracee cannot block its tracer.
//!
//! While a guest makes an injected call, its shim waits for nothing else. Other threads of a
//! hostile guest may change the code that is about to make the call, so that the call is never
//! made. The guest is then killed: a weaker signal would not end the wait. Deputies need no limit,
//! since all their threads are stopped.

use crate::allowance::Allowance;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The process that is waited for, or 0.
static WAITED_PID: AtomicI32 = AtomicI32::new(0);
/// Number of waits so far.
static WAIT_COUNT: AtomicU64 = AtomicU64::new(0);
/// The last wait whose process was killed.
static KILLED_WAIT: AtomicU64 = AtomicU64::new(0);

/// Starts a thread that kills a tracee whose injected call has not ended within this time
/// ([`Allowance`]). It looks at this interval.
///
/// # Errors
/// If no thread can be started.
pub fn kill_after(limit: Duration, interval: Duration) -> std::io::Result<()> {
    let watch = move || {
        let mut current: Option<(u64, Allowance)> = None;
        loop {
            std::thread::sleep(interval);
            let (wait, pid) = (WAIT_COUNT.load(Relaxed), WAITED_PID.load(Relaxed));
            match &mut current {
                _ if pid == 0 => current = None,
                Some((same, allowance)) if *same == wait => {
                    if allowance.is_exceeded() {
                        KILLED_WAIT.store(wait, Relaxed);
                        crate::pidfd::kill(pid);
                    }
                }
                _ => current = Some((wait, Allowance::looked_at_each(interval, pid, limit))),
            }
        }
    };
    std::thread::Builder::new().name("call timeout".into()).spawn(watch).map(drop)
}

/// While it exists, the tracer waits for an injected call of a process.
#[derive(Debug)]
pub(crate) struct WaitGuard(u64);

impl WaitGuard {
    pub(crate) fn begin(pid: i32) -> Self {
        let number = WAIT_COUNT.fetch_add(1, Relaxed) + 1;
        WAITED_PID.store(pid, Relaxed);
        Self(number)
    }

    /// Whether the process was killed because the call took too long.
    pub(crate) fn was_killed(&self) -> bool {
        KILLED_WAIT.load(Relaxed) == self.0
    }
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        WAITED_PID.store(0, Relaxed);
    }
}
