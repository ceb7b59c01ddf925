//! The time namespaces of processes (time_namespaces(7)). A guest sees the clocks that its process sees
//! at home: its sandbox has a time namespace of its own, whose offsets include those of the process.

use std::fs::{read_link, read_to_string};
use std::path::PathBuf;
use tern_ids::HomePid;
use tern_tracee::procfs::live_thread;

/// By how many nanoseconds the monotonic clock and the boot clock of these processes, which move
/// together, are ahead of this program's.
///
/// # Errors
/// With the reason if the processes see different clocks, or their clocks cannot be found out.
pub(crate) fn clock_offsets(processes: &[HomePid]) -> Result<[i64; 2], String> {
    let mut all = processes.iter().map(|pid| (*pid, offsets_of(live_thread(pid.0))));
    let Some((_, first)) = all.next() else { return Ok([0; 2]) };
    let first = first?;
    match all.find(|(_, offsets)| offsets.as_ref() != Ok(&first)) {
        Some((pid, offsets)) => {
            offsets?;
            Err(format!("time namespace: process {pid}, which moves too, has other clocks"))
        }
        None => Ok(first),
    }
}

fn offsets_of(pid: i32) -> Result<[i64; 2], String> {
    let pid = pid.to_string();
    // On a kernel without time namespaces neither exists.
    let namespace =
        |who: &str, which: &str| -> Option<PathBuf> { read_link(format!("/proc/{who}/ns/{which}")).ok() };
    // The kernel shows the offsets only of the namespace for children.
    let is_shown = |who: &str| namespace(who, "time") == namespace(who, "time_for_children");
    if !is_shown(&pid) {
        return Err("time namespace: its children get other clocks".into());
    }
    if namespace(&pid, "time") == namespace("self", "time") {
        return Ok([0; 2]);
    }
    let text = |who: &str| read_to_string(format!("/proc/{who}/timens_offsets")).ok();
    let offsets = |who: &str| text(who).filter(|_| is_shown(who)).and_then(|text| parse(&text));
    match (offsets(&pid), offsets("self")) {
        (Some(theirs), Some(ours)) => Ok([0, 1].map(|clock| theirs[clock] - ours[clock])),
        _ => Err("time namespace: the offsets of its clocks cannot be read".into()),
    }
}

/// Reads `/proc/PID/timens_offsets`: for each clock its name, seconds and nanoseconds.
fn parse(text: &str) -> Option<[i64; 2]> {
    let offset = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let mut numbers = line.split_ascii_whitespace().map(str::parse::<i64>);
        let (seconds, rest) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        seconds.checked_mul(1_000_000_000)?.checked_add(rest)
    };
    Some([offset("monotonic")?, offset("boottime")?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_read() {
        let text = "monotonic     5000000         7\nboottime           -2 500000000\n";
        assert_eq!(parse(text), Some([5_000_000_000_000_007, -1_500_000_000]));
        assert_eq!(parse("monotonic 1 2\n"), None);
        assert_eq!(parse("monotonic x 2\nboottime 0 0\n"), None);
    }

    #[test]
    fn own_clocks_have_no_offset() {
        let me = HomePid(std::process::id() as i32);
        assert_eq!(clock_offsets(&[me, me]), Ok([0, 0]));
        assert_eq!(clock_offsets(&[]), Ok([0, 0]));
    }
}
