//! What a caller says that he would hand down to his command, against what his kernel says that he has: nobody gets more on another
//! node than he has here.

use crate::words::Task;
use std::fs;

/// Columns of /proc/PID/limits, by the numbers of setrlimit(2).
const NAMES: [(u32, &str); 16] = [
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

/// Takes back what this caller, who is not root, has not got. He waits for us, so that his number is his.
///
/// # Errors
/// If he is gone.
pub(super) fn hold(task: &mut Task, pid: i32) -> std::io::Result<()> {
    let gone = || std::io::Error::from(std::io::ErrorKind::NotFound);
    let process = rustix::process::Pid::from_raw(pid).ok_or_else(gone)?;
    task.nice = task.nice.max(rustix::process::getpriority_process(Some(process))?);
    let limits = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    for (number, name) in NAMES {
        let Some(most) = limits.lines().find_map(|line| hard(line.strip_prefix(name)?)) else { continue };
        match task.limits.iter_mut().find(|(of, ..)| *of == number) {
            Some((_, soft, hard)) => (*soft, *hard) = ((*soft).min(most), (*hard).min(most)),
            None => task.limits.push((number, most, most)),
        }
    }
    // Each once, and none that is not known here.
    task.limits.retain(|(of, ..)| NAMES.iter().any(|(number, _)| number == of));
    task.limits.truncate(NAMES.len());
    Ok(())
}

/// The hard limit, behind the soft one.
fn hard(line: &str) -> Option<u64> {
    match line.split_whitespace().nth(1)? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_claims_more_than_he_has_gets_what_he_has() {
        let own = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let (current, most) = (own.current.unwrap(), own.maximum.unwrap());
        let mut task = Task {
            program: Vec::new(),
            arguments: Vec::new(),
            environment: Vec::new(),
            directory: Vec::new(),
            umask: 0,
            limits: vec![(7, u64::MAX, u64::MAX), (99, 1, 1)],
            nice: -20,
            signals: (0, 0),
            pid: 0,
            terminal: None,
            input: false,
            joined: false,
            scratch: false,
        };
        let pid = std::process::id() as i32;
        hold(&mut task, pid).unwrap();
        assert_eq!(task.nice, rustix::process::getpriority_process(None).unwrap());
        assert!(task.limits.contains(&(7, most, most)) && task.limits.iter().all(|(of, ..)| *of < 16));
        assert_eq!(task.limits.len(), NAMES.len());
        task.limits = vec![(7, current.min(5), 9)];
        hold(&mut task, pid).unwrap();
        assert!(task.limits.contains(&(7, current.min(5), 9)), "less may be had");
        assert!(hold(&mut task, i32::MAX).is_err());
    }
}
