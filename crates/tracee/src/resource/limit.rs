//! A process's resource limits (prlimit(2)), soft and hard.

use crate::error::{Error, Result};
use crate::procfs;

/// The supported limits, with their names in /proc/PID/limits.
const NAMES: [(u32, &str); 8] = [
    (libc::RLIMIT_CPU, "Max cpu time"),
    (libc::RLIMIT_FSIZE, "Max file size"),
    (libc::RLIMIT_DATA, "Max data size"),
    (libc::RLIMIT_STACK, "Max stack size"),
    (libc::RLIMIT_CORE, "Max core file size"),
    (libc::RLIMIT_NOFILE, "Max open files"),
    (libc::RLIMIT_MEMLOCK, "Max locked memory"),
    (libc::RLIMIT_AS, "Max address space"),
];

/// Reads a limit: CPU, FSIZE, DATA, STACK, CORE, NOFILE, MEMLOCK or AS. Read from /proc, since prlimit(2)
/// on another user's process needs CAP_SYS_RESOURCE, which root in a container may not have.
///
/// # Errors
/// If the process is gone, or the text cannot be parsed.
pub fn get(pid: i32, resource: u32) -> Result<(u64, u64)> {
    let text = procfs::read(pid, "limits")?;
    let name = NAMES.iter().find(|(known, _)| *known == resource).map(|(_, name)| *name);
    find(&String::from_utf8_lossy(&text), name.unwrap_or("none"))
        .ok_or(Error::Unreadable { what: "limits", pid })
}

fn find(text: &str, name: &str) -> Option<(u64, u64)> {
    let mut words = text.lines().find_map(|line| line.strip_prefix(name))?.split_ascii_whitespace();
    let mut word = || match words.next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    };
    Some((word()?, word()?))
}

/// Sets a limit. If the hard limit may not be raised to this value, soft and hard limit are capped
/// to the current hard limit.
///
/// # Errors
/// If the process is gone, or may not be changed.
pub fn set(pid: i32, resource: u32, (soft, hard): (u64, u64)) -> Result<()> {
    if try_set(pid, resource, (soft, hard)) {
        return Ok(());
    }
    let (_, most) = get(pid, resource)?;
    let hard = hard.min(most);
    if try_set(pid, resource, (soft.min(hard), hard)) { Ok(()) } else { Err(Error::last("set a limit", pid)) }
}

/// Number of descriptors by which the limit is raised.
const SPARE_DESCRIPTORS: u64 = 16;

/// Runs `work`, which opens descriptors in a process and closes them again. If the process has no
/// number free (EMFILE), `work` is run once more while its limit is higher: the program must not
/// notice that Tern needs numbers. Its other threads could notice the limit meanwhile.
///
/// # Errors
/// Those of `work`; EMFILE only if the limit cannot be raised: above the hard limit this needs
/// CAP_SYS_RESOURCE.
pub fn with_spare_descriptors<T>(pid: i32, mut work: impl FnMut() -> Result<T>) -> Result<T> {
    let resource = libc::RLIMIT_NOFILE;
    match work() {
        Err(Error::Refused { source, .. }) if source.raw_os_error() == Some(libc::EMFILE) => {}
        done => return done,
    }
    let (soft, hard) = get(pid, resource)?;
    // The limit may have been lowered below the numbers in use.
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok());
    let raised = numbers.max().map_or(soft, |highest| soft.max(highest + 1)) + SPARE_DESCRIPTORS;
    let raised = (raised, hard.max(raised));
    let is_raised = try_set(pid, resource, raised);
    let done = work();
    // The program may have set another limit meanwhile.
    if is_raised && get(pid, resource).is_ok_and(|now| now == raised) {
        set(pid, resource, (soft, hard))?;
    }
    done
}

fn try_set(pid: i32, resource: u32, (soft, hard): (u64, u64)) -> bool {
    let limit = [soft, hard];
    // SAFETY: struct rlimit64 is two 64-bit words.
    unsafe { libc::syscall(libc::SYS_prlimit64, pid, resource, limit.as_ptr(), 0) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spare_descriptors_exist_only_during_the_work() {
        let mut child = std::process::Command::new("sleep").arg("9").spawn().unwrap();
        let (pid, resource) = (child.id() as i32, libc::RLIMIT_NOFILE);
        let numbers = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let numbers =
            numbers.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse::<u64>().unwrap());
        let first = numbers.max().unwrap_or(0) + 10;
        let hard = first + 2 * SPARE_DESCRIPTORS;
        set(pid, resource, (first, hard)).unwrap();
        let mut seen = Vec::new();
        let full = || {
            let source = std::io::Error::from_raw_os_error(libc::EMFILE);
            Err::<(), _>(Error::Refused { operation: "open", pid, source })
        };
        let done = with_spare_descriptors(pid, || {
            seen.push(get(pid, resource).unwrap());
            if seen.len() == 1 { full() } else { Ok(()) }
        });
        let after = get(pid, resource).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(done.is_ok() && after == (first, hard), "{after:?}");
        assert_eq!(seen, [(first, hard), (first + SPARE_DESCRIPTORS, hard)]);
    }

    #[test]
    fn limit_reads_back_what_was_set() {
        let (me, core) = (std::process::id() as i32, libc::RLIMIT_CORE);
        let (_, hard) = get(me, core).unwrap();
        set(me, core, (0, hard)).unwrap();
        assert_eq!(get(me, core).unwrap(), (0, hard));
        assert!(get(i32::MAX, core).is_err());
        for (resource, _) in NAMES {
            get(me, resource).unwrap();
        }
        assert_eq!(find("Max cpu time   7   unlimited   seconds", "Max cpu time"), Some((7, u64::MAX)));
    }
}
