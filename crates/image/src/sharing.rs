//! Which processes share a kernel object: memory, descriptors, an open file. Only the kernel's tables
//! are compared (kcmp(2)), and no file system is asked. But a comparison waits while one of the
//! processes executes a program, and that may wait for a file server.

use std::time::Instant;
use tern_tracee::procfs;

/// A relative that uses the same memory. Relatives that execute a program are not compared: their
/// memory has no code yet, so that it is not the memory of a process that has code.
pub(crate) fn relative_in_same_memory(pid: i32, parent: i32) -> Option<i32> {
    const KCMP_VM: i32 = 1;
    let code = |of: i32| procfs::status(of).ok().map(|status| status.code_kib);
    let own_code = code(pid);
    let relatives = procfs::children(pid).into_iter().chain([parent]);
    let same_memory = |other: &i32| is_same((pid, 0), (*other, 0), KCMP_VM);
    relatives.filter(|other| *other > 0 && code(*other) == own_code).find(same_memory)
}

/// Whether two processes, or two of their descriptors, share the same object of this kind. False if
/// the kernel does not tell.
#[allow(unsafe_code, reason = "kcmp has no wrapper")]
fn is_same(a: (i32, i32), b: (i32, i32), kind: i32) -> bool {
    // SAFETY: integers only.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, a.0, b.0, kind, a.1, b.1) };
    order == 0
}

/// The numeric entries of a directory of /proc, read as the iterator advances. Empty if it does not
/// exist; `None` if it may not be read.
fn numeric_entries(folder: &str) -> Option<impl Iterator<Item = i32> + use<>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => Some(entries),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(_) => return None,
    };
    let entries = entries.into_iter().flatten().flatten();
    Some(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

/// Whether another descriptor, of this or another process, refers to the same open file
/// description. `None` if a process may not be examined, if the search passes the deadline, or if
/// the kernel cannot compare descriptors. Descriptors in transit in a socket's queue are not found.
#[must_use]
pub fn is_open_elsewhere(pid: i32, fd: i32, deadline: Instant) -> Option<bool> {
    const KCMP_FILE: i32 = 0;
    if !is_same((pid, fd), (pid, fd), KCMP_FILE) {
        return None;
    }
    for other in numeric_entries("/proc")? {
        for theirs in numeric_entries(&format!("/proc/{other}/fd"))? {
            if (other, theirs) != (pid, fd) && is_same((pid, fd), (other, theirs), KCMP_FILE) {
                return Some(true);
            }
            if Instant::now() > deadline {
                return None;
            }
        }
    }
    Some(false)
}

/// Whether another process shares the descriptor table. True also if that cannot be determined.
#[must_use]
pub fn shares_descriptors(pid: i32) -> bool {
    const KCMP_FILES: i32 = 2;
    shares(pid, KCMP_FILES)
}

/// Whether another process shares root and working directory, so that it may change them for both.
/// True also if that cannot be determined.
#[must_use]
pub fn shares_fs(pid: i32) -> bool {
    const KCMP_FS: i32 = 3;
    shares(pid, KCMP_FS)
}

fn shares(pid: i32, what: i32) -> bool {
    let can_tell = is_same((pid, 0), (pid, 0), what);
    let shares = |other: i32| other != pid && is_same((pid, 0), (other, 0), what);
    !can_tell || numeric_entries("/proc").is_none_or(|mut processes| processes.any(shares))
}
