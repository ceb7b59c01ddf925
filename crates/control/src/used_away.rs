//! The CPU time that processes have used away, while they are at home and no shim holds them.
//!
//! Home's kernel does not know that time. A home shim saves it in a file `RUN/spent/PID`, when it
//! detaches from a process. The first line has the start time of the process (field 22 of
//! `/proc/PID/stat`), its own user and system time, and those of its children that have ended, in
//! nanoseconds.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The directory of the files.
#[must_use]
pub fn folder(run_dir: &Path) -> PathBuf {
    run_dir.join("spent")
}

/// The CPU time that the process with this pid and start time has used away itself; zero if nothing is
/// saved for it.
#[must_use]
pub fn by_process(run_dir: &Path, pid: i32, start: u64) -> Duration {
    let text = fs::read_to_string(folder(run_dir).join(pid.to_string())).unwrap_or_default();
    parse(&text).filter(|(of, _)| *of == start).map_or(Duration::ZERO, |(_, used)| used)
}

/// The start time and the CPU time in the first line.
fn parse(text: &str) -> Option<(u64, Duration)> {
    let mut numbers = text.lines().next()?.split(' ').map(|word| word.parse::<u64>().ok());
    let (start, user, system) = (numbers.next()??, numbers.next()??, numbers.next()??);
    Some((start, Duration::from_nanos(user.saturating_add(system))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_line_has_the_time_of_the_process() {
        assert_eq!(parse("4711 50 6 70 8\n7 1 2\n"), Some((4711, Duration::from_nanos(56))));
        assert_eq!(parse("4711 18446744073709551615 6 7 8").unwrap().1, Duration::from_nanos(u64::MAX));
        for text in ["", "4711", "4711 x 6 7 8", "-1 5 6 7 8"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
