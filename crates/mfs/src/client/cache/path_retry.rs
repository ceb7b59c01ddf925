//! Path walks that failed with ESTALE because of an outdated dentry, and that the kernel repeats.

use crate::client::fuse::inode::Inode;
use crate::lock;
use crate::message::MAX_DENTRY_CHECKS;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a thread that got `ESTALE` may take to walk its path again, and (the second constant)
/// to create a file after a failed lookup. Neither is shorter than the time for which an
/// invalidated dentry is still checked (`invalidator::MAX_PATH_WALK`). Otherwise the dentries of a
/// slow thread would be checked again at the end of its path; the call could fail, and the kernel
/// does not retry a second time.
const RETRY_TIMEOUT: Duration = Duration::from_millis(400);
const CREATE_RETRY_TIMEOUT: Duration = Duration::from_millis(300);

/// Threads that recently got `ESTALE` because of a stale dentry.
///
/// At the end of a path the kernel retries once: the thread walks the path again with a lookup at
/// each component, so no dentries need be checked at the end of this second walk. A superfluous
/// check (for the directory where the path begins, say) or another change in between would make the
/// call fail for good.
///
/// A lookup in the middle of a path is different: when revalidation of a dentry fails, the kernel
/// first repeats that lookup on the same path. So the repeated lookup fails with `ESTALE` as well,
/// unless the path may begin in that directory. A different lookup shows that the whole path is
/// being walked again.
#[derive(Debug, Default)]
pub(crate) struct PathRetries(Mutex<HashMap<u32, PathRetry>>);

#[derive(Debug)]
struct PathRetry {
    until: Instant,
    at: RetryPoint,
}

#[derive(Debug)]
enum RetryPoint {
    /// The end of a path. Inodes looked up since then, and the directories of these lookups.
    PathEnd(Vec<u64>),
    /// A lookup in this directory; whether it failed twice.
    Lookup(u64, OsString, bool),
}

/// How to perform a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LookupMode {
    /// With dentry checks.
    Checked,
    /// Without dentry checks.
    Unchecked,
    /// Fail with `ESTALE`, unless the path can begin in this directory; then without dentry checks.
    StaleUnlessPathStart,
}

impl PathRetries {
    /// This thread gets `ESTALE` at the end of its path.
    pub(crate) fn fail_at_end(&self, tid: u32) {
        self.insert(tid, RetryPoint::PathEnd(Vec::new()));
    }

    /// This thread repeats a lookup in a directory where its path may begin.
    pub(crate) fn note_restart_in(&self, tid: u32, dir: u64) {
        self.insert(tid, RetryPoint::PathEnd(vec![dir]));
    }

    /// This thread gets `ESTALE` for a lookup.
    pub(crate) fn fail_at_lookup(&self, tid: u32, dir: u64, name: &OsStr, twice: bool) {
        self.insert(tid, RetryPoint::Lookup(dir, name.to_owned(), twice));
    }

    fn insert(&self, tid: u32, at: RetryPoint) {
        let (mut all, now) = (lock(&self.0), Instant::now());
        all.retain(|_, retry| retry.until > now);
        all.insert(tid, PathRetry { until: now + RETRY_TIMEOUT, at });
    }

    /// How this thread's lookup of a name is to be performed.
    pub(crate) fn lookup_mode(&self, tid: u32, dir: u64, name: &OsStr) -> LookupMode {
        let mut all = lock(&self.0);
        let Some(retry) = all.get_mut(&tid).filter(|retry| retry.until > Instant::now()) else {
            return LookupMode::Checked;
        };
        match &mut retry.at {
            RetryPoint::Lookup(at, of, twice) if *at == dir && of == name => {
                if *twice {
                    LookupMode::Unchecked
                } else {
                    LookupMode::StaleUnlessPathStart
                }
            }
            RetryPoint::Lookup(..) => {
                retry.at = RetryPoint::PathEnd(vec![dir]);
                LookupMode::Unchecked
            }
            RetryPoint::PathEnd(visited) => {
                if visited.len() < MAX_DENTRY_CHECKS {
                    visited.push(dir);
                }
                LookupMode::Unchecked
            }
        }
    }

    /// Records a lookup's result. If the name does not exist the path ends here, unless the file is
    /// created next.
    pub(crate) fn note_lookup(&self, tid: u32, found: Option<u64>) {
        let mut all = lock(&self.0);
        let Some(retry) = all.get_mut(&tid) else { return };
        match (&mut retry.at, found) {
            (RetryPoint::PathEnd(visited), Some(number)) => visited.push(number),
            (_, None) => retry.until = retry.until.min(Instant::now() + CREATE_RETRY_TIMEOUT),
            (RetryPoint::Lookup(..), Some(_)) => {}
        }
    }

    /// Whether the thread is walking its path again, and has reached these inodes that way: it has
    /// looked them up, or its path has no components.
    pub(crate) fn is_retrying_to(&self, tid: u32, inodes: &[&Arc<Inode>]) -> bool {
        match lock(&self.0).get(&tid) {
            Some(PathRetry { until, at: RetryPoint::PathEnd(visited) }) if *until > Instant::now() => {
                visited.is_empty() || inodes.iter().all(|inode| visited.contains(&inode.number))
            }
            _ => false,
        }
    }

    /// The thread has reached the end of its path.
    pub(crate) fn finish(&self, tid: u32) {
        lock(&self.0).remove(&tid);
    }
}

/// Whether a path of this thread may begin in this directory: it is the thread's working directory,
/// or some process has it open.
pub(crate) fn may_path_begin_in(tid: u32, dir: &Inode) -> bool {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    // AT_STATX_DONT_SYNC avoids a request to this tree: all of its threads may be busy.
    let flags = AtFlags::from_bits_retain(libc::AT_STATX_DONT_SYNC.cast_unsigned());
    let cwd = || statx(CWD, format!("/proc/{tid}/cwd"), flags, StatxFlags::INO);
    dir.pages.is_open() || cwd().is_ok_and(|cwd| cwd.stx_ino == dir.number)
}
