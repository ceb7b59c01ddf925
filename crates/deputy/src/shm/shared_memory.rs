//! The memory that processes away share: it is kept open, and opens of it by others are watched and
//! blocked.

use super::mapped_away::{Pieces, read_unshared};
use super::open_blocker::OpenBlocker;
use super::open_watch::OpenWatch;
use super::openers::{Opener, find_opener};
use super::scan::ScanThread;
use super::sharers::{SharedMaps, Sharers, Unopened, scan_shared_maps, shared_refusal};
use crate::waker::Waker;
use rustix::fs::SealFlags;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Instant;
use tern_ids::{HomePid, MigrationId};
use tern_image::object::{ObjectId, SharedObjects};

/// The objects that processes away share.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    /// The objects, opened.
    objects: SharedObjects,
    /// The device and inode of each.
    inodes: HashMap<ObjectId, (u64, u64)>,
    /// Those of `inodes` that other processes may have open, as far as no scan has shown otherwise.
    unchecked_inodes: HashSet<(u64, u64)>,
    /// Reports opens by name, once there is an object with a name.
    open_watch: Option<OpenWatch>,
    /// Blocks opens for writing, if possible.
    open_blocker: Option<OpenBlocker>,
    opener_scans: ScanThread<OpenerQuestion, Opener>,
    map_scans: ScanThread<MapQuestion, Result<SharedMaps, i32>>,
    /// Opens of files that processes away have mapped.
    file_opens: ScanThread<(ObjectId, Instant), io::Result<File>>,
    /// Reads of such files.
    file_reads: ScanThread<(ObjectId, Instant), Result<Pieces, String>>,
    waker: Waker,
}

/// The files that a scan looks for, the processes that it leaves out, and the number of reports that
/// came before it: a process that is reported later is not found.
type OpenerQuestion = (HashSet<(u64, u64)>, BTreeSet<i32>, u64);

/// Why the shared memory of all processes is examined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MapQuestion {
    /// This process is to leave with those that share its memory.
    Group(HomePid),
    /// The processes of a migration are stopped.
    Stopped(MigrationId),
    /// A process has opened this object.
    Opened(ObjectId),
}

impl SharedMemory {
    pub(crate) fn new(waker: Waker) -> Self {
        Self {
            objects: SharedObjects::default(),
            inodes: HashMap::new(),
            unchecked_inodes: HashSet::new(),
            open_watch: None,
            open_blocker: None,
            opener_scans: ScanThread::new(waker.clone()),
            map_scans: ScanThread::new(waker.clone()),
            file_opens: ScanThread::new(waker.clone()),
            file_reads: ScanThread::new(waker.clone()),
            waker,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.inodes.is_empty()
    }

    pub(crate) fn contains(&self, id: ObjectId) -> bool {
        self.objects.get(id).is_some()
    }

    /// The objects, to read and write their content.
    pub(crate) fn objects(&self) -> &SharedObjects {
        &self.objects
    }

    /// The device and inode of an object.
    pub(super) fn inode_of(&self, id: ObjectId) -> Option<(u64, u64)> {
        self.inodes.get(&id).copied()
    }

    /// The object with this device and inode.
    pub(crate) fn object_at(&self, inode: (u64, u64)) -> Option<ObjectId> {
        self.inodes.iter().find(|(_, known)| **known == inode).map(|(id, _)| *id)
    }

    /// Keeps an object open, watched and guarded while processes away share it. `uid` is the user
    /// of these processes.
    pub(super) fn track(&mut self, id: ObjectId, file: File, uid: u32) -> io::Result<()> {
        let meta = file.metadata()?;
        // A sealed object could not be written when the process comes home.
        const SEALED: SealFlags = SealFlags::WRITE.union(SealFlags::FUTURE_WRITE);
        if rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.intersects(SEALED)) {
            return Err(io::Error::other("it is sealed against writing"));
        }
        if meta.nlink() > 0 {
            let watch = match &mut self.open_watch {
                Some(watch) => watch,
                none => none.insert(OpenWatch::new(uid)?),
            };
            watch.add(id, &file)?;
            self.block_opens(id, &file);
        }
        self.inodes.insert(id, (meta.dev(), meta.ino()));
        self.objects.add(id, file);
        Ok(())
    }

    /// Blocks opens of an object, if possible.
    fn block_opens(&mut self, id: ObjectId, file: &File) {
        if self.open_blocker.is_none() {
            match OpenBlocker::new(self.waker.clone()) {
                Ok(open_blocker) => self.open_blocker = Some(open_blocker),
                Err(error) => return tracing::info!(%error, "opens of shared memory cannot be blocked"),
            }
        }
        if let Some(Err(error)) = self.open_blocker.as_mut().map(|open_blocker| open_blocker.add(id, file)) {
            tracing::info!(%error, "opens of this shared file cannot be blocked");
        }
    }

    /// Closes the objects that are not in use any more.
    pub(super) fn retain(&mut self, in_use: impl Fn(&ObjectId) -> bool) {
        self.objects.retain(&in_use);
        self.inodes.retain(|id, _| in_use(id));
        let inodes: HashSet<(u64, u64)> = self.inodes.values().copied().collect();
        self.unchecked_inodes.retain(|inode| inodes.contains(inode));
        if let Some(watch) = &mut self.open_watch {
            watch.retain(&in_use);
        }
        if let Some(open_blocker) = &mut self.open_blocker {
            open_blocker.retain(&in_use);
        }
    }

