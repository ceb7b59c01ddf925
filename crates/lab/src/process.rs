//! A reference to a process of this machine, with its start time so that a reused pid is detected.

use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::OwnedFd;

/// A process, by its pid on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// In clock ticks since boot.
    started: u64,
}

impl Process {
    /// The process that has this pid now.
    pub(crate) fn now(pid: i32) -> io::Result<Self> {
        Ok(Self { pid, started: started(pid)? })
    }

    /// Whether the process is running. A zombie is not.
    pub(crate) fn alive(self) -> bool {
        started(self.pid).is_ok_and(|s| s == self.started)
    }

    /// Opens a pidfd of the process. `NotFound` if it has ended.
    pub(crate) fn open(self) -> io::Result<OwnedFd> {
        let pid = Pid::from_raw(self.pid).ok_or(io::ErrorKind::NotFound)?;
        let fd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        // Checked after the open: if the process is alive now, the descriptor refers to it.
        if self.alive() { Ok(fd) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Kills the process, if it still exists.
    pub(crate) fn kill(self) {
        if let Ok(fd) = self.open() {
            // It may have ended already.
            let _ = rustix::process::pidfd_send_signal(fd, Signal::KILL);
        }
    }
}

/// The start time of the process with this pid; `NotFound` if there is none or it is a zombie.
fn started(pid: i32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The command name is in parentheses and may contain any character, so fields are counted from
    // its end.
    let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
    let mut fields = after.split_whitespace();
    let state = fields.next().unwrap_or("Z");
    let started = fields.nth(18).and_then(|f| f.parse().ok());
    match started {
        Some(started) if state != "Z" && state != "X" => Ok(started),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

/// The command name of the process with this pid; empty if there is none.
pub(crate) fn command_name(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_again() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::now(child.id() as i32).unwrap();
        assert!(process.alive());
        assert!(!Process { started: process.started + 1, ..process }.alive());
        assert!(Process { started: process.started + 1, ..process }.open().is_err());
        process.kill();
        child.wait().unwrap();
        assert!(!process.alive());
        assert!(Process::now(-1).is_err());
    }
}
