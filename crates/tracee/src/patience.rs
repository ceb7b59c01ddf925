//! A bound on how long a tracee may keep us from everything else.
//!
//! Whoever has a guest make a call waits for that, and for nothing else. Other threads of a hostile guest may change the
//! code under it just then, and it never comes to its call: it is killed, since nothing less brings it to a stop that we
//! wait for. At home nobody is: there the threads that could do this stand.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Who is waited for; 0: nobody.
static AWAITED: AtomicI32 = AtomicI32::new(0);
/// Counts up with each wait.
static WAITS: AtomicU64 = AtomicU64::new(0);
/// The last wait that was ended.
static ENDED: AtomicU64 = AtomicU64::new(0);

/// From now on a tracee that makes a call for us and has not come to its end after so many of these pauses is killed.
/// Pauses are counted, not time: a machine that has been stopped meanwhile is no hostile guest.
pub fn limit(pauses: u32, pause: Duration) {
    std::thread::spawn(move || {
        let (mut seen, mut times) = (0, 0);
        loop {
            std::thread::sleep(pause);
            let (wait, pid) = (WAITS.load(Relaxed), AWAITED.load(Relaxed));
            times = if wait == seen && pid != 0 { times + 1 } else { 0 };
            seen = wait;
            if times >= pauses {
                times = 0;
                ENDED.store(wait, Relaxed);
                crate::pidfd::kill(pid);
            }
        }
    });
}

/// Somebody is waited for, as long as this lives.
#[derive(Debug)]
pub(crate) struct Wait(u64);

impl Wait {
    pub(crate) fn begin(pid: i32) -> Self {
        let number = WAITS.fetch_add(1, Relaxed) + 1;
        AWAITED.store(pid, Relaxed);
        Self(number)
    }

    /// Whether it took too long.
    pub(crate) fn was_ended(&self) -> bool {
        ENDED.load(Relaxed) == self.0
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        AWAITED.store(0, Relaxed);
    }
}
