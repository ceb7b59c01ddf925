//! Finds processes that have shared memory open, by scanning the descriptors of all processes.

use rustix::fs::{AtFlags, StatxFlags, statx};
use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tern_control::{ReadError, read_process};
use tern_tracee::procfs;

/// After this time a scan ends without a result. A million descriptors take some two seconds.
const SCAN_TIMEOUT: Duration = Duration::from_secs(4);

/// The result of a scan for processes that have a file open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Opener {
    /// No other process has it open.
    None,
    /// This process has it open.
    Process(i32),
    /// The scan has not ended. The caller may ask again; the main loop is woken at its end.
    Pending,
    /// The scan has taken too long, or a process is executing a program and waits for a file server.
    /// The caller must decide as if a process had it open.
    Unknown,
}

/// A process other than `these` that has one of these files open. For a thread.
pub(super) fn find_opener(files: HashSet<(u64, u64)>, these: &BTreeSet<i32>) -> Opener {
    let (files, deadline) = (Arc::new(files), Instant::now() + SCAN_TIMEOUT);
    for pid in all_pids().filter(|pid| !these.contains(pid)) {
        let files = Arc::clone(&files);
        match read_process(pid, move || opener(pid, &files, deadline)) {
            Ok(Opener::None) | Err(ReadError::Gone) => {}
            Ok(found) => return found,
            Err(ReadError::Overdue) => return Opener::Unknown,
        }
    }
    Opener::None
}

/// Whether this process has one of these files open. None if it is gone.
fn opener(pid: i32, files: &HashSet<(u64, u64)>, deadline: Instant) -> Option<Opener> {
    let folder = std::fs::read_dir(format!("/proc/{}/fd", procfs::live_thread(pid))).ok()?;
    for descriptor in folder.flatten() {
        // A shim may have it open for a process that it held, or was about to hold.
        if file_id(&descriptor.path()).is_some_and(|id| files.contains(&id)) && !is_shim(pid) {
            return Some(Opener::Process(pid));
        }
        if Instant::now() > deadline {
            return Some(Opener::Unknown);
        }
    }
    Some(Opener::None)
}

/// The device and inode of the file behind a link in /proc/PID/fd, as far as the kernel knows them
/// without asking a server: another user's file may be on one that does not answer.
pub(super) fn file_id(link: &Path) -> Option<(u64, u64)> {
    let found = statx(rustix::fs::CWD, link, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some((rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino))
}

/// Whether a process is a shim: it runs the same program as this one.
pub(crate) fn is_shim(pid: i32) -> bool {
    let program = |pid: &str| file_id(Path::new(&format!("/proc/{pid}/exe")));
    let own = program("self");
    own.is_some() && program(&pid.to_string()) == own
}

/// The pids of all processes.
pub(super) fn all_pids() -> impl Iterator<Item = i32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}
