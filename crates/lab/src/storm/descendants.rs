//! The descendants of this process, which is a subreaper, so that orphaned descendants become its
//! children.

use crate::process::Process;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use std::fs;

/// All living descendants, in the order of their pids, without zombies.
pub(super) fn list() -> Vec<Process> {
    let rows: Vec<(i32, i32)> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| {
            Some((pid, parent_of(&tern_control::procfs::read_text(format!("/proc/{pid}/stat")).ok()?)?))
        })
        .collect();
    let own = rustix::process::getpid().as_raw_nonzero().get();
    descendants(&rows, own).into_iter().filter_map(|pid| Process::find(pid).ok()).collect()
}

/// The parent's pid from `/proc/PID/stat`. The command name is in parentheses and may contain any
/// character.
fn parent_of(stat: &str) -> Option<i32> {
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

/// The result of a non-blocking wait for a child.
pub(super) enum Reaped {
    /// This child has ended.
    Child(Pid, WaitStatus),
    /// There are children, and none has ended.
    NoneEnded,
    /// There are no children at all, and so no descendants.
    NoChildren,
}

/// Reaps one child.
pub(super) fn reap() -> Reaped {
    match rustix::process::wait(WaitOptions::NOHANG) {
        Ok(Some((pid, status))) => Reaped::Child(pid, status),
        Ok(None) => Reaped::NoneEnded,
        Err(_) => Reaped::NoChildren,
    }
}

/// Kills all descendants that exist now. A descendant may fork meanwhile, so the caller must repeat
/// this.
pub(super) fn kill_all() {
    for process in list() {
        if let Ok(fd) = process.open() {
            // It may have ended already.
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
    fn command_names_with_parentheses_are_skipped() {
        assert_eq!(parent_of("31 (a) R 7 (b)) S 12 31 0"), Some(12));
        assert_eq!(parent_of("31 (a"), None);
    }
}
