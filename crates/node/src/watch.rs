//! Who is told at once that a process has ended: the balancer, of those that count.
//!
//! A node that falls idle is idle until somebody decides again. Its own look comes once a second, the gossip of it half a
//! second later, and the home's decision up to a second after that; so the last of a crowd would find an empty node two
//! seconds late. A home sees the end of its processes, wherever they run, by the end of their deputies.

use crate::procfs::process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// So many are watched at most. Among more than these the end of one changes little.
const MOST: usize = 256;

/// Processes whose end is waited for.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    watched: HashMap<(i32, u64), OwnedFd>,
}

impl Watch {
    /// From now on these, by their numbers and starts.
    pub(crate) fn follow(&mut self, wanted: impl Iterator<Item = (i32, u64)>) {
        let mut before = std::mem::take(&mut self.watched);
        for key in wanted.take(MOST) {
            if let Some(fd) = before.remove(&key).or_else(|| open(key)) {
                self.watched.insert(key, fd);
            }
        }
    }

    /// Waits until one has ended, or until then. Those that have ended are not watched any more.
    pub(crate) fn wait(&mut self, until: Instant) -> Vec<i32> {
        let keys: Vec<(i32, u64)> = self.watched.keys().copied().collect();
        let mut polled: Vec<PollFd<'_>> =
            self.watched.values().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let left = until.saturating_duration_since(Instant::now());
        let wait = Timespec::try_from(left).ok();
        if poll(&mut polled, wait.as_ref()).is_err() {
            // Whatever the kernel lacks, there is a next look.
            std::thread::sleep(left.min(Duration::from_millis(100)));
            return Vec::new();
        }
        let over: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
        let ended: Vec<(i32, u64)> =
            keys.into_iter().zip(over).filter_map(|(key, over)| over.then_some(key)).collect();
        for key in &ended {
            self.watched.remove(key);
        }
        ended.into_iter().map(|(pid, _)| pid).collect()
    }
}

/// The number may be another process's by now.
fn open((pid, start): (i32, u64)) -> Option<OwnedFd> {
    let fd = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    process(pid).filter(|found| found.start == start && !found.zombie).map(|_| fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn an_end_is_heard_of_at_once_and_only_of_who_is_watched() {
        let child = || Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
        let (mut one, mut other) = (child(), child());
        let key = |child: &std::process::Child| {
            let pid = child.id() as i32;
            (pid, process(pid).unwrap().start)
        };
        let mut watch = Watch::default();
        // Another of this number is none of them.
        let (pid, start) = key(&one);
        watch.follow([key(&one), (pid, start + 1), key(&other)].into_iter());
        assert_eq!(watch.watched.len(), 2);
        assert_eq!(watch.wait(Instant::now()), [0; 0]);
        watch.follow([key(&one)].into_iter());
        other.kill().unwrap();
        one.kill().unwrap();
        assert_eq!(watch.wait(Instant::now() + Duration::from_secs(60)), [pid]);
        assert_eq!(watch.wait(Instant::now()), [0; 0], "it is told once");
        one.wait().unwrap();
        other.wait().unwrap();
    }
}
