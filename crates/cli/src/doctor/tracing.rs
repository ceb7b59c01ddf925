//! ptrace and pidfd_getfd, with which a process is controlled and its descriptors are duplicated.
#![expect(unsafe_code, reason = "ptrace and pidfd_getfd have no safe form")]

use super::Finding;
use super::child::{checked, in_child};
use crate::output::error_text;
use std::io;
use std::process::{Child, Command, Stdio};

pub(super) fn probe() -> Vec<Finding> {
    vec![seize(), yama(), pidfd_getfd()]
}

/// A process to probe; killed and waited for on drop.
pub(super) struct Tracee(Child);

impl Tracee {
    pub(super) fn start() -> io::Result<Self> {
        // `cat` blocks on the pipe, to which nothing is written.
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().map(Self)
    }

    pub(super) fn pid(&self) -> libc::pid_t {
        // Linux has no pid above 2^22.
        self.0.id() as libc::pid_t
    }

    /// Attaches without stopping the process.
    pub(super) fn seize(&self) -> io::Result<u64> {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: SEIZE with options 0 accesses no memory of ours.
        checked(unsafe { libc::ptrace(libc::PTRACE_SEIZE, self.pid(), none, none) })
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn seize() -> Finding {
    let name = "ptrace";
    match Tracee::start().and_then(|tracee| tracee.seize()) {
        Ok(_) => Finding::ok(name, "PTRACE_SEIZE permitted"),
        Err(error) => Finding::missing(
            name,
            error_text(&error),
            "no process can be moved; check kernel.yama.ptrace_scope and the sandbox that this runs in",
        ),
    }
}

fn yama() -> Finding {
    let text = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    let level = text.ok().and_then(|text| text.trim().parse().ok());
    yama_level(level, rustix::process::geteuid().is_root())
}

/// `level` is `None` on a kernel without Yama.
fn yama_level(level: Option<u8>, root: bool) -> Finding {
    let name = "Yama";
    let found = level.map_or("not in this kernel".into(), |level| format!("ptrace_scope is {level}"));
    match level {
        None | Some(0) => Finding::ok(name, found),
        Some(1 | 2) if root => Finding::ok(name, found + ", which does not restrict root"),
        Some(1) => Finding::missing(
            name,
            found,
            "a ternd without root cannot move processes; set sysctl kernel.yama.ptrace_scope=0",
        ),
        Some(2) => Finding::missing(name, found, "only a ternd with root can move processes; run it as root"),
        Some(_) => Finding::missing(
            name,
            found,
            "no process can be moved until the node reboots with a lower ptrace_scope",
        ),
    }
}

fn pidfd_getfd() -> Finding {
    let name = "pidfd_getfd";
    let tried = in_child(|| {
        let tracee = Tracee::start()?;
        // SAFETY: neither call takes pointers; both descriptors are closed when this child ends.
        let pidfd = checked(unsafe { libc::syscall(libc::SYS_pidfd_open, tracee.pid(), 0) })?;
        // SAFETY: as above; 1 is the process's standard output.
        checked(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd, 1, 0) })
    });
    match tried {
        Ok(_) => Finding::ok(name, "works"),
        Err(error) => Finding::missing(
            name,
            error_text(&error),
            "no process can be moved, because descriptors cannot be duplicated; check the sandbox that this runs in",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::FindingState;

    #[test]
    fn yama_restricts_by_level_and_user() {
        let state = |level, root| yama_level(level, root).state;
        assert_eq!(state(None, false), FindingState::Ok);
        assert_eq!(state(Some(1), true), FindingState::Ok);
        assert_eq!(state(Some(1), false), FindingState::Missing);
        assert_eq!(state(Some(2), false), FindingState::Missing);
        assert_eq!(state(Some(3), true), FindingState::Missing);
    }

    #[test]
    fn tracee_is_killed_on_drop() {
        let tracee = Tracee::start().unwrap();
        let pid = tracee.pid();
        tracee.seize().unwrap();
        drop(tracee);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
