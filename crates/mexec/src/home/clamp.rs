//! Clamps the limits and priority that a caller requests for its command to those that the caller's
//! process has, so that no command gets more on another node than its caller has here.

use crate::messages::Task;
use std::fs;

/// Rows of /proc/PID/limits, by resource number (setrlimit(2)).
const LIMIT_NAMES: [(u32, &str); 16] = [
    (0, "Max cpu time"),
    (1, "Max file size"),
    (2, "Max data size"),
    (3, "Max stack size"),
    (4, "Max core file size"),
    (5, "Max resident set"),
    (6, "Max processes"),
    (7, "Max open files"),
    (8, "Max locked memory"),
    (9, "Max address space"),
    (10, "Max file locks"),
    (11, "Max pending signals"),
    (12, "Max msgqueue size"),
    (13, "Max nice priority"),
    (14, "Max realtime priority"),
    (15, "Max realtime timeout"),
];

/// Clamps a task to its caller's limits and priority. The caller is not root. It is connected and
/// waits, so its pid is not reused.
///
/// # Errors
/// If the caller is gone.
pub(super) fn clamp(task: &mut Task, pid: i32) -> std::io::Result<()> {
    let gone = || std::io::Error::from(std::io::ErrorKind::NotFound);
    let process = rustix::process::Pid::from_raw(pid).ok_or_else(gone)?;
    task.nice = task.nice.max(rustix::process::getpriority_process(Some(process))?);
    let limits = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let requested = std::mem::take(&mut task.limits);
    // One entry for each resource that this kernel lists, whatever the request contains: of two
    // entries for one resource the last would hold.
    for (number, name) in LIMIT_NAMES {
        let Some(max) = limits.lines().find_map(|line| hard_limit(line.strip_prefix(name)?)) else {
            continue;
        };
        let wanted = requested.iter().find(|(of, ..)| *of == number);
        let (soft, hard) = wanted.map_or((max, max), |(_, soft, hard)| ((*soft).min(max), (*hard).min(max)));
        task.limits.push((number, soft, hard));
    }
    Ok(())
}

/// The hard limit, which follows the soft one.
fn hard_limit(line: &str) -> Option<u64> {
    match line.split_whitespace().nth(1)? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn task_is_clamped_to_its_callers_limits() {
        let own = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let (current, max) = (own.current.unwrap(), own.maximum.unwrap());
        let mut task = Task {
            program: Vec::new(),
            arguments: Vec::new(),
            environment: Vec::new(),
            directory: Vec::new(),
            umask: 0,
            limits: vec![(7, u64::MAX, u64::MAX), (99, 1, 1)],
            nice: -20,
            ignored_signals: 0,
            blocked_signals: 0,
            pid: 0,
            terminal: None,
            forwards_stdin: false,
            merges_stderr: false,
            private_tmp: false,
        };
        let pid = std::process::id() as i32;
        clamp(&mut task, pid).unwrap();
        assert_eq!(task.nice, rustix::process::getpriority_process(None).unwrap());
        assert!(task.limits.contains(&(7, max, max)) && task.limits.iter().all(|(of, ..)| *of < 16));
        assert_eq!(task.limits.len(), LIMIT_NAMES.len());
        task.limits = vec![(7, current.min(5), 9)];
        clamp(&mut task, pid).unwrap();
        assert!(task.limits.contains(&(7, current.min(5), 9)), "lower limits are kept");
        task.limits = vec![(7, 5, 9), (7, u64::MAX, u64::MAX), (14, 0, 0), (14, u64::MAX, u64::MAX)];
        clamp(&mut task, pid).unwrap();
        let of = |number| task.limits.iter().filter(|(of, ..)| *of == number).copied().collect::<Vec<_>>();
        assert_eq!((of(7), of(14)), (vec![(7, 5, 9)], vec![(14, 0, 0)]), "a second entry has no effect");
        assert!(clamp(&mut task, i32::MAX).is_err());
    }
}
