//! Core dumps. A deputy's memory is empty, so a core of it would be wrong.
//!
//! A program that faults away and is to dump core is fetched home first. There it executes the same
//! instruction again and its own kernel dumps core. A program that is killed by a signal from
//! elsewhere, or by its own abort, cannot be fetched: the kernel at home kills it at once. It
//! leaves no core, and its wait status says so.

use rustix::process::{Pid, Resource, Rlimit, prlimit};

/// The kernel does not dump core if the limit is below this many bytes.
const MIN_CORE_LIMIT: u64 = 4096;
/// With this limit there is never a core. With 0 there is one if `core_pattern` names a pipe.
const NO_CORE_LIMIT: u64 = 1;

/// Whether a signal dumps core by default.
pub(crate) fn dumps_core(signal: i32) -> bool {
    use libc::{SIGABRT, SIGQUIT, SIGSYS, SIGTRAP, SIGXCPU, SIGXFSZ};
    is_repeatable_fault(signal) || matches!(signal, SIGABRT | SIGQUIT | SIGSYS | SIGTRAP | SIGXCPU | SIGXFSZ)
}

/// Whether this is a fault that the same instruction raises again. SIGTRAP is not: a breakpoint is
/// reported behind its instruction.
pub(crate) fn is_repeatable_fault(signal: i32) -> bool {
    matches!(signal, libc::SIGSEGV | libc::SIGBUS | libc::SIGFPE | libc::SIGILL)
}

/// Whether the core limit of a process allows a core.
pub(crate) fn is_permitted(pid: i32) -> bool {
    tern_tracee::limit::get(pid, libc::RLIMIT_CORE).is_ok_and(|(soft, _)| soft >= MIN_CORE_LIMIT)
}

/// Prevents a core of a deputy that is about to be killed. If the hard limit is 0 this needs
/// privilege; without privilege a `core_pattern` that names a pipe still gets a core.
pub(crate) fn prevent_core(pid: i32) {
    let Some(pid) = Pid::from_raw(pid) else { return };
    let limit = Rlimit { current: Some(NO_CORE_LIMIT), maximum: Some(NO_CORE_LIMIT) };
    if let Err(error) = prlimit(Some(pid), Resource::Core, limit) {
        tracing::debug!(%error, "a core of a deputy cannot be prevented");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn core_dump_is_prevented() {
        let mut child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
        let pid = child.id() as i32;
        let limit = |current| Rlimit { current, maximum: None };
        let raised = prlimit(Pid::from_raw(pid), Resource::Core, limit(None));
        let before = is_permitted(pid);
        prevent_core(pid);
        let left = is_permitted(pid);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(before || raised.is_err(), "raising the limit needs privilege");
        assert!(!left);
    }

    #[test]
    fn breakpoints_are_not_repeatable() {
        assert!(dumps_core(libc::SIGTRAP) && !is_repeatable_fault(libc::SIGTRAP));
        assert!(dumps_core(libc::SIGSEGV) && !dumps_core(libc::SIGTERM) && !dumps_core(libc::SIGKILL));
    }
}
