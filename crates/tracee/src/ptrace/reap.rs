//! Attaching to the threads of a process while one of them may execute a program.
//!
//! A thread in execve holds the lock that an attaching tracer needs, and waits for all other
//! threads to be gone. Those that the tracer has already attached to are gone only once it reaps
//! them, which it does not do while it attaches. So another thread of the tracer's process reaps
//! them meanwhile.

use crate::{Error, Result};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Time that attaching may take before exited threads are reaped.
const REAP_INTERVAL: Duration = Duration::from_millis(20);

/// Runs `work`, which attaches to threads of a process while some of its threads are already
/// attached. Threads other than the first that exit meanwhile are reaped, and their exit is not
/// reported.
///
/// # Errors
/// Those of `work`, or if no thread can be started; nothing is attached to in that case.
pub fn with_reaper<T>(pid: i32, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let (done, finished) = mpsc::channel::<()>();
    let reap = move || {
        while finished.recv_timeout(REAP_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            reap_exited(pid);
        }
    };
    let refused = |source| Error::Refused { operation: "start a thread that reaps its threads", pid, source };
    let reaper = std::thread::Builder::new().name("reaper".into()).spawn(reap).map_err(refused)?;
    let result = work();
    drop(done);
    let _it_does_not_panic = reaper.join();
    result
}

fn reap_exited(pid: i32) {
    let others = crate::procfs::threads(pid).into_iter().flatten().filter(|tid| *tid != pid);
    for tid in others {
        if crate::procfs::has_exited(tid) {
            // SAFETY: no status is wanted.
            unsafe { libc::waitpid(tid, std::ptr::null_mut(), libc::__WALL | libc::WNOHANG) };
        }
    }
}
