//! A thread for operations that may wait for a server, such as an fstat of a file on NFS. If the
//! server is unreachable, such an operation can neither be interrupted nor killed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use tern_tracee::threads;

/// How long an operation may take. Operations on cached data end at once.
const TIMEOUT: Duration = Duration::from_millis(50);

type Operation = Box<dyn FnOnce() + Send>;

/// Runs operations in a thread of its own, one at a time. The thread ends when this is dropped and
/// its last operation is over.
#[derive(Default)]
pub(crate) struct TimedWorker {
    thread: Option<Sender<Operation>>,
    /// Number of operations begun, and of those that are over.
    begun: u64,
    over: Arc<AtomicU64>,
}

impl std::fmt::Debug for TimedWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TimedWorker({} begun, {:?} over)", self.begun, self.over)
    }
}

impl TimedWorker {
    /// Runs an operation. Returns none if it takes longer than [`TIMEOUT`], if an earlier operation
    /// that took longer is still not over, or if there is no thread for it.
    pub(crate) fn run<T: Send + 'static>(
        &mut self,
        operation: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        if self.begun != self.over.load(Ordering::Acquire) {
            return None;
        }
        if self.thread.is_none() {
            let (thread, queue) = channel::<Operation>();
            // The thread ends when the sender is dropped.
            let work = move || queue.into_iter().for_each(|operation| operation());
            let started = threads::spawn("timed", 64 << 10, work);
            self.thread = started.is_ok().then_some(thread);
        }
        let (reply, replies) = channel();
        let over = Arc::clone(&self.over);
        let work = move || {
            let result = operation();
            over.fetch_add(1, Ordering::Release);
            // After the timeout the result is dropped.
            let _unwanted = reply.send(result);
        };
        self.thread.as_ref()?.send(Box::new(work)).ok()?;
        self.begun += 1;
        replies.recv_timeout(TIMEOUT).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_waits_for_an_operation_that_does_not_end() {
        let mut worker = TimedWorker::default();
        assert_eq!(worker.run(|| 1), Some(1));
        let (end, ended) = channel::<()>();
        assert_eq!(worker.run(move || ended.recv().is_err()), None);
        let begun = std::time::Instant::now();
        assert_eq!(worker.run(|| 2), None, "the first one is not over");
        assert!(begun.elapsed() < TIMEOUT, "it is not waited for again");
        drop(end);
        while worker.begun != worker.over.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        assert_eq!(worker.run(|| 3), Some(3), "and not the late reply");
    }
}
