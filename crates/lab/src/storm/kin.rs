//! This process's descendants. It is a subreaper, so that what its children leave behind becomes its own.

use crate::process::Process;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use std::fs;

/// All that live, in the order of their numbers; zombies do not.
pub(super) fn living() -> Vec<Process> {
    let rows: Vec<(i32, i32)> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, parent(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?)))
        .collect();
    let own = rustix::process::getpid().as_raw_nonzero().get();
    descendants(&rows, own).into_iter().filter_map(|pid| Process::now(pid).ok()).collect()
}

/// The parent in a line of `/proc/PID/stat`. The command's name is in parentheses and may contain anything.
fn parent(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn descendants(rows: &[(i32, i32)], root: i32) -> Vec<i32> {
    let mut found = vec![root];
    let mut at = 0;
    while let Some(&of) = found.get(at) {
        found.extend(rows.iter().filter(|(_, parent)| *parent == of).map(|(pid, _)| *pid));
        at += 1;
    }
    found.remove(0);
    found.sort_unstable();
    found
}

/// The next child that has ended, without waiting for it.
pub(super) enum Ended {
    /// This one.
    One(Pid, WaitStatus),
    /// None; there still are some.
    NotYet,
    /// There are no children at all, and so no descendants.
    All,
}

/// Buries one.
pub(super) fn bury() -> Ended {
    match rustix::process::wait(WaitOptions::NOHANG) {
        Ok(Some((pid, status))) => Ended::One(pid, status),
        Ok(None) => Ended::NotYet,
        Err(_) => Ended::All,
    }
}

/// Kills all that live just now. Some may be born meanwhile.
pub(super) fn kill() {
    for process in living() {
        if let Ok(fd) = process.open() {
            // It may have ended by itself.
            let _ = rustix::process::pidfd_send_signal(fd, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descendants_are_found_at_any_depth() {
        let rows = [(1, 0), (10, 1), (11, 10), (9, 11), (13, 1), (20, 1)];
        assert_eq!(descendants(&rows, 10), [9, 11]);
        assert!(descendants(&rows, 20).is_empty());
    }

    #[test]
    fn names_do_not_mislead() {
        assert_eq!(parent("31 (a) R 7 (b)) S 12 31 0"), Some(12));
        assert_eq!(parent("31 (a"), None);
    }
}
