//! Finds processes that have shared memory open, by scanning the descriptors of all processes. A
//! scan takes longer, the more descriptors the processes of all users hold, so a thread makes the
//! scans and the main loop never waits.

use crate::waker::Waker;
use rustix::fs::{AtFlags, StatxFlags, statx};
use std::collections::{BTreeSet, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tern_tracee::{procfs, threads};

/// After this time a scan ends without a result. A million descriptors take some two seconds.
const SCAN_TIMEOUT: Duration = Duration::from_secs(4);

/// How long the main loop waits for a scan before it goes on without its result. A scan of 10,000
/// descriptors takes 20 ms.
const OPENER_TIMEOUT: Duration = Duration::from_millis(30);

/// The result of a scan for processes that have a file open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Opener {
    /// No other process has it open.
    None,
    /// This process has it open.
    Process(i32),
    /// The scan has not ended. The caller may ask again; the main loop is woken at its end.
    Pending,
    /// The scan has taken too long. The caller must decide as if a process had it open.
    Unknown,
}

/// Starts the scans of a shim, one at a time.
#[derive(Debug)]
pub(super) struct OpenerScanner {
    waker: Waker,
    is_busy: Arc<AtomicBool>,
    /// The scan whose result is still wanted.
    scan: Option<OpenerScan>,
}

/// A scan in progress: the files, the processes that are left out, and the result.
#[derive(Debug)]
pub(crate) struct OpenerScan {
    files: HashSet<(u64, u64)>,
    these: BTreeSet<i32>,
    found: Receiver<Opener>,
}

impl OpenerScanner {
    /// Wakes the main loop by `waker` when a scan has ended.
    pub(super) fn new(waker: Waker) -> Self {
        Self { waker, is_busy: Arc::default(), scan: None }
    }

    /// A process other than `these` that has one of these files open.
    pub(super) fn find(&mut self, files: HashSet<(u64, u64)>, these: BTreeSet<i32>) -> Opener {
        let running = self.scan.take_if(|scan| scan.files == files && scan.these == these);
        // Only the call that starts a scan waits for its result, so that the main loop goes on.
        let timeout = if running.is_some() { Duration::ZERO } else { OPENER_TIMEOUT };
        let scan = running.or_else(|| {
            let found = self.start(files.clone(), these.clone())?;
            Some(OpenerScan { files, these, found })
        });
        // Another scan is running.
        let Some(scan) = scan else { return Opener::Pending };
        match scan.found.recv_timeout(timeout) {
            Ok(found) => found,
            Err(_) => {
                self.scan = Some(scan);
                Opener::Pending
            }
        }
    }

    /// Starts a scan in a thread. Returns none if another scan is running or no thread can be
    /// started.
    fn start(&self, files: HashSet<(u64, u64)>, these: BTreeSet<i32>) -> Option<Receiver<Opener>> {
        // Only the main loop starts scans, so nothing happens between the check and the store.
        if self.is_busy.load(Ordering::Acquire) {
            return None;
        }
        self.is_busy.store(true, Ordering::Release);
        let (answer, receiver) = channel();
        let (is_busy, waker) = (Arc::clone(&self.is_busy), self.waker.clone());
        let run = move || {
            let found = find_opener(&files, &these, Instant::now() + SCAN_TIMEOUT);
            is_busy.store(false, Ordering::Release);
            let _not_wanted_any_more = answer.send(found);
            waker.wake();
        };
        let started = threads::spawn("scan", 256 << 10, run);
        if started.is_err() {
            self.is_busy.store(false, Ordering::Release);
            return None;
        }
        Some(receiver)
    }
}

/// A process other than `these` that has one of these files open.
fn find_opener(files: &HashSet<(u64, u64)>, these: &BTreeSet<i32>, deadline: Instant) -> Opener {
    for pid in all_pids().filter(|pid| !these.contains(pid)) {
        let folder = std::fs::read_dir(format!("/proc/{}/fd", procfs::live_thread(pid)));
        for descriptor in folder.into_iter().flatten().flatten() {
            // A shim may have it open for a process that it held, or was about to hold.
            if file_id(&descriptor.path()).is_some_and(|id| files.contains(&id)) && !is_shim(pid) {
                return Opener::Process(pid);
            }
            if Instant::now() > deadline {
                return Opener::Unknown;
            }
        }
    }
    Opener::None
}

/// The device and inode of the file behind a link in /proc/PID/fd, as far as the kernel knows them
/// without asking a server: another user's file may be on one that does not answer.
pub(super) fn file_id(link: &Path) -> Option<(u64, u64)> {
    let found = statx(rustix::fs::CWD, link, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some((rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino))
}

/// Whether a process is a shim: it runs the same program as this one.
pub(crate) fn is_shim(pid: i32) -> bool {
    let program = |pid: &str| {
        let meta = std::fs::metadata(format!("/proc/{pid}/exe")).ok()?;
        Some((meta.dev(), meta.ino()))
    };
    let own = program("self");
    own.is_some() && program(&pid.to_string()) == own
}

/// The pids of all processes.
pub(super) fn all_pids() -> impl Iterator<Item = i32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}
