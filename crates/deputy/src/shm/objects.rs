//! Opens the memory that departing processes share, and keeps it open while processes away share
//! it.

use crate::process::Process;
use crate::process::state::State;
use crate::shim::Shim;
use crate::shm::sharers::{Sharers, Unopened};
use std::collections::{BTreeSet, HashMap};
use tern_control::{Refusal, RefusalKind};
use tern_ids::HomePid;
use tern_image::object::{self, ObjectId};
use tern_image::{Reserve, Unmovable, layout};
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::stop::Stopped;

/// Whether an object with this name, as the kernel reports it, has no name by which a process could
/// open it, and no descriptor: MAP_SHARED memory without a file, and System V segments.
pub(super) fn is_nameless(name: &[u8]) -> bool {
    name.starts_with(b"/dev/zero") || name.starts_with(b"/SYSV")
}

impl Shim {
    /// Opens the memory that these seized processes share, unless another process has it open too.
    pub(crate) fn open_objects(&mut self, sharers: &Sharers) -> Result<(), Unopened> {
        let closed = sharers.objects.iter().filter(|id| !self.shared_memory.contains(**id));
        let closed: Vec<ObjectId> = closed.copied().collect();
        let mapped = if closed.is_empty() { Vec::new() } else { self.writable_mappings(&sharers.pids) };
        for id in closed {
            self.open_object_of(&mapped, id)
                .map_err(|why| (Refusal::new(RefusalKind::CannotMove, why.to_string()), false))?;
        }
        self.shared_memory.check_openers(sharers)?;
        for pid in &sharers.pids {
            if let Some(process) = self.processes.get_mut(&HomePid(*pid)) {
                process.files.set_objects(&sharers.objects);
            }
        }
        Ok(())
    }

    /// The mappings that the program of a process at home has made. The mailboxes of a process that
    /// has come home with a pending call are left out.
    pub(crate) fn program_maps(&self, pid: i32) -> tern_tracee::Result<Vec<Mapping>> {
        let maps = procfs::smaps(procfs::live_thread(pid))?;
        Ok(match self.processes.get(&HomePid(pid)) {
            Some(process) => process.without_own_ranges(Reserve::exclude(process.reserve, &maps)),
            None => maps,
        })
    }

    /// The first writable mapping of each object that these processes map, for each process that
    /// this shim holds. The mappings of a process are read once, however many objects it maps.
    fn writable_mappings(&self, pids: &BTreeSet<i32>) -> Vec<(HomePid, HashMap<ObjectId, Mapping>)> {
        let held = pids.iter().map(|pid| HomePid(*pid)).filter(|pid| self.processes.contains_key(pid));
        let writable = |pid: HomePid| {
            let mut writable = HashMap::new();
            for m in self.program_maps(pid.0).unwrap_or_default() {
                // Only writable mappings count: on some file systems another file may have the same
                // device and inode.
                if layout::writes_are_visible_to_others(&m) {
                    writable.entry(object::id(&m)).or_insert(m);
                }
            }
            (pid, writable)
        };
        held.map(writable).collect()
    }

    /// Opens one object, if it is still shared.
    fn open_object_of(
        &mut self,
        mapped: &[(HomePid, HashMap<ObjectId, Mapping>)],
        id: ObjectId,
    ) -> Result<(), Unmovable> {
        for (pid, writable) in mapped {
            let (Some(process), Some(m)) = (self.processes.get(pid), writable.get(&id)) else { continue };
            match process.files.open_object(m) {
                Ok(file) => {
                    self.track_object(id, file).map_err(|error| Unmovable::SharedWith(error.to_string()))?;
                    if !is_nameless(&m.name) {
                        self.shared_memory.uncheck(id);
                    }
                    return Ok(());
                }
                // It was unmapped just now.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    let name = String::from_utf8_lossy(&m.name);
                    return Err(match error.kind() {
                        std::io::ErrorKind::ResourceBusy => Unmovable::Leased(name.into_owned()),
                        _ => Unmovable::SharedWith(format!(
                            "{name:?}, which it shares, cannot be opened: {error}"
                        )),
                    });
                }
            }
        }
        Ok(())
    }

    /// Keeps an object open, watched and guarded while processes away share it.
    pub(crate) fn track_object(&mut self, id: ObjectId, file: std::fs::File) -> std::io::Result<()> {
        let uid = self.processes.values().next().map_or(0, |process| process.uid);
        self.shared_memory.track(id, file, uid)
    }

    /// No process away maps these pieces of anonymous shared memory any more, and their content is
    /// gone. Unmaps them in this deputy too, and closes those that no other process shares.
    pub(crate) fn release_objects(&mut self, pid: HomePid, objects: &[ObjectId]) {
        let Some(process) = self.processes.get_mut(&pid).filter(|p| matches!(p.state, State::Away)) else {
            return;
        };
        process.files.objects.retain(|id| !objects.contains(id));
        process.files.forget_objects();
        // If no thread can be stopped now, the mappings stay until the process is home.
        let unmapped =
            self.with_any_thread(pid, None, |process, stopped| process.unmap_objects(stopped, objects));
        if let Err(error) = unmapped {
            self.handle_error(pid, &error);
        }
        self.close_unused_objects();
    }

    /// Closes the objects that no process of this shim shares any more.
    pub(crate) fn close_unused_objects(&mut self) {
        if self.shared_memory.is_empty() {
            return;
        }
        let processes = &self.processes;
        self.shared_memory.retain(|id| processes.values().any(|process| process.files.uses_object(*id)));
    }
}

impl Process {
    /// Unmaps these pieces of anonymous shared memory in a stopped deputy, and resumes the deputy.
    fn unmap_objects(&mut self, stopped: Stopped, objects: &[ObjectId]) -> tern_tracee::Result<()> {
        let maps = procfs::maps(self.memory.pid())?;
        let is_released =
            |m: &&Mapping| m.shared && m.name.starts_with(b"/dev/zero") && objects.contains(&object::id(m));
        let mut injection = self.injection(stopped)?.0;
        for m in maps.iter().filter(is_released) {
            injection.must(
                "unmap shared memory",
                libc::SYS_munmap,
                [m.start, m.end - m.start, 0, 0, 0, 0],
            )?;
            self.own_mappings.unmapped(m.start, m.end);
        }
        let stopped = injection.finish()?;
        self.resume_unnoticed(stopped)
    }
}
