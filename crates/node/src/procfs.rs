//! What `/proc` tells of a process of this node.

use std::fs;

/// Clock ticks in a second, as `/proc` counts them; Linux has never shown another number.
const TICKS: f64 = 100.0;

/// A process as it is now.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Process {
    pub(crate) parent: i32,
    /// Clock ticks since boot; with the number it names one process for good.
    pub(crate) start: u64,
    pub(crate) cpu_seconds: f64,
    pub(crate) zombie: bool,
}

/// `None` if there is no such process.
pub(crate) fn process(pid: i32) -> Option<Process> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse(stat: &str) -> Option<Process> {
    // The name in parentheses may hold anything, parentheses too.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<_> = rest.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(Process {
        zombie: matches!(*fields.first()?, "Z" | "X"),
        parent: fields.get(1)?.parse().ok()?,
        cpu_seconds: (number(11)? + number(12)?) as f64 / TICKS,
        start: number(19)?,
    })
}

/// Real and effective user.
pub(crate) fn users(pid: i32) -> Option<(u32, u32)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let mut numbers = status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace();
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The command line, or the name if it has none.
pub(crate) fn command(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    if !line.trim().is_empty() {
        return line.trim().chars().take(4096).collect();
    }
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_found() {
        let pid = std::process::id() as i32;
        let own = process(pid).unwrap();
        assert_eq!(own.parent, std::os::unix::process::parent_id() as i32);
        assert!(own.start > 0 && !own.zombie);
        assert_eq!(users(pid).unwrap().1, rustix::process::geteuid().as_raw());
        assert!(command(pid).contains("tern_node"));
        assert_eq!(process(0), None);
    }

    #[test]
    fn a_wild_name_does_not_confuse() {
        let rest = "S 7 1 1 0 -1 4194560 1 0 0 0 150 50 0 0 20 0 1 0 4711 1 1";
        let read = parse(&format!("12 (a) R 99 (b) {rest}")).unwrap();
        assert_eq!((read.parent, read.start, read.cpu_seconds), (7, 4711, 2.0));
        assert_eq!(parse("12 (a"), None);
    }
}
