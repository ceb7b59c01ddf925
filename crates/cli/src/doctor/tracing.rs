//! ptrace: how a process is held.
#![expect(unsafe_code, reason = "ptrace and pidfd_getfd have no safe form")]

use super::Finding;
use super::child::{checked, in_child};
use crate::output::reason;
use std::io;
use std::process::{Child, Command, Stdio};

pub(super) fn examine() -> Vec<Finding> {
    vec![seize(), yama(), pidfd_getfd()]
}

/// A process to try things on; killed and waited for at the end.
pub(super) struct Subject(Child);

impl Subject {
    pub(super) fn start() -> io::Result<Self> {
        // `cat` on a pipe that says nothing waits for as long as it is wanted.
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().map(Self)
    }

    pub(super) fn pid(&self) -> libc::pid_t {
        // Linux has no pid above 2^22.
        self.0.id() as libc::pid_t
    }

    /// Attaches without stopping it.
    pub(super) fn seize(&self) -> io::Result<u64> {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: SEIZE with options 0 reads and writes no memory of ours.
        checked(unsafe { libc::ptrace(libc::PTRACE_SEIZE, self.pid(), none, none) })
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn seize() -> Finding {
    let name = "ptrace";
    match Subject::start().and_then(|subject| subject.seize()) {
        Ok(_) => Finding::ok(name, "PTRACE_SEIZE permitted"),
        Err(error) => Finding::missing(
            name,
            reason(&error),
            "no process can be moved; look at kernel.yama.ptrace_scope, and at the sandbox that this runs in",
        ),
    }
}

fn yama() -> Finding {
    let text = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    let level = text.ok().and_then(|text| text.trim().parse().ok());
    yama_level(level, rustix::process::geteuid().is_root())
}

/// `level` is None on a kernel without Yama.
fn yama_level(level: Option<u8>, root: bool) -> Finding {
    let name = "Yama";
    let found = level.map_or("not in this kernel".into(), |level| format!("ptrace_scope is {level}"));
    match level {
        None | Some(0) => Finding::ok(name, found),
        Some(1 | 2) if root => Finding::ok(name, found + ", which root passes"),
        Some(1) => Finding::missing(
            name,
            found,
            "a ternd without root can move no process of this node, unless sysctl kernel.yama.ptrace_scope=0",
        ),
        Some(2) => Finding::missing(name, found, "only root can move processes of this node"),
        Some(_) => {
            Finding::missing(name, found, "no process of this node can be moved, until it boots again")
        }
    }
}

fn pidfd_getfd() -> Finding {
    let name = "pidfd_getfd";
    let tried = in_child(|| {
        let subject = Subject::start()?;
        // SAFETY: neither call takes pointers; both descriptors end with this child.
        let pidfd = checked(unsafe { libc::syscall(libc::SYS_pidfd_open, subject.pid(), 0) })?;
        // SAFETY: as above; 1 is the subject's standard output.
        checked(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd, 1, 0) })
    });
    match tried {
        Ok(_) => Finding::ok(name, "works"),
        Err(error) => Finding::missing(
            name,
            reason(&error),
            "descriptors of held processes cannot be reached: no moves",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn yama_stops_those_whom_it_stops() {
        let state = |level, root| yama_level(level, root).state;
        assert_eq!(state(None, false), State::Ok);
        assert_eq!(state(Some(1), true), State::Ok);
        assert_eq!(state(Some(1), false), State::Missing);
        assert_eq!(state(Some(2), false), State::Missing);
        assert_eq!(state(Some(3), true), State::Missing);
    }

    #[test]
    fn a_seized_process_is_gone_afterwards() {
        let subject = Subject::start().unwrap();
        let pid = subject.pid();
        subject.seize().unwrap();
        drop(subject);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
