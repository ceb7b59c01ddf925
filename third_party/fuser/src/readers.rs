//! Tern's change: few threads wait for requests at a time, and the others rest until they are needed.
//!
//! The kernel wakes whoever has waited longest. With as many waiting as there may be requests under way, a program that makes one call
//! after the other would be served by each of them in turn, none of which has anything in its processor's cache.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// The most that wait at a time.
const MOST: usize = 3;

/// A thread that has rested for so long ends: its stack and its buffer use memory.
const REST_LIMIT: Duration = Duration::from_secs(5);

/// Threads of one session that hear the kernel.
#[derive(Debug, Default)]
pub(crate) struct Readers(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// How many wait, or are about to.
    waiting: usize,
    /// Those that rest; the one that came last is called first.
    resting: Vec<Arc<Resting>>,
    /// One has ended, and nobody rests any more.
    over: bool,
}

/// A thread that rests.
#[derive(Debug)]
pub(crate) struct Resting {
    thread: Thread,
    called: AtomicBool,
}

impl Readers {
    /// Returns when this thread is to wait for a request, or, with its place, when it has rested for `REST_LIMIT`.
    pub(crate) fn wait(&self) -> Option<Arc<Resting>> {
        let mut state = self.state();
        if state.waiting < MOST || state.over {
            state.waiting += 1;
            return None;
        }
        let own = Arc::new(Resting { thread: thread::current(), called: AtomicBool::new(false) });
        state.resting.push(own.clone());
        drop(state);
        let end = Instant::now() + REST_LIMIT;
        // The caller has counted this thread already.
        while !own.called.load(Ordering::Acquire) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Some(own);
            }
            thread::park_timeout(left);
        }
        None
    }

    /// This thread rests no more. False if it was called meanwhile, and is to wait for a request.
    pub(crate) fn withdraw(&self, own: &Arc<Resting>) -> bool {
        let resting = &mut self.state().resting;
        let before = resting.len();
        resting.retain(|other| !Arc::ptr_eq(other, own));
        resting.len() < before
    }

    /// A thread has ended for another reason than a long rest.
    pub(crate) fn over(&self) -> bool {
        self.state().over
    }

    /// This thread has a request, and may be long about it: if nobody else waits for the next one, somebody is called.
    /// False if nobody rests either: then one more is to begin, if there may be more.
    pub(crate) fn has_one(&self) -> bool {
        let mut state = self.state();
        state.waiting -= 1;
        state.waiting > 0 || state.over || state.call()
    }

    /// It hears nothing any more, and neither shall the others that are not to be left resting.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        state.over = true;
        while state.call() {}
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Calls one that rests; false if there is none.
    fn call(&mut self) -> bool {
        let Some(next) = self.resting.pop() else { return false };
        self.waiting += 1;
        next.called.store(true, Ordering::Release);
        next.thread.unpark();
        true
    }
}
