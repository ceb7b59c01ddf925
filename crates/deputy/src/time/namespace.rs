//! The time namespaces of processes (time_namespaces(7)). The sandbox of a guest has a time namespace of
//! its own. Its offsets include those of the process at home, so the clocks are the same.

use std::fs::{read_link, read_to_string};
use std::path::PathBuf;
use tern_ids::HomePid;
use tern_tracee::procfs::{has_exited, threads};

/// By how many nanoseconds the monotonic clock and the boot clock of these processes, which move
/// together, are ahead of this program's. A process that has ended does not count.
///
/// # Errors
/// With the reason if the processes see different clocks, or their clocks cannot be found out.
pub(crate) fn clock_offsets(processes: &[HomePid]) -> Result<[i64; 2], String> {
    let Some(ours) = namespace("self", "time") else {
        // The kernel has no time namespaces.
        return Ok([0; 2]);
    };
    let mut found = None;
    for tid in processes.iter().flat_map(|process| threads(process.0).unwrap_or_default()) {
        match offsets_of(tid, &ours) {
            Ok(offsets) if *found.get_or_insert(offsets) != offsets => {
                return Err(format!("time namespace: thread {tid}, which moves too, has other clocks"));
            }
            Err(_) if has_exited(tid) => {}
            offsets => drop(offsets?),
        }
    }
    Ok(found.unwrap_or_default())
}

fn namespace(who: &str, which: &str) -> Option<PathBuf> {
    read_link(format!("/proc/{who}/ns/{which}")).ok()
}

fn offsets_of(tid: i32, our_namespace: &PathBuf) -> Result<[i64; 2], String> {
    let tid = tid.to_string();
    // The kernel shows the offsets only of the namespace for children.
    let is_shown = |who: &str, own: &PathBuf| namespace(who, "time_for_children").as_ref() == Some(own);
    let own = namespace(&tid, "time").ok_or("time namespace: its clocks are unknown")?;
    if !is_shown(&tid, &own) {
        return Err("time namespace: its children get other clocks".into());
    }
    if own == *our_namespace {
        return Ok([0; 2]);
    }
    let offsets = |who: &str| parse(&read_to_string(format!("/proc/{who}/timens_offsets")).ok()?);
    match (offsets(&tid), offsets("self").filter(|_| is_shown("self", our_namespace))) {
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
    fn own_clocks_have_no_offset_and_ended_processes_do_not_count() {
        let me = HomePid(std::process::id() as i32);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let zombie = HomePid(child.id() as i32);
        while !has_exited(zombie.0) {
            std::thread::yield_now();
        }
        for group in [&[me, me][..], &[zombie, me], &[HomePid(i32::MAX)], &[]] {
            assert_eq!(clock_offsets(group), Ok([0, 0]), "{group:?}");
        }
        child.wait().unwrap();
    }
}
