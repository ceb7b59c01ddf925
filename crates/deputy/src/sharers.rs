//! Who shares memory with a process at home, as all of /proc shows it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use tern_image::Unmovable;
use tern_image::layout::{self, is_shared_memory};
use tern_image::object::{self, ObjectId};
use tern_tracee::procfs;

/// What processes map that is shared, by process.
pub(crate) type Maps = HashMap<i32, HashSet<ObjectId>>;

/// Who shares memory with a process at home, and what.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Sharers {
    pub(crate) processes: BTreeSet<i32>,
    pub(crate) objects: HashSet<ObjectId>,
}

impl Sharers {
    /// Looks for them among all processes.
    pub(crate) fn of(pid: i32) -> tern_tracee::Result<Self> {
        let mut found = Self { processes: [pid].into(), objects: HashSet::new() };
        // Most share nothing.
        if !procfs::maps(procfs::living(pid))?.iter().any(|m| m.shared) {
            return Ok(found);
        }
        found.objects.extend(writable(pid)?);
        if found.objects.is_empty() {
            return Ok(found);
        }
        let maps = shared_maps();
        loop {
            let shares = |(pid, maps): &(&i32, &HashSet<ObjectId>)| {
                !found.processes.contains(pid) && !maps.is_disjoint(&found.objects)
            };
            let new: Vec<i32> = maps.iter().filter(shares).map(|(pid, _)| *pid).collect();
            if new.is_empty() {
                return Ok(found);
            }
            for pid in new {
                found.processes.insert(pid);
                // One that is gone by now shares nothing.
                found.objects.extend(writable(pid).unwrap_or_default());
            }
        }
    }
}

/// The memory that a process shares and may write.
fn writable(pid: i32) -> tern_tracee::Result<HashSet<ObjectId>> {
    let maps = procfs::smaps(procfs::living(pid))?;
    Ok(maps.iter().filter(|m| is_shared_memory(m) && !m.is_anonymous()).map(object::id).collect())
}

/// The numbers of all processes.
fn processes() -> impl Iterator<Item = i32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

pub(crate) fn shared_maps() -> Maps {
    let of = |pid: i32| {
        let maps = procfs::maps(procfs::living(pid)).ok()?;
        let shared: HashSet<ObjectId> = maps.iter().filter(|m| m.shared).map(object::id).collect();
        (!shared.is_empty()).then_some((pid, shared))
    };
    processes().filter_map(of).collect()
}

/// A process besides `these` that has one of these files open.
pub(crate) fn who_opens(files: &HashSet<(u64, u64)>, these: &BTreeSet<i32>) -> Option<i32> {
    let opens = |pid: i32| {
        let all =
            std::fs::read_dir(format!("/proc/{}/fd", procfs::living(pid))).into_iter().flatten().flatten();
        all.filter_map(|entry| std::fs::metadata(entry.path()).ok())
            .any(|meta| files.contains(&(meta.dev(), meta.ino())))
    };
    // Another shim has it open which had a process of these before, or was to have one.
    processes().filter(|pid| !these.contains(pid)).find(|pid| opens(*pid) && !is_shim(*pid))
}

/// Whether a process is a shim, as we are.
pub(crate) fn is_shim(pid: i32) -> bool {
    let program = |pid: &str| {
        let meta = std::fs::metadata(format!("/proc/{pid}/exe")).ok()?;
        Some((meta.dev(), meta.ino()))
    };
    let own = program("self");
    own.is_some() && program(&pid.to_string()) == own
}

/// Why the memory of a process cannot be moved, whoever shares it.
pub(crate) fn obstacle(pid: i32) -> Option<Unmovable> {
    let maps = procfs::smaps(procfs::living(pid)).unwrap_or_default();
    maps.iter().filter(|m| !m.is_kernels()).find_map(|m| layout::check(m).err())
}
