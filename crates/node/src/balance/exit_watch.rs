//! Notifies the balancer at once when one of the processes that it watches ends.
//!
//! Without this, a node that becomes idle stays idle for a while: its own scan comes once a second,
//! the gossip about the scan half a second later, and the home's decision up to a second after
//! that. So a process would move to the idle node two seconds late. A home sees the end of its
//! processes, wherever they run, because their deputies end.

use crate::process::procfs::read_stat;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Maximum number of processes that are watched. If there are more, the end of one of them matters
/// little.
const MAX_WATCHED: usize = 256;

/// The watched processes by pid and start time, each with a pidfd.
#[derive(Debug, Default)]
pub(crate) struct ExitWatch {
    watched: HashMap<(i32, u64), OwnedFd>,
}

impl ExitWatch {
    /// Replaces the set of watched processes, given by pid and start time.
    pub(crate) fn set(&mut self, wanted: impl Iterator<Item = (i32, u64)>) {
        let mut before = std::mem::take(&mut self.watched);
        for key in wanted.take(MAX_WATCHED) {
            if let Some(fd) = before.remove(&key).or_else(|| open(key)) {
                self.watched.insert(key, fd);
            }
        }
    }

    /// Waits until a watched process has ended, or until `until`. Returns those that have ended,
    /// which are not watched any more.
    pub(crate) fn wait(&mut self, until: Instant) -> Vec<i32> {
        let keys: Vec<(i32, u64)> = self.watched.keys().copied().collect();
        let mut polled: Vec<PollFd<'_>> =
            self.watched.values().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let left = until.saturating_duration_since(Instant::now());
        let wait = Timespec::try_from(left).ok();
        if poll(&mut polled, wait.as_ref()).is_err() {
            // Interrupted or out of memory, for example; the next scan comes anyway.
            std::thread::sleep(left.min(Duration::from_millis(100)));
            return Vec::new();
        }
        let ended_flags: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
        let ended: Vec<(i32, u64)> = keys
            .into_iter()
            .zip(ended_flags)
            .filter_map(|(key, has_ended)| has_ended.then_some(key))
            .collect();
        for key in &ended {
            self.watched.remove(key);
        }
        ended.into_iter().map(|(pid, _)| pid).collect()
    }
}

/// Opens a pidfd; `None` if the pid now belongs to another process.
fn open((pid, start): (i32, u64)) -> Option<OwnedFd> {
    let fd = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    read_stat(pid).ok().filter(|found| found.start == start && !found.zombie).map(|_| fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn exits_of_watched_processes_are_reported_at_once() {
        let child = || Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
        let (mut one, mut other) = (child(), child());
        let key = |child: &std::process::Child| {
            let pid = child.id() as i32;
            (pid, read_stat(pid).unwrap().start)
        };
        let mut watch = ExitWatch::default();
        // The pid with another start time matches no process.
        let (pid, start) = key(&one);
        watch.set([key(&one), (pid, start + 1), key(&other)].into_iter());
        assert_eq!(watch.watched.len(), 2);
        assert_eq!(watch.wait(Instant::now()), [0; 0]);
        watch.set([key(&one)].into_iter());
        other.kill().unwrap();
        one.kill().unwrap();
        assert_eq!(watch.wait(Instant::now() + Duration::from_secs(60)), [pid]);
        assert_eq!(watch.wait(Instant::now()), [0; 0], "each end is reported once");
        one.wait().unwrap();
        other.wait().unwrap();
    }
}
