//! Opens the memory that departing processes share, and keeps it open while it is shared away.

use crate::migrate::group::shared_refusal;
use crate::process::{Process, State};
use crate::shim::Shim;
use crate::shm::open_watch::OpenWatch;
use crate::shm::sharers::{Opener, Sharers, Unopened};
use rustix::fs::SealFlags;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use tern_ids::HomePid;
use tern_image::layout;
use tern_image::object::{self, ObjectId};
use tern_tracee::procfs::{self, Mapping};
use tern_tracee::stop::Stopped;

impl Shim {
    /// Opens the memory that these seized processes share, unless another process has it open too.
    pub(crate) fn open_objects(&mut self, sharers: &Sharers) -> Result<(), Unopened> {
        let closed = sharers.objects.iter().filter(|id| self.objects.get(**id).is_none());
        let closed: Vec<ObjectId> = closed.copied().collect();
        let mapped = if closed.is_empty() { Vec::new() } else { self.writable_mappings(&sharers.pids) };
        for id in closed {
            let inode = self.open_object_of(&mapped, id).map_err(|why| shared_refusal(why, false))?;
            self.unchecked_inodes.extend(inode);
        }
        let inodes = sharers.objects.iter().filter_map(|id| self.inodes.get(id));
        let unchecked: HashSet<_> =
            inodes.filter(|inode| self.unchecked_inodes.contains(inode)).copied().collect();
        let opening = self
            .open_blocker
            .as_mut()
            .and_then(|open_blocker| unchecked.iter().find_map(|inode| open_blocker.opening_thread(*inode)));
        if let Some(tid) = opening {
            return Err(shared_refusal(format!("thread {tid} opens what it shares"), true).into());
        }
        if !unchecked.is_empty() {
            match self.find_opener(unchecked.clone(), sharers.pids.clone()) {
                Opener::None => self.unchecked_inodes.retain(|inode| !unchecked.contains(inode)),
                Opener::Pending => return Err(Unopened::ScanPending),
                // A process that inherits or opens it may be about to map it.
                Opener::Process(other) => {
                    return Err(
                        shared_refusal(format!("process {other} has open what it shares"), true).into()
                    );
                }
                Opener::Unknown => {
                    let why = "it takes too long to learn which other processes have open what it shares";
                    return Err(shared_refusal(why.into(), true).into());
                }
            }
        }
        for pid in &sharers.pids {
            if let Some(process) = self.processes.get_mut(&HomePid(*pid)) {
                process.files.set_objects(&sharers.objects);
            }
        }
        Ok(())
    }

    /// The first writable mapping of each object that these processes map, for each process that
    /// this shim holds. The mappings of a process are read once, however many objects it maps.
    fn writable_mappings(&self, pids: &BTreeSet<i32>) -> Vec<(HomePid, HashMap<ObjectId, Mapping>)> {
        let held = pids.iter().map(|pid| HomePid(*pid)).filter(|pid| self.processes.contains_key(pid));
        let writable = |pid: HomePid| {
            let mut writable = HashMap::new();
            for m in self.program_maps(pid.0).unwrap_or_default() {
                // Only a writable mapping: on some file systems another file has the same device
                // and inode.
                if layout::writes_are_visible_to_others(&m) {
                    writable.entry(object::id(&m)).or_insert(m);
                }
            }
            (pid, writable)
        };
        held.map(writable).collect()
    }

    /// Opens one object, if it is still shared. Returns its inode if other processes could open it.
    fn open_object_of(
        &mut self,
        mapped: &[(HomePid, HashMap<ObjectId, Mapping>)],
        id: ObjectId,
    ) -> Result<Option<(u64, u64)>, String> {
        for (pid, writable) in mapped {
            let (Some(process), Some(m)) = (self.processes.get(pid), writable.get(&id)) else { continue };
            match process.files.open_object(m) {
                Ok(file) => {
                    self.track_object(id, file).map_err(|error| error.to_string())?;
                    let nameless = m.name.starts_with(b"/dev/zero") || m.name.starts_with(b"/SYSV");
                    return Ok(self.inodes.get(&id).copied().filter(|_| !nameless));
                }
                // It was unmapped just now.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    let name = String::from_utf8_lossy(&m.name);
                    return Err(format!("{name:?}, which it shares, cannot be opened: {error}"));
                }
            }
        }
        Ok(None)
    }

    /// Keeps an object open, watched and guarded while it is shared away.
    pub(crate) fn track_object(&mut self, id: ObjectId, file: std::fs::File) -> std::io::Result<()> {
        let meta = file.metadata()?;
        // A sealed object could not be written when the process comes home.
        const SEALED: SealFlags = SealFlags::WRITE.union(SealFlags::FUTURE_WRITE);
        if rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.intersects(SEALED)) {
            return Err(std::io::Error::other("it is sealed against writing"));
        }
        if meta.nlink() > 0 {
            let owner = self.processes.values().next().map_or(0, |process| process.uid);
            let watch = match &mut self.open_watch {
                Some(watch) => watch,
                none => none.insert(OpenWatch::new(owner)?),
            };
            watch.add(id, &file)?;
            self.guard_object(id, &file);
        }
        self.inodes.insert(id, (meta.dev(), meta.ino()));
        self.objects.add(id, file);
        Ok(())
    }

    /// No process away maps these pieces of anonymous shared memory any more, and their content is
    /// gone. Unmaps them in this deputy too, and closes those that no other process has.
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
        if self.inodes.is_empty() {
            return;
        }
        let processes = &self.processes;
        let in_use = |id: &ObjectId| processes.values().any(|process| process.files.objects.contains(id));
        self.objects.retain(in_use);
        self.inodes.retain(|id, _| in_use(id));
        let inodes: HashSet<(u64, u64)> = self.inodes.values().copied().collect();
        self.unchecked_inodes.retain(|inode| inodes.contains(inode));
        if let Some(watch) = &mut self.open_watch {
            watch.retain(in_use);
        }
        if let Some(open_blocker) = &mut self.open_blocker {
            open_blocker.retain(in_use);
        }
    }
}

impl Process {
    /// Has a stopped deputy unmap these pieces of anonymous shared memory, and resumes it.
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
            self.placeholders.retain(|(start, end)| *start < m.start || m.end < *end);
        }
        let stopped = injection.finish()?;
        self.resume_unnoticed(stopped)
    }
}
