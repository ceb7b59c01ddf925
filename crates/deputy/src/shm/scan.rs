//! Scans of all processes of the machine, made by a thread. They take longer, the more processes
//! and descriptors there are, so the main loop does not wait for their ends.

use crate::waker::Waker;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use tern_tracee::threads;

/// How long the main loop waits for a scan that it has started, before it goes on without the
/// result. A scan of 10,000 descriptors takes 20 ms.
const TIMEOUT: Duration = Duration::from_millis(30);

/// Makes the scans of one kind, one at a time. A scan answers the question `K`.
#[derive(Debug)]
pub(super) struct ScanThread<K, T> {
    waker: Waker,
    is_busy: Arc<AtomicBool>,
    /// The scan whose result is still wanted.
    wanted: Option<(K, Receiver<T>)>,
}

impl<K: PartialEq, T: Send + 'static> ScanThread<K, T> {
    /// Wakes the main loop by `waker` when a scan has ended.
    pub(super) fn new(waker: Waker) -> Self {
        Self { waker, is_busy: Arc::default(), wanted: None }
    }

    /// The result of a scan that was begun after this question was first asked. None if it has not
    /// ended: the caller may ask again, when the main loop is woken. The call that starts a scan waits a
    /// moment for its result.
    pub(super) fn result(&mut self, question: K, scan: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        self.result_within(TIMEOUT, question, scan)
    }

    /// As [`result`](Self::result), but never waits.
    pub(super) fn poll(&mut self, question: K, scan: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        self.result_within(Duration::ZERO, question, scan)
    }

    fn result_within(
        &mut self,
        timeout: Duration,
        question: K,
        scan: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let running = self.wanted.take().filter(|(wanted, _)| *wanted == question);
        let timeout = if running.is_some() { Duration::ZERO } else { timeout };
        let (question, found) = match running {
            Some(running) => running,
            None => (question, self.start(scan)?),
        };
        match found.recv_timeout(timeout) {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Timeout) => {
                self.wanted = Some((question, found));
                None
            }
            // It has panicked.
            Err(RecvTimeoutError::Disconnected) => None,
        }
    }

    /// Starts a scan in a thread. None if another scan is running or no thread can be started.
    fn start(&self, scan: impl FnOnce() -> T + Send + 'static) -> Option<Receiver<T>> {
        // Only the main loop starts scans, so nothing happens between the check and the store.
        if self.is_busy.load(Ordering::Acquire) {
            return None;
        }
        self.is_busy.store(true, Ordering::Release);
        let (answer, found) = channel();
        let busy = Busy { is_busy: Arc::clone(&self.is_busy), waker: self.waker.clone() };
        let run = move || {
            let _not_wanted_any_more = answer.send(scan());
            drop(busy);
        };
        threads::spawn("scan", 256 << 10, run).ok().map(|()| found)
    }
}

/// While a scan runs. Its end wakes the main loop, also after a panic.
#[derive(Debug)]
struct Busy {
    is_busy: Arc<AtomicBool>,
    waker: Waker,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.is_busy.store(false, Ordering::Release);
        self.waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn wait_until(mut is_so: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < end);
            std::thread::yield_now();
        }
    }

    #[test]
    fn result_is_of_a_scan_that_was_begun_after_the_question() {
        let mut scans = ScanThread::new(Waker::new().unwrap());
        assert_eq!(scans.result(1, || 10), Some(10));
        let (release, released) = channel::<()>();
        let slow = move || if released.recv().is_err() { 20 } else { 0 };
        assert_eq!(scans.result(2, slow), None);
        assert_eq!(scans.result(2, || 21), None, "the first scan has not ended");
        assert_eq!(scans.result(3, || 30), None, "another scan is running");
        drop(release);
        wait_until(|| scans.result(3, || 30) == Some(30));
        wait_until(|| scans.result(2, || 22) == Some(22));
    }

    #[test]
    fn scan_that_panics_is_made_again() {
        let mut scans = ScanThread::new(Waker::new().unwrap());
        assert_eq!(scans.result(1, || std::panic::resume_unwind(Box::new(()))), None);
        wait_until(|| scans.result(1, || 10) == Some(10));
    }
}
