//! Scans of all processes of this machine. A scan takes longer, the more descriptors the processes
//! of all users hold, so a thread makes the scans and the main loop never waits.

use crate::waker::Waker;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// After this time a scan ends without a result. A million descriptors take some two seconds.
const SCAN_TIMEOUT: Duration = Duration::from_secs(4);

/// Starts the scans of a shim, one at a time.
#[derive(Debug)]
pub(crate) struct DescriptorScanner {
    is_busy: Arc<AtomicBool>,
    waker: Waker,
}

impl DescriptorScanner {
    /// Wakes the main loop by `waker` when a scan has ended.
    pub(crate) fn new(waker: Waker) -> Self {
        Self { is_busy: Arc::default(), waker }
    }

    /// Starts `scan` in a thread and passes it the time at which it must end. Returns none if
    /// another scan is running or no thread can be started.
    pub(crate) fn start<T: Send + 'static>(
        &self,
        scan: impl FnOnce(Instant) -> T + Send + 'static,
    ) -> Option<Receiver<T>> {
        // Only the main loop starts scans, so nothing happens between the check and the store.
        if self.is_busy.load(Ordering::Acquire) {
            return None;
        }
        self.is_busy.store(true, Ordering::Release);
        let (answer, receiver) = channel();
        let (is_busy, waker) = (Arc::clone(&self.is_busy), self.waker.clone());
        let run = move || {
            let found = scan(Instant::now() + SCAN_TIMEOUT);
            is_busy.store(false, Ordering::Release);
            let _not_wanted_any_more = answer.send(found);
            waker.wake();
        };
        let started = std::thread::Builder::new().name("scan".into()).stack_size(256 << 10).spawn(run);
        if started.is_err() {
            self.is_busy.store(false, Ordering::Release);
            return None;
        }
        Some(receiver)
    }
}
