//! The processes of a lab: their namespaces, control groups and signals, and a reference to a
//! process by pid and start time, so that a reused pid is detected.

pub(crate) mod cgroup;
// Code that runs between fork and exec, and unshare.
#[allow(unsafe_code, reason = "namespaces and pre_exec")]
pub(crate) mod namespaces;
// Signal masks and handlers.
#[allow(unsafe_code, reason = "signal masks and handlers")]
pub(crate) mod signals;

use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::OwnedFd;

/// A process, by its pid on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// In clock ticks since boot.
    #[serde(rename = "started")]
    start_time: u64,
}

impl Process {
    /// The process that has this pid now.
    pub(crate) fn find(pid: i32) -> io::Result<Self> {
        Ok(Self { pid, start_time: start_time(pid)? })
    }

    /// Whether the process is running. A zombie is not.
    pub(crate) fn is_alive(self) -> bool {
        start_time(self.pid).is_ok_and(|s| s == self.start_time)
    }

    /// Opens a pidfd of the process. `NotFound` if it has ended.
    pub(crate) fn open(self) -> io::Result<OwnedFd> {
        let pid = Pid::from_raw(self.pid).ok_or(io::ErrorKind::NotFound)?;
        let fd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        // Checked after the open: if the process is alive now, the descriptor refers to it.
        if self.is_alive() { Ok(fd) } else { Err(io::ErrorKind::NotFound.into()) }
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
fn start_time(pid: i32) -> io::Result<u64> {
    let stat = tern_control::procfs::read_text(format!("/proc/{pid}/stat"))?;
    // The command name is in parentheses and may contain any character, so fields are counted from
    // its end.
    let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
    let mut fields = after.split_whitespace();
    let state = fields.next().unwrap_or("Z");
    let start_time = fields.nth(18).and_then(|f| f.parse().ok());
    match start_time {
        Some(start_time) if state != "Z" && state != "X" => Ok(start_time),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

/// The command name of the process with this pid; empty if there is none.
pub(crate) fn command_name(pid: i32) -> String {
    tern_control::procfs::read_text(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reused_pid_is_detected() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::find(child.id() as i32).unwrap();
        assert!(process.is_alive());
        assert!(!Process { start_time: process.start_time + 1, ..process }.is_alive());
        assert!(Process { start_time: process.start_time + 1, ..process }.open().is_err());
        process.kill();
        child.wait().unwrap();
        assert!(!process.is_alive());
        assert!(Process::find(-1).is_err());
    }
}
