//! Taking hold of a process with many threads, one of which may execute a program at that very moment.
//!
//! Who executes a program holds the lock that an attaching tracer waits for, and waits itself until all other threads are
//! gone; and those that the tracer holds already go only when it waits for them, which it does not: it attaches. So somebody
//! else waits for them meanwhile. Any thread of ours may.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// So long an attachment may take before somebody looks.
const LONG: Duration = Duration::from_millis(20);

/// Does something that may attach to threads of a process of which others are held already. Those of them that end
/// meanwhile, because of an exec, are not told of: they are just gone.
pub fn attended<T>(pid: i32, work: impl FnOnce() -> T) -> T {
    let (done, waits) = mpsc::channel::<()>();
    let attendant = std::thread::spawn(move || {
        while waits.recv_timeout(LONG) == Err(RecvTimeoutError::Timeout) {
            wait_for_the_ended(pid);
        }
    });
    let result = work();
    drop(done);
    let _it_does_not_panic = attendant.join();
    result
}

fn wait_for_the_ended(pid: i32) {
    let others = crate::procfs::threads(pid).into_iter().flatten().filter(|tid| *tid != pid);
    for tid in others {
        if crate::procfs::has_ended(tid) {
            // SAFETY: no status is wanted.
            unsafe { libc::waitpid(tid, std::ptr::null_mut(), libc::__WALL | libc::WNOHANG) };
        }
    }
}
