//! Finds the processes that share memory with a process at home, by scanning /proc.

use super::openers::{all_pids, is_shim};
use std::collections::{BTreeSet, HashMap, HashSet};
use tern_control::{Refusal, RefusalKind};
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

/// The shared memory of all processes but shims, which map the mailboxes of their deputies.
pub(crate) fn shared_maps() -> SharedMaps {
    let of = |pid: i32| {
        let maps = procfs::maps(procfs::live_thread(pid)).ok()?;
        let shared: HashSet<ObjectId> = maps.iter().filter(|m| m.shared).map(object::id).collect();
        (!shared.is_empty() && !is_shim(pid)).then_some((pid, shared))
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

/// The refusal of processes that share memory with others, and whether it is transient.
pub(crate) fn shared_refusal(why: String, is_transient: bool) -> (Refusal, bool) {
    (Refusal::new(RefusalKind::CannotMove, Unmovable::SharedWith(why).to_string()), is_transient)
}

/// Why the memory of a process with these mappings cannot be moved, regardless of other sharers.
pub(crate) fn find_unmovable(maps: &[Mapping]) -> Option<Unmovable> {
    maps.iter().filter(|m| !m.is_kernel_mapping()).find_map(|m| layout::check(m).err())
}
