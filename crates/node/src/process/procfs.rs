//! Fields of `/proc` about a process of this node.

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use std::fs;
use std::path::Path;
use tern_control::procfs::read_text;
use tern_control::{ReadError, Refusal, RefusalKind, read_process};
use tern_ids::HomePid;

/// Clock ticks per second in `/proc`; USER_HZ is 100 on all architectures that Tern supports.
const TICKS_PER_S: f64 = 100.0;

/// A process at the time of the call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ProcStat {
    pub(crate) parent: i32,
    /// Start time in clock ticks since boot; together with the pid it identifies one process.
    pub(crate) start: u64,
    pub(crate) cpu_seconds: f64,
    pub(crate) zombie: bool,
}

/// Reads `/proc/PID/stat`.
///
/// # Errors
/// As [`read_process`].
pub(crate) fn read_stat(pid: i32) -> Result<ProcStat, ReadError> {
    read_process(pid, move || parse_stat(&read_text(format!("/proc/{pid}/stat")).ok()?))
}

/// The refusal of a request about a process that was not read.
pub(crate) fn refusal(pid: HomePid, error: ReadError) -> Refusal {
    match error {
        ReadError::Gone => Refusal::new(RefusalKind::NotFound, format!("there is no process {pid}")),
        ReadError::Overdue => {
            let what = format!("process {pid} is executing a program, which waits for a file server");
            Refusal::new(RefusalKind::Unavailable, what).hint("try again when its file server answers")
        }
    }
}

/// Whether the process with this pid is the one whose start time is `start`. Also true if it cannot
/// be read in time, since then nothing shows that the process has ended.
pub(crate) fn is_same_process(pid: i32, start: u64) -> bool {
    match read_stat(pid) {
        Ok(found) => found.start == start,
        Err(error) => error == ReadError::Overdue,
    }
}

fn parse_stat(stat: &str) -> Option<ProcStat> {
    // The name, in parentheses, may contain any character, parentheses included.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<_> = rest.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(ProcStat {
        zombie: matches!(*fields.first()?, "Z" | "X"),
        parent: fields.get(1)?.parse().ok()?,
        cpu_seconds: (number(11)? + number(12)?) as f64 / TICKS_PER_S,
        start: number(19)?,
    })
}

/// Real and effective user.
///
/// # Errors
/// As [`read_process`].
pub(crate) fn uids(pid: i32) -> Result<(u32, u32), ReadError> {
    let read = move || {
        let status = read_text(format!("/proc/{pid}/status")).ok()?;
        let mut numbers = status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace();
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    };
    read_process(pid, read)
}

/// The command line, or the name if the command line is empty or cannot be read in time.
pub(crate) fn command_line(pid: i32) -> String {
    let line = read_process(pid, move || fs::read(format!("/proc/{pid}/cmdline")).ok()).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    if !line.trim().is_empty() {
        return line.trim().chars().take(4096).collect();
    }
    read_text(format!("/proc/{pid}/comm")).unwrap_or_default().trim().into()
}

/// Device and inode of a file. Asks no file server; none if the kernel does not know the file.
pub(crate) fn file_id(path: &Path) -> Option<(u32, u32, u64)> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some((found.stx_dev_major, found.stx_dev_minor, found.stx_ino))
}

/// The file of the program that a process runs.
///
/// # Errors
/// As [`read_process`].
pub(crate) fn program_id(pid: i32) -> Result<(u32, u32, u64), ReadError> {
    read_process(pid, move || file_id(Path::new(&format!("/proc/{pid}/exe"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_of_this_process_is_read() {
        let pid = std::process::id() as i32;
        let own = read_stat(pid).unwrap();
        assert_eq!(own.parent, std::os::unix::process::parent_id() as i32);
        assert!(own.start > 0 && !own.zombie);
        assert_eq!(uids(pid).unwrap().1, rustix::process::geteuid().as_raw());
        assert!(command_line(pid).contains("tern_node"));
        assert_eq!(read_stat(0), Err(ReadError::Gone));
        assert!(is_same_process(pid, own.start) && !is_same_process(pid, own.start + 1));
    }

    #[test]
    fn parentheses_in_the_name_are_skipped() {
        let rest = "S 7 1 1 0 -1 4194560 1 0 0 0 150 50 0 0 20 0 1 0 4711 1 1";
        let read = parse_stat(&format!("12 (a) R 99 (b) {rest}")).unwrap();
        assert_eq!((read.parent, read.start, read.cpu_seconds), (7, 4711, 2.0));
        assert_eq!(parse_stat("12 (a"), None);
    }
}
