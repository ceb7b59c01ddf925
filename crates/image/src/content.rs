//! Mapped files identified by a hash of their content at home, and the guest node's
//! [`cache`](ContentCache) of them.
//!
//! A mapped file is sent as its BLAKE3 hash. A node requests the content only if it has no file
//! with that hash. The cache holds files that every user at home may read, since knowing a hash
//! must not grant the right to read. All other files are kept in memory for one family, as long as
//! a guest of it maps them. Files written within the last seconds are kept in memory too, since a
//! time stamp would not show a later change.
//!
//! A file stored on the guest's own node, which home sees through MFS, is not read at all: the node
//! opens it, and the guest maps it directly. A large file of home is not read either if the guest's
//! node can mount home's files for its guests ([`MountableFiles`]). In both cases the hash covers a
//! stamp that changes with the content, not the content. If the content has to be sent
//! nevertheless, the receiver cannot verify it against this hash, and keeps it for the family only.

mod cache;
mod identify;
mod leases;
mod opening;
mod reader;

pub use cache::{ContentCache, KeptContent, OpenFileConnection, OpenedFile};
pub use opening::by_file;
pub use reader::{ContentReader, OpenContent};

use crate::layout::{FileIdentifier, FileRef, writes_are_visible_to_others};
use crate::object::{self, ObjectId};
use crate::unmovable::Unmovable;
use identify::{IdentifiedFile, Identifier, current_stamp};
use leases::Leases;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};
use tern_ids::NodeId;
use tern_tracee::procfs::{self, Mapping};

/// A file changed within this many seconds is not cached by hash.
const SETTLED_SECONDS: i64 = 2;

/// Files up to this size, in bytes, that may still be written are copied before they are sent.
const MAX_COPY_BYTES: u64 = 64 << 20;

/// Minimum size, in bytes, of a file that is mapped directly on the node that stores it. Smaller
/// files are sent as fast.
const MIN_DIRECT_BYTES: u64 = 64 << 10;

/// Minimum size, in bytes, of a file of home that a guest maps through MFS. Smaller files are sent
/// as fast, and cached by hash for all guests.
const MIN_REMOTE_MAP_BYTES: u64 = 16 << 20;

/// Whether a guest's node can mount files of home for the guest, and which node home is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MountableFiles {
    /// The node cannot, or home does not allow it.
    #[default]
    Nothing,
    /// The guest's node can mount files of home, which has this number.
    Of(NodeId),
}

/// How long a worker may take to identify files before they count as unreadable. It reads each of
/// them once, at the speed of its disk.
const IDENTIFY_TIMEOUT: Duration = Duration::from_secs(120);
/// [`IDENTIFY_TIMEOUT`] for the files of a process that is stopped meanwhile.
const STOPPED_IDENTIFY_TIMEOUT: Duration = Duration::from_secs(10);

/// A file, by device and inode.
type FileKey = (u64, u64);

/// The mapped files of a process at its home.
///
/// To identify a file is to open and read it, which its file system may delay. So a worker does
/// that ([`FilesToIdentify`]). [`identify`](FileIdentifier::identify) returns a file that has been
/// identified, and notes a file that has not.
#[derive(Debug, Default)]
pub struct HomeFiles {
    identifier: Identifier,
    identified: HashMap<FileKey, IdentifiedFile>,
    /// The mappings for which no file is sent: those of /dev/zero, and those that cannot be moved.
    others: HashMap<FileKey, Result<(), Unmovable>>,
    /// The mappings whose files were requested and have not been identified, and whether each is of
    /// shared memory.
    unidentified: Vec<(Mapping, bool)>,
    job: Option<Job>,
    /// Incremented whenever the results of a running worker become invalid.
    generation: u64,
    /// Shared memory objects that move together with the processes that share them.
    pub objects: HashSet<ObjectId>,
    /// Objects that the process has mapped. Its guest does not have their content yet, and a child does
    /// not inherit them.
    pub new_objects: HashSet<ObjectId>,
}

/// The work of a worker.
#[derive(Debug)]
struct Job {
    results: Receiver<(FileKey, Identified)>,
    /// The files that the worker has not identified yet, and their names.
    pending: HashMap<FileKey, Vec<u8>>,
    generation: u64,
    /// Whether the process was stopped when it began.
    while_stopped: bool,
    begun: Instant,
}

type Identified = Result<Option<IdentifiedFile>, Unmovable>;

/// Files that a worker is to identify.
#[derive(Debug)]
pub struct FilesToIdentify {
    identifier: Identifier,
    mappings: Vec<(Mapping, bool)>,
    results: Sender<(FileKey, Identified)>,
}

