//! A process's resource limits (prlimit(2)), soft and hard.

use crate::error::{Error, Result};
use crate::procfs;

/// The supported limits, with their names in /proc/PID/limits.
const NAMES: [(u32, &str); 7] = [
    (libc::RLIMIT_CPU, "Max cpu time"),
    (libc::RLIMIT_FSIZE, "Max file size"),
    (libc::RLIMIT_DATA, "Max data size"),
    (libc::RLIMIT_STACK, "Max stack size"),
    (libc::RLIMIT_CORE, "Max core file size"),
    (libc::RLIMIT_MEMLOCK, "Max locked memory"),
    (libc::RLIMIT_AS, "Max address space"),
];

/// Reads a limit: CPU, FSIZE, DATA, STACK, CORE, MEMLOCK or AS. Read from /proc, since prlimit(2)
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

fn try_set(pid: i32, resource: u32, (soft, hard): (u64, u64)) -> bool {
    let limit = [soft, hard];
    // SAFETY: struct rlimit64 is two 64-bit words.
    unsafe { libc::syscall(libc::SYS_prlimit64, pid, resource, limit.as_ptr(), 0) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

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