    /// Marks an object that other processes may have open, until a scan shows otherwise.
    pub(super) fn uncheck(&mut self, id: ObjectId) {
        self.unchecked_inodes.extend(self.inodes.get(&id));
    }

    /// As [`uncheck`](Self::uncheck), for all objects that were opened by name just now.
    pub(crate) fn uncheck_opened(&mut self) {
        if let Some(watch) = &mut self.open_watch {
            let opened = watch.opened().iter().filter_map(|id| self.inodes.get(id));
            self.unchecked_inodes.extend(opened);
        }
    }

    /// Checks that only these processes have open the memory that they share, and that no other
    /// process is opening it.
    ///
    /// # Errors
    /// If another process has the memory open or is opening it, or may have, or if that is not
    /// known yet.
    pub(super) fn check_openers(&mut self, sharers: &Sharers) -> Result<(), Unopened> {
        let inodes = sharers.objects.iter().filter_map(|id| self.inodes.get(id));
        let unchecked: HashSet<_> =
            inodes.filter(|inode| self.unchecked_inodes.contains(inode)).copied().collect();
        let opening = self
            .open_blocker
            .as_mut()
            .and_then(|open_blocker| unchecked.iter().find_map(|inode| open_blocker.opening_thread(*inode)));
        if let Some(tid) = opening {
            return Err(shared_refusal(format!("thread {tid} is opening its shared memory"), true).into());
        }
        if unchecked.is_empty() {
            return Ok(());
        }
        match self.find_opener(unchecked.clone(), sharers.pids.clone()) {
            Opener::None => {
                self.unchecked_inodes.retain(|inode| !unchecked.contains(inode));
                Ok(())
            }
            Opener::Pending => Err(Unopened::ScanPending),
            // A process that inherits or opens it may be about to map it.
            Opener::Process(other) => {
                Err(shared_refusal(format!("process {other} has its shared memory open"), true).into())
            }
            Opener::Unknown => {
                let why = "the check which other processes have its shared memory open takes too long";
                Err(shared_refusal(why.into(), true).into())
            }
        }
    }

    /// A process other than `these` that has one of these files open.
    pub(super) fn find_opener(&mut self, files: HashSet<(u64, u64)>, these: BTreeSet<i32>) -> Opener {
        let reports = self.open_watch.as_mut().map_or(0, OpenWatch::reports);
        let question = (files.clone(), these.clone(), reports);
        let found = self.opener_scans.result(question, move || find_opener(files, &these));
        found.unwrap_or(Opener::Pending)
    }

    /// The shared memory of all processes, as of a time after the question was first asked.
    ///
    /// # Errors
    /// If the scan has not ended, or if a process cannot be examined.
    pub(crate) fn shared_maps(&mut self, question: MapQuestion) -> Result<SharedMaps, Unopened> {
        match self.map_scans.result(question, scan_shared_maps) {
            Some(Ok(maps)) => Ok(maps),
            Some(Err(pid)) => {
                let why = format!("the memory of process {pid} cannot be examined in time");
                Err(shared_refusal(why, true).into())
            }
            None => Err(Unopened::ScanPending),
        }
    }

    /// Opens the file of an object in a worker. None if it has not ended.
    pub(super) fn open_in_worker(
        &mut self,
        attempt: (ObjectId, Instant),
        open: impl FnOnce() -> io::Result<File> + Send + 'static,
    ) -> Option<io::Result<File>> {
        self.file_opens.poll(attempt, open)
    }

    /// The content of an object that only this process maps and has open, read by a worker. None if it
    /// has not ended.
    ///
    /// # Errors
    /// If another process has it, or may have it; if the content is too large, or cannot be read.
    pub(super) fn read_unshared(
        &mut self,
        id: ObjectId,
        pid: HomePid,
        since: Instant,
    ) -> Option<Result<Pieces, String>> {
        let (Some(file), Some(inode)) = (self.objects.get(id), self.inode_of(id)) else {
            return Some(Err("it is not open".into()));
        };
        let file = Arc::clone(file);
        self.file_reads.poll((id, since), move || read_unshared(id, &file, inode, pid))
    }

    /// Readable when an object was opened by name.
    pub(crate) fn watch_fd(&self) -> Option<BorrowedFd<'_>> {
        self.open_watch.as_ref().map(OpenWatch::fd)
    }

    /// The objects that were opened by name, and not checked since.
    pub(super) fn opened(&mut self) -> HashSet<ObjectId> {
        // Read also if nothing is watched any more: the kernel reports the end of each watch, and the
        // main loop would not sleep before that is read.
        self.open_watch.as_mut().map(|watch| watch.opened().clone()).unwrap_or_default()
    }

    /// The opens of this object were checked.
    pub(super) fn opens_checked(&mut self, id: ObjectId) {
        if let Some(watch) = &mut self.open_watch {
            watch.opens_checked(id);
        }
    }

    /// The blocked opens: device and inode of the file, and the thread that opens it.
    pub(super) fn blocked_opens(&self) -> Vec<((u64, u64), HomePid)> {
        self.open_blocker.as_ref().map(OpenBlocker::blocked).unwrap_or_default()
    }

    /// Lets the blocked opens of a file by a thread pass. `is_own` says whether the thread belongs
    /// to the group that shares the file.
    pub(super) fn pass_open(&mut self, inode: (u64, u64), tid: HomePid, is_own: bool) {
        match &mut self.open_blocker {
            Some(open_blocker) if is_own => open_blocker.pass(inode, tid),
            Some(open_blocker) => open_blocker.pass_outsider(inode, tid),
            None => {}
        }
    }
}
