//! Core dumps. A deputy's memory is empty: a core of it would be a false one.
//!
//! A program that raises a fault away, and is to leave a core, is fetched home first. There it makes the same
//! instruction again, and its own kernel does the rest, natively. One that is killed by a signal from elsewhere, or
//! by its own abort, cannot be fetched any more: the kernel at home ends it at once. It leaves no core, and its
//! parent is told so.

use rustix::process::{Pid, Resource, Rlimit, prlimit};

/// A core that may not have so many bytes is not begun by the kernel.
const LEAST: u64 = 4096;
/// With this limit there is none at all: a pattern that names a program to pipe it to overrules 0.
const NONE: u64 = 1;

/// Whether a signal ends a process with a core by default.
pub(crate) fn leaves_one(signal: i32) -> bool {
    use libc::{SIGABRT, SIGQUIT, SIGSYS, SIGTRAP, SIGXCPU, SIGXFSZ};
    raised_again(signal) || matches!(signal, SIGABRT | SIGQUIT | SIGSYS | SIGTRAP | SIGXCPU | SIGXFSZ)
}

/// Whether this is a fault whose instruction raises it again when it is made again. A breakpoint is behind its
/// instruction when it is reported.
pub(crate) fn raised_again(signal: i32) -> bool {
    matches!(signal, libc::SIGSEGV | libc::SIGBUS | libc::SIGFPE | libc::SIGILL)
}

/// Whether a process would leave a core, by its limit.
pub(crate) fn wanted(pid: i32) -> bool {
    tern_tracee::limit::get(pid, libc::RLIMIT_CORE).is_ok_and(|(soft, _)| soft >= LEAST)
}

/// Sees to it that a deputy, which is about to die, leaves none.
pub(crate) fn prevent(pid: i32) {
    let Some(pid) = Pid::from_raw(pid) else { return };
    // Both at once is for those who may raise a limit; the other for those who need not, since theirs is higher.
    for maximum in [Some(NONE), None] {
        let done = prlimit(Some(pid), Resource::Core, Rlimit { current: Some(NONE), maximum });
        if done.is_ok() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_is_kept_from_it() {
        let mut child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
        let pid = child.id() as i32;
        let limit = |current| Rlimit { current, maximum: None };
        let raised = prlimit(Pid::from_raw(pid), Resource::Core, limit(None));
        let before = wanted(pid);
        prevent(pid);
        let left = wanted(pid);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(before || raised.is_err(), "who may not raise it cannot try this");
        assert!(!left);
    }

    #[test]
    fn breakpoints_are_not_raised_again() {
        assert!(leaves_one(libc::SIGTRAP) && !raised_again(libc::SIGTRAP));
        assert!(leaves_one(libc::SIGSEGV) && !leaves_one(libc::SIGTERM) && !leaves_one(libc::SIGKILL));
    }
}