impl FilesToIdentify {
    /// Identifies them. For a worker.
    pub fn identify(self) {
        let (identifier, leases) = (&self.identifier, Leases::now());
        let identify = |(m, is_object): &(Mapping, bool)| identifier.identify(m, *is_object, &leases);
        let found: Vec<Identified> = self.mappings.iter().map(identify).collect();
        // A running process may have mapped another file at the same addresses before this one was
        // opened.
        let now = procfs::maps(self.identifier.pid).unwrap_or_default();
        for ((mapping, _), found) in self.mappings.iter().zip(found) {
            let key = (mapping.device, mapping.inode);
            let at = now.partition_point(|m| m.end <= mapping.start);
            let is_same = now.get(at).is_some_and(|m| m.start <= mapping.start && (m.device, m.inode) == key);
            let found = if is_same { found } else { Err(unreadable(&mapping.name)) };
            let _not_awaited_any_more = self.results.send((key, found));
        }
    }
}

/// How far a worker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// It has nothing to do.
    Idle,
    /// It is identifying files.
    Running,
    /// It has just finished.
    Done {
        /// Whether the process was stopped when it began.
        while_stopped: bool,
    },
}

impl HomeFiles {
    /// For the process `pid` at home. Computed hashes are cached below `cache_dir`.
    #[must_use]
    pub fn new(pid: i32, cache_dir: &Path) -> Self {
        Self { identifier: Identifier::new(pid, cache_dir), ..Self::default() }
    }

    /// Sets the node where its guest is or is going, and which files that node can mount for it.
    pub fn set_guest(&mut self, node: NodeId, showable: MountableFiles) {
        let Identifier { guest, showable: known, .. } = &mut self.identifier;
        let before = (guest.replace(node), std::mem::replace(known, showable));
        if before != (Some(node), showable) {
            self.generation += 1;
            self.identified.retain(|_, identified| identified.file.location.is_none());
        }
    }

    /// For a child, which shares its parent's objects and is on the same node.
    #[must_use]
    pub fn for_child(&self, pid: i32) -> Self {
        let mut child = Self::new(pid, &self.identifier.cache_dir);
        child.identifier.guest = self.identifier.guest;
        child.identifier.showable = self.identifier.showable;
        child.objects.clone_from(&self.objects);
        child
    }

    /// Reads the process's /proc entries through this thread from now on.
    pub fn set_proc_thread(&mut self, thread: i32) {
        self.identifier.pid = thread;
        self.generation += 1;
    }

    /// Takes over what a worker has found out.
    pub fn collect_identified(&mut self) -> Progress {
        let Some(mut job) = self.job.take() else { return Progress::Idle };
        let done = Progress::Done { while_stopped: job.while_stopped };
        let is_current = job.generation == self.generation;
        loop {
            match job.results.try_recv() {
                Ok((key, found)) => {
                    job.pending.remove(&key);
                    if is_current {
                        self.record(key, found);
                    }
                }
                // The worker is blocked. It is left running, and its later results are ignored.
                Err(TryRecvError::Empty) if job.is_late() => {
                    for (key, name) in job.pending {
                        self.record(key, Err(unreadable(&name)));
                    }
                    return done;
                }
                Err(TryRecvError::Empty) => {
                    self.job = Some(job);
                    return Progress::Running;
                }
                Err(TryRecvError::Disconnected) => return done,
            }
        }
    }

    fn record(&mut self, key: FileKey, found: Identified) {
        match found {
            Ok(Some(identified)) => drop(self.identified.insert(key, identified)),
            Ok(None) => drop(self.others.insert(key, Ok(()))),
            Err(why) => drop(self.others.insert(key, Err(why))),
        }
    }

    /// The files that were requested since the last call and have not been identified, for a
    /// worker. `None` if there are none. `while_stopped` is whether the process is stopped.
    pub fn take_unidentified(&mut self, while_stopped: bool) -> Option<FilesToIdentify> {
        let mappings = std::mem::take(&mut self.unidentified);
        if mappings.is_empty() {
            return None;
        }
        let (sender, results) = channel();
        let (generation, begun) = (self.generation, Instant::now());
        let pending = mappings.iter().map(|(m, _)| ((m.device, m.inode), m.name.clone())).collect();
        self.job = Some(Job { results, pending, generation, while_stopped, begun });
        Some(FilesToIdentify { identifier: self.identifier.clone(), mappings, results: sender })
    }

    fn known(&self, m: &Mapping) -> Option<&IdentifiedFile> {
        let is_object = self.moves_with_sharers(m);
        let identified = self.identified.get(&(m.device, m.inode));
        identified.filter(|identified| identified.file.is_object || !is_object)
    }

