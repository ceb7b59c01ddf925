//! Finds the processes that share memory with a process at home, by scanning /proc.

use crate::shim::Shim;
use rustix::fs::{AtFlags, StatxFlags, statx};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};
use tern_control::Refusal;
use tern_ids::HomePid;
use tern_image::layout::{self, writes_are_visible_to_others};
use tern_image::object::{self, ObjectId};
use tern_image::{Reserve, Unmovable};
use tern_tracee::procfs::{self, Mapping};

/// The shared memory that each process maps, by pid.
pub(crate) type SharedMaps = HashMap<i32, HashSet<ObjectId>>;

/// The processes that share memory with a process at home, and the objects that they share.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Sharers {
    pub(crate) pids: BTreeSet<i32>,
    pub(crate) objects: HashSet<ObjectId>,
}

impl Sharers {
    /// Scans all processes. `program_maps` returns the mappings of a process that its program has made.
    pub(crate) fn of(
        pid: i32,
        program_maps: &dyn Fn(i32) -> tern_tracee::Result<Vec<Mapping>>,
    ) -> tern_tracee::Result<Self> {
        let mut found = Self { pids: [pid].into(), objects: HashSet::new() };
        // Most processes share nothing.
        if !procfs::maps(procfs::live_thread(pid))?.iter().any(|m| m.shared) {
            return Ok(found);
        }
        found.objects.extend(writable(&program_maps(pid)?));
        if found.objects.is_empty() {
            return Ok(found);
        }
        let maps = shared_maps();
        loop {
            let shares = |(pid, maps): &(&i32, &HashSet<ObjectId>)| {
                !found.pids.contains(pid) && !maps.is_disjoint(&found.objects)
            };
            let new: Vec<i32> = maps.iter().filter(shares).map(|(pid, _)| *pid).collect();
            if new.is_empty() {
                return Ok(found);
            }
            for pid in new {
                found.pids.insert(pid);
                // A process that is gone by now shares nothing.
                found.objects.extend(writable(&program_maps(pid).unwrap_or_default()));
            }
        }
    }
}

/// The shared memory that a process with these mappings may write.
fn writable(maps: &[Mapping]) -> HashSet<ObjectId> {
    maps.iter().filter(|m| writes_are_visible_to_others(m) && !m.is_anonymous()).map(object::id).collect()
}

/// The pids of all processes.
fn all_pids() -> impl Iterator<Item = i32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

pub(crate) fn shared_maps() -> SharedMaps {
    let of = |pid: i32| {
        let maps = procfs::maps(procfs::live_thread(pid)).ok()?;
        let shared: HashSet<ObjectId> = maps.iter().filter(|m| m.shared).map(object::id).collect();
        (!shared.is_empty()).then_some((pid, shared))
    };
    all_pids().filter_map(of).collect()
}

/// Why shared memory was not opened.
pub(crate) enum Unopened {
    /// The refusal, and whether it is transient.
    Refused((Refusal, bool)),
    /// It is not known yet whether another process has it open.
    ScanPending,
}

impl From<(Refusal, bool)> for Unopened {
    fn from(refusal: (Refusal, bool)) -> Self {
        Self::Refused(refusal)
    }
}

/// The result of a scan for processes that have a file open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Opener {
    /// No other process has it open.
    None,
    /// This one has.
    Process(i32),
    /// The scan has not ended. The caller may ask again; the main loop is woken at its end.
    Pending,
    /// The scan has taken too long. The caller must decide as if a process had it open.
    Unknown,
}

/// A scan in progress: the files, the processes that are left out, and the result.
#[derive(Debug)]
pub(crate) struct OpenerScan {
    files: HashSet<(u64, u64)>,
    these: BTreeSet<i32>,
    found: Receiver<Opener>,
}

/// How long the main loop waits for a scan before it goes on without its result. A scan of 10,000
/// descriptors takes 20 ms.
const OPENER_TIMEOUT: Duration = Duration::from_millis(30);

impl Shim {
    /// The mappings that the program of a process at home has made. The mailboxes of a process that
    /// has come home with a pending call are left out.
    pub(crate) fn program_maps(&self, pid: i32) -> tern_tracee::Result<Vec<Mapping>> {
        let maps = procfs::smaps(procfs::live_thread(pid))?;
        Ok(match self.processes.get(&HomePid(pid)) {
            Some(process) => process.without_own_ranges(Reserve::exclude(process.reserve, &maps)),
            None => maps,
        })
    }

    /// A process other than `these` that has one of these files open.
    pub(crate) fn find_opener(&mut self, files: HashSet<(u64, u64)>, these: BTreeSet<i32>) -> Opener {
        let running = self.opener_scan.take_if(|scan| scan.files == files && scan.these == these);
        // Only the call that starts a scan waits for its result, so that the main loop goes on.
        let timeout = if running.is_some() { Duration::ZERO } else { OPENER_TIMEOUT };
        let scan = running.or_else(|| {
            let (wanted, left_out) = (files.clone(), these.clone());
            let found =
                self.descriptor_scanner.start(move |deadline| find_opener(&wanted, &left_out, deadline))?;
            Some(OpenerScan { files, these, found })
        });
        // Another scan is running.
        let Some(scan) = scan else { return Opener::Pending };
        match scan.found.recv_timeout(timeout) {
            Ok(found) => found,
            Err(_) => {
                self.opener_scan = Some(scan);
                Opener::Pending
            }
        }
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

/// Why the memory of a process with these mappings cannot be moved, regardless of other sharers.
pub(crate) fn find_unmovable(maps: &[Mapping]) -> Option<Unmovable> {
    maps.iter().filter(|m| !m.is_kernel_mapping()).find_map(|m| layout::check(m).err())
}
