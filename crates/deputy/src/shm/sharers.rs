//! Finds the processes that share memory with a process at home, by scanning /proc.

use super::openers::{all_pids, is_shim};
use std::collections::{BTreeSet, HashMap, HashSet};
use tern_control::{ReadError, Refusal, RefusalKind, read_process};
use tern_image::Unmovable;
use tern_image::layout::{self, writes_are_visible_to_others};
use tern_image::object::{self, ObjectId};
use tern_tracee::procfs::{self, Mapping};

/// The shared memory that each process maps, by pid.
pub(crate) type SharedMaps = HashMap<i32, HashSet<ObjectId>>;

/// The processes that share memory with a process at home, and the objects that they share.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Sharers {
    pub(crate) pids: BTreeSet<i32>,
    pub(crate) objects: HashSet<ObjectId>,
}

/// Returns the mappings of a process that its program has made.
type ProgramMaps<'a> = &'a dyn Fn(i32) -> tern_tracee::Result<Vec<Mapping>>;

/// The shared memory that a process may write.
///
/// # Errors
/// If the process is gone.
pub(crate) fn shared_by(pid: i32, program_maps: ProgramMaps<'_>) -> tern_tracee::Result<HashSet<ObjectId>> {
    // Most processes share nothing.
    if !procfs::maps(procfs::live_thread(pid))?.iter().any(|m| m.shared) {
        return Ok(HashSet::new());
    }
    Ok(writable(&program_maps(pid)?))
}

impl Sharers {
    /// Those of a process that may write these objects, among all processes.
    pub(crate) fn among(
        maps: &SharedMaps,
        pid: i32,
        objects: HashSet<ObjectId>,
        program_maps: ProgramMaps<'_>,
    ) -> Self {
        let mut found = Self { pids: [pid].into(), objects };
        loop {
            let shares = |(pid, maps): &(&i32, &HashSet<ObjectId>)| {
                !found.pids.contains(pid) && !maps.is_disjoint(&found.objects)
            };
            let new: Vec<i32> = maps.iter().filter(shares).map(|(pid, _)| *pid).collect();
            if new.is_empty() {
                return found;
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

/// The shared memory of all processes but shims, which map the mailboxes of their deputies. For a
/// thread.
///
/// # Errors
/// The pid of a process whose mappings could not be read in time.
pub(super) fn scan_shared_maps() -> Result<SharedMaps, i32> {
    let mut all = SharedMaps::new();
    for pid in all_pids() {
        // Kernel threads have no memory. A process in the middle of an execve has that of the new
        // program only, which shares nothing, and may wait for a file server in this state.
        let has_program = || procfs::status(procfs::live_thread(pid)).is_ok_and(|status| status.code_kib > 0);
        if !has_program() {
            continue;
        }
        match read_process(pid, move || shared_maps_of(pid)) {
            Ok(shared) => drop(all.insert(pid, shared)),
            Err(ReadError::Overdue) if has_program() => return Err(pid),
            Err(ReadError::Overdue | ReadError::Gone) => {}
        }
    }
    Ok(all)
}

/// The shared memory of a process. None if it has none, is gone or is a shim.
fn shared_maps_of(pid: i32) -> Option<HashSet<ObjectId>> {
    let maps = procfs::maps(procfs::live_thread(pid)).ok()?;
    let shared: HashSet<ObjectId> = maps.iter().filter(|m| m.shared).map(object::id).collect();
    (!shared.is_empty() && !is_shim(pid)).then_some(shared)
}

/// Why shared memory was not opened.
pub(crate) enum Unopened {
    /// The refusal, and whether it is transient.
    Refused((Refusal, bool)),
    /// It is not known yet which other processes map it or have it open.
    ScanPending,
}

impl From<(Refusal, bool)> for Unopened {
    fn from(refusal: (Refusal, bool)) -> Self {
        Self::Refused(refusal)
    }
}

impl Unopened {
    /// The refusal, and whether it is transient.
    pub(crate) fn into_refusal(self) -> (Refusal, bool) {
        match self {
            Self::Refused(refusal) => refusal,
            Self::ScanPending => {
                shared_refusal("home is still checking which other processes have its memory".into(), true)
            }
        }
    }
}

/// The refusal of processes that share memory with others, and whether it is transient.
pub(crate) fn shared_refusal(why: String, is_transient: bool) -> (Refusal, bool) {
    (Refusal::new(RefusalKind::CannotMove, Unmovable::SharedWith(why).to_string()), is_transient)
}

/// Why the memory of a process with these mappings cannot be moved, regardless of other sharers.
pub(crate) fn find_unmovable(maps: &[Mapping]) -> Option<Unmovable> {
    maps.iter().filter(|m| !m.is_kernel_mapping()).find_map(|m| layout::check(m).err())
}