    /// Whether the process shares this object, or is about to share it.
    #[must_use]
    pub fn uses_object(&self, id: ObjectId) -> bool {
        self.objects.contains(&id) || self.new_objects.contains(&id)
    }

    /// Opens the object behind a mapping of shared memory.
    ///
    /// # Errors
    /// If it cannot be opened: without CAP_CHECKPOINT_RESTORE it can be opened only by name.
    /// `ResourceBusy` if the open would break a lease.
    pub fn open_object(&self, m: &Mapping) -> io::Result<File> {
        self.identifier.open_object(m, &Leases::now())
    }

    /// The same, for another thread.
    pub fn object_opener(&self, m: &Mapping) -> impl FnOnce() -> io::Result<File> + Send + use<> {
        let (identifier, mapping) = (self.identifier.clone(), m.clone());
        move || identifier.open_object(&mapping, &Leases::now())
    }

    /// Drops the record that a file cannot be read: the process may just have unmapped the file
    /// when a worker tried to open it.
    pub fn forget_unreadable(&mut self, m: &Mapping) {
        let key = (m.device, m.inode);
        self.others.retain(|other, found| *other != key || found.is_ok());
    }

    /// Drops the record of a file that the process has just mapped, if the file may have changed or
    /// could not be read.
    pub fn file_mapped(&mut self, m: &Mapping) {
        let key = (m.device, m.inode);
        self.forget_unreadable(m);
        if self.moves_with_sharers(m) {
            return;
        }
        let path = self.identifier.map_file((m.start, m.end));
        if self.identified.get(&key).is_some_and(|identified| identified.has_changed(&path)) {
            self.identified.remove(&key);
        }
    }

    /// Drops the records of files that may have changed since their content was read, and of files
    /// that could not be read, which may have just been unmapped. The process is stopped now; while
    /// it ran, it may have written to a file that it maps. The pages of a mapping that the process
    /// has not modified must have the content that the file has at the stop.
    pub fn forget_changed(&mut self) {
        self.others.retain(|_, found| found.is_ok());
        let identifier = &self.identifier;
        self.identified.retain(|_, identified| {
            let is_read_elsewhere = identified.file.is_object || identified.file.location.is_some();
            is_read_elsewhere || !identified.has_changed(&identifier.map_file(identified.mapped_at))
        });
    }

    /// Drops all records: the process executed another program, and may map changed files.
    pub fn forget_all(&mut self) {
        self.generation += 1;
        self.identified.clear();
        self.others.clear();
        self.objects.clear();
        self.new_objects.clear();
    }

    /// Sets the objects that move together with the processes that share them.
    pub fn set_objects(&mut self, objects: &HashSet<ObjectId>) {
        if &self.objects != objects {
            self.generation += 1;
            self.objects.clone_from(objects);
        }
        self.forget_objects();
    }

    /// Drops the records of shared memory: its size may have changed.
    pub fn forget_objects(&mut self) {
        self.identified.retain(|_, identified| !identified.file.is_object);
    }
}

fn unreadable(name: &[u8]) -> Unmovable {
    Unmovable::UnreadableFile(String::from_utf8_lossy(name).into_owned())
}

impl Job {
    fn is_late(&self) -> bool {
        let timeout = if self.while_stopped { STOPPED_IDENTIFY_TIMEOUT } else { IDENTIFY_TIMEOUT };
        self.begun.elapsed() > timeout
    }
}

impl IdentifiedFile {
    /// Whether the file behind this link in /proc may have changed since it was identified. Asks no
    /// server.
    fn has_changed(&self, link: &str) -> bool {
        self.stamp.is_none() || current_stamp(link) != self.stamp
    }
}

impl FileIdentifier for HomeFiles {
    /// Whether all processes that share the memory move together is checked when they are stopped.
    fn moves_with_sharers(&self, m: &Mapping) -> bool {
        writes_are_visible_to_others(m) || m.shared && self.uses_object(object::id(m))
    }

    /// For a file that has not been identified, returns `None`, and notes the file for
    /// [`take_unidentified`](Self::take_unidentified). The layout that is being described is then
    /// incomplete, and must not be used.
    fn identify(&mut self, m: &Mapping) -> Result<Option<FileRef>, Unmovable> {
        if let Some(identified) = self.known(m) {
            return Ok(Some(identified.file.clone()));
        }
        let (key, is_object) = ((m.device, m.inode), self.moves_with_sharers(m));
        match self.others.remove(&key) {
            // The next attempt may find it readable.
            Some(Err(why)) => return Err(why),
            Some(Ok(())) => drop(self.others.insert(key, Ok(()))),
            None => self.unidentified.push((m.clone(), is_object)),
        }
        Ok(None)
    }
}

struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(buffer, self.offset)?;
        self.offset += n as u64;
        Ok(n)
    }
}
