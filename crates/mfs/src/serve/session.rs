//! The state of one mounted tree: the objects that the client's kernel has looked up, and the
//! tree's open files.
//!
//! An object is held by an `O_PATH` descriptor, so that it stays the same file when its names
//! change. Objects that are not used are [parked](parked). If the server has too many objects, those
//! that are not open are forgotten ([`FdBudget`]), and the client looks them up again. Removed files
//! are forgotten too.

pub(crate) mod parked;

use super::budget::{FdBudget, FdPermit};
use super::export::{Export, ExportPosition};
use super::fanotify::is_local;
use super::stat::{self, attributes};
use crate::lock;
use crate::message::{FileKey, FileReply, Lease, Object, OpenId, Purpose, ROOT};
use parked::ParkedObject;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of open files per session: sixteen times the usual default of a process.
const MAX_OPEN_FILES: usize = 16_384;

/// Maximum number of recalls in one reply.
const MAX_RECALLS_PER_REPLY: usize = 4096;

/// Maximum number of queued recalls that the client has not received.
const MAX_QUEUED_RECALLS: usize = 1 << 16;

/// Maximum number of connections per session.
pub(crate) const MAX_CONNECTIONS_PER_SESSION: u16 = 64;

/// An object.
#[derive(Debug)]
pub(crate) struct HeldObject {
    pub(crate) fd: OwnedFd,
    pub(crate) key: FileKey,
    pub(crate) position: ExportPosition,
}

/// An open file or directory.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) fd: OwnedFd,
    pub(crate) key: FileKey,
    pub(crate) position: ExportPosition,
    /// Flags of open.
    pub(crate) flags: OFlags,
    /// Serialises reads of a directory, since they move its file position.
    pub(crate) reading: Mutex<()>,
}

/// A reply cache, locked by the connection that uses it.
pub(crate) type SharedReplyCache = Arc<Mutex<ReplyCache>>;

/// The last reply of one connection, for a client that has not received it (NFSv4.1: a session
/// slot).
#[derive(Debug, Default)]
pub(crate) struct ReplyCache {
    /// Requests with a lower number are refused.
    pub(crate) newest: u64,
    /// Number of the last request whose [`crate::message::Piggyback`] was applied.
    pub(crate) piggyback_applied: u64,
    /// Number of the last request that is not idempotent.
    pub(crate) number: Option<u64>,
    /// Its encoded reply.
    pub(crate) reply: Vec<u8>,
}

impl ReplyCache {
    /// Marks the requests up to this number as abandoned. Returns the reply to the last one, if it
    /// is cached.
    ///
    /// An old connection may still deliver these requests; they are then refused because of their
    /// numbers.
    pub(crate) fn abandon(&mut self, number: u64) -> Option<FileReply> {
        self.newest = self.newest.max(number.saturating_add(1));
        let cached = self.number.take_if(|cached| *cached == number);
        cached.and_then(|_| tern_wire::decode(&self.reply).ok())
    }
}

/// Recalls to send to a session.
#[derive(Debug, Default)]
struct RecallQueue {
    callbacks: usize,
    recalls: Vec<Lease>,
    /// Number of recalls so far.
    count: u64,
    /// Recalls were dropped because there were too many.
    has_overflowed: bool,
}

/// How an object is kept.
#[derive(Debug)]
enum ObjectState {
    Held(Arc<HeldObject>),
    /// It can be opened again.
    Parked(Arc<ParkedObject>),
}

/// An object and its number of lookups.
#[derive(Debug)]
struct ObjectEntry {
    key: FileKey,
    state: ObjectState,
    lookups: u64,
    /// It was used since the last eviction pass.
    was_used: bool,
    /// Number of checks for idle objects since it was used.
    idle_checks: u8,
    /// A parked object has one too, so that their number is limited.
    _permit: FdPermit,
}

#[derive(Debug, Default)]
struct Objects {
    by_number: HashMap<u64, ObjectEntry>,
    by_key: HashMap<FileKey, u64>,
    /// How many times each file is open. An open file is not forgotten: without a name it could not
    /// be looked up again.
    open_counts: HashMap<FileKey, usize>,
    /// Objects by age; those that are already forgotten are skipped.
    order: VecDeque<u64>,
    next_number: u64,
    /// Held objects on other mounts than the root's, and whether their file systems are local.
    elsewhere: HashMap<u64, bool>,
    /// Objects that had no name at the last check.
    removed: HashSet<u64>,
}

/// Open files by number.
type OpenFiles = HashMap<u64, (Arc<OpenFile>, FdPermit)>;

/// Descriptors by file and lock owner.
type LockOwners = HashMap<(FileKey, u64), (Arc<OwnedFd>, FdPermit)>;

/// The state of one mounted tree.
#[derive(Debug)]
pub(crate) struct Session {
    /// Identifies the session in the lease table; random.
    pub(crate) number: u64,
    /// Purpose of the mounted tree.
    pub(crate) purpose: Purpose,
    /// When the renewable leases were last renewed.
    renewed_at: Mutex<Option<Instant>>,
    root: Arc<HeldObject>,
    /// The mount of the root. The kernel does not unmount it.
    root_mount: u64,
    pub(crate) budget: Arc<FdBudget>,
    objects: Mutex<Objects>,
    files: Mutex<(OpenFiles, u64)>,
    /// For each owner of record locks of a file, a descriptor whose open file description holds
    /// them.
    pub(crate) owners: Mutex<LockOwners>,
    recalls: Mutex<RecallQueue>,
    recall_added: Condvar,
    /// By connection number: the reply cache, and the socket of the connection that uses it.
    connections: Mutex<HashMap<u16, (SharedReplyCache, TcpStream)>>,
    /// The number of connections, and since when it has been zero.
    pub(crate) connection_count: Mutex<(usize, Instant)>,
}

impl Session {
    /// Creates an empty session.
    ///
    /// # Errors
    /// If the root cannot be opened.
    pub(crate) fn new(export: &Export, budget: &Arc<FdBudget>, purpose: Purpose) -> Result<Arc<Self>, Errno> {
        // Random first numbers: a number of an earlier server's session must not name something
        // else in this one.
        Self::with_first_number(first_number(), export, budget, purpose)
    }

    /// [`Self::new`] with a given first number of objects and open files.
    pub(crate) fn with_first_number(
        first: u64,
        export: &Export,
        budget: &Arc<FdBudget>,
        purpose: Purpose,
    ) -> Result<Arc<Self>, Errno> {
        let fd = open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let key = attributes(&fd)?.key;
        let root_mount = stat::mount_id(&fd);
        let session = Arc::new(Self {
            number: first_number(),
            purpose,
            renewed_at: Mutex::default(),
            root: Arc::new(HeldObject { fd, key, position: export.root() }),
            root_mount,
            budget: budget.clone(),
            objects: Mutex::new(Objects { next_number: first, ..Objects::default() }),
            files: Mutex::new((HashMap::new(), first)),
            owners: Mutex::default(),
            recalls: Mutex::default(),
            recall_added: Condvar::new(),
            connections: Mutex::default(),
            connection_count: Mutex::new((0, Instant::now())),
        });
        budget.add(&session);
        Ok(session)
    }

    /// Whether the session uses renewable leases.
    pub(crate) fn uses_renewable_leases(&self) -> bool {
        self.purpose == Purpose::Container
    }

    /// The object with this number, if it has not been forgotten.
    pub(crate) fn object(&self, object: Object) -> Option<Arc<HeldObject>> {
        if object == ROOT {
            return Some(self.root.clone());
        }
        let parked = {
            let mut objects = lock(&self.objects);
            let entry = objects.by_number.get_mut(&object.0)?;
            (entry.was_used, entry.idle_checks) = (true, 0);
            match &entry.state {
                ObjectState::Held(held) => return Some(held.clone()),
                ObjectState::Parked(parked) => parked.clone(),
            }
        };
        self.unpark(object, &parked)
    }

    /// The object that is this file, if there is one. A parked one stays parked.
    pub(crate) fn object_with_key(&self, key: FileKey) -> Option<Arc<HeldObject>> {
        let parked = {
            let objects = lock(&self.objects);
            match &objects.by_number.get(objects.by_key.get(&key)?)?.state {
                ObjectState::Held(held) => return Some(held.clone()),
                ObjectState::Parked(parked) => parked.clone(),
            }
        };
        parked.open().map(Arc::new)
    }

    /// Number of objects.
    pub(crate) fn object_count(&self) -> usize {
        lock(&self.objects).by_number.len()
    }

    /// Holds an object that was looked up, and counts the lookup. An object that is already held
    /// keeps its number.
    ///
    /// # Errors
    /// `ENFILE` if the descriptor budget is exhausted.
    pub(crate) fn hold(&self, held: HeldObject) -> Result<Object, Errno> {
        let held = match lock(&self.objects).count_lookup(held) {
            Ok(object) => return Ok(object),
            Err(held) => held,
        };
        let is_elsewhere = stat::mount_id(&held.fd) != self.root_mount;
        let elsewhere = is_elsewhere.then(|| is_local(&held.fd));
        // Called without the lock, since it may evict objects.
        let permit = self.budget.acquire()?;
        let mut objects = lock(&self.objects);
        Ok(objects.count_lookup(held).unwrap_or_else(|held| objects.add(held, elsewhere, permit)))
    }

    /// Forgets up to `max` objects that are not open, the oldest first. Returns their number. An
    /// object that was used since the last pass is spared once: a directory is older than the files
    /// created in it.
    pub(crate) fn evict(&self, max: usize) -> usize {
        let mut objects = lock(&self.objects);
        let mut evicted = Vec::new();
        for _ in 0..2 * objects.order.len() {
            let Some(oldest) = objects.order.pop_front() else { break };
            let Objects { by_number, open_counts, .. } = &mut *objects;
            let Some(entry) = by_number.get_mut(&oldest) else { continue };
            if open_counts.contains_key(&entry.key) || std::mem::take(&mut entry.was_used) {
                objects.order.push_back(oldest);
                continue;
            }
            evicted.extend(objects.forget(oldest));
            if evicted.len() == max {
                break;
            }
        }
        drop(objects);
        evicted.len()
    }

    /// Forgets files that are not open, had no name at the previous call, and have none now.
    /// Otherwise their blocks would stay allocated for as long as another node's kernel happens to
    /// cache the files.
    ///
    /// Because of the second check, a client that has looked up a file before its removal has time
    /// to open it. Removed directories are kept: a process that has one as its working directory
    /// still finds it empty, and a removed directory takes next to no space.
    ///
    /// Returns the forgotten objects, since dropping the last descriptor of a large file takes the
    /// kernel long.
    #[must_use]
    pub(crate) fn forget_removed(&self) -> Vec<Arc<HeldObject>> {
        let held = |(number, entry): (&u64, &ObjectEntry)| match &entry.state {
            ObjectState::Held(held) => Some((*number, held.clone())),
            ObjectState::Parked(_) => None,
        };
        let all: Vec<_> = lock(&self.objects).by_number.iter().filter_map(held).collect();
        let removed: HashSet<u64> = all
            .iter()
            .filter(|(_, held)| stat::is_removed_file(&held.fd))
            .map(|(number, _)| *number)
            .collect();
        let mut objects = lock(&self.objects);
        let previously_removed = std::mem::take(&mut objects.removed);
        let mut forgotten = Vec::new();
        for number in removed.intersection(&previously_removed) {
            let Some(entry) = objects.by_number.get(number) else { continue };
            let ObjectState::Held(held) = &entry.state else { continue };
            if !objects.open_counts.contains_key(&entry.key) {
                forgotten.push(held.clone());
                drop(objects.forget(*number));
            }
        }
        objects.removed = removed;
        forgotten
    }

    /// Subtracts lookups; the object is dropped with the last one.
    pub(crate) fn forget(&self, object: Object, count: u64) {
        let mut objects = lock(&self.objects);
        let Some(entry) = objects.by_number.get_mut(&object.0) else { return };
        entry.lookups = entry.lookups.saturating_sub(count);
        let forgotten = if entry.lookups == 0 { objects.forget(object.0) } else { None };
        // Dropping the last descriptor of a large removed file takes the kernel long, and all
        // requests would wait for the lock.
        drop(objects);
        drop(forgotten);
    }

    /// The open file with this number.
    pub(crate) fn open_file(&self, opened: OpenId) -> Option<Arc<OpenFile>> {
        lock(&self.files).0.get(&opened.0).map(|(file, _)| file.clone())
    }

    /// Whether the session has this file open.
    pub(crate) fn is_open(&self, key: FileKey) -> bool {
        lock(&self.objects).open_counts.contains_key(&key)
    }

    /// Adds an open file.
    ///
    /// # Errors
    /// `ENFILE` if there are too many.
    pub(crate) fn insert_open(&self, file: OpenFile) -> Result<OpenId, Errno> {
        let (permit, key) = (self.budget.acquire()?, file.key);
        let mut files = lock(&self.files);
        if files.0.len() >= MAX_OPEN_FILES {
            return Err(Errno::NFILE);
        }
        *lock(&self.objects).open_counts.entry(key).or_default() += 1;
        files.1 += 1;
        let number = files.1;
        files.0.insert(number, (Arc::new(file), permit));
        Ok(OpenId(number))
    }

    /// Removes an open file. It is closed when the requests that use it are done.
    pub(crate) fn close(&self, opened: OpenId) -> Option<Arc<OpenFile>> {
        let (file, _permit) = lock(&self.files).0.remove(&opened.0)?;
        let open_counts = &mut lock(&self.objects).open_counts;
        if let Some(count) = open_counts.get_mut(&file.key) {
            *count -= 1;
            if *count == 0 {
                open_counts.remove(&file.key);
            }
        }
        Some(file)
    }

    /// Whether the session has a callback channel.
    pub(crate) fn has_callback(&self) -> bool {
        lock(&self.recalls).callbacks > 0
    }

    /// A callback channel was attached, or closed. The channels are counted, since a new one may be
    /// attached before the end of the old one is noticed.
    pub(crate) fn set_callback(&self, is_attached: bool) {
        let callbacks = &mut lock(&self.recalls).callbacks;
        *callbacks = if is_attached { *callbacks + 1 } else { callbacks.saturating_sub(1) };
    }

    /// Recalls a lease.
    pub(crate) fn recall(&self, lease: Lease) {
        let mut queue = lock(&self.recalls);
        queue.count += 1;
        // When too many are queued, the client is not receiving them, and all are dropped: a change
        // waits until the lease's term ends anyway.
        if queue.recalls.len() < MAX_QUEUED_RECALLS {
            queue.recalls.push(lease);
        } else {
            (queue.has_overflowed, queue.recalls) = (true, Vec::new());
        }
        drop(queue);
        self.recall_added.notify_one();
    }

    /// Number of leases recalled so far.
    pub(crate) fn recall_count(&self) -> u64 {
        lock(&self.recalls).count
    }

    /// Renews all renewable leases for another term.
    pub(crate) fn renew(&self) {
        *lock(&self.renewed_at) = Some(Instant::now());
    }

    /// When the renewable leases were last renewed.
    pub(crate) fn renewed_at(&self) -> Option<Instant> {
        *lock(&self.renewed_at)
    }

    /// Waits for recalls. Returns those that are queued, possibly none after the timeout, and the
    /// recall count up to the last of them. `None` if recalls were dropped.
    pub(crate) fn next_recalls(&self, timeout: Duration) -> Option<(Vec<Lease>, u64)> {
        let queue = lock(&self.recalls);
        let mut queue = self
            .recall_added
            .wait_timeout_while(queue, timeout, |queue| queue.recalls.is_empty() && !queue.has_overflowed)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        if std::mem::take(&mut queue.has_overflowed) {
            return None;
        }
        let length = queue.recalls.len().min(MAX_RECALLS_PER_REPLY);
        let leases = queue.recalls.drain(..length).collect();
        Some((leases, queue.count - queue.recalls.len() as u64))
    }

    /// Attaches a socket to the connection with this number, and returns the connection's reply
    /// cache. An earlier socket of that connection is shut down. `None` if the number is too high.
    pub(crate) fn attach(&self, number: u16, socket: TcpStream) -> Option<SharedReplyCache> {
        if number >= MAX_CONNECTIONS_PER_SESSION {
            return None;
        }
        let mut connections = lock(&self.connections);
        let earlier = connections.remove(&number);
        if let Some((_, socket)) = &earlier {
            let _already_closed = socket.shutdown(Shutdown::Both);
        }
        let cache = earlier.map_or_else(Arc::default, |(cache, _)| cache);
        connections.insert(number, (cache.clone(), socket));
        Some(cache)
    }
}

/// A random first number, far from those of earlier sessions.
fn first_number() -> u64 {
    (rand::random::<u64>() >> 2) | 1
}

impl Objects {
    /// Counts one more lookup of an object that is known already. Returns the object if it is not.
    fn count_lookup(&mut self, held: HeldObject) -> Result<Object, HeldObject> {
        let Some(number) = self.by_key.get(&held.key).copied() else { return Err(held) };
        let Some(entry) = self.by_number.get_mut(&number) else { return Err(held) };
        if let ObjectState::Parked(parked) = &entry.state {
            if !parked.is(&held.fd) {
                drop(self.forget(number));
                return Err(held);
            }
            entry.lookups += 1;
            self.unpark(number, Some(Arc::new(held)));
            return Ok(Object(number));
        }
        entry.lookups += 1;
        entry.idle_checks = 0;
        Ok(Object(number))
    }

    fn add(&mut self, held: HeldObject, elsewhere: Option<bool>, permit: FdPermit) -> Object {
        let number = self.next_number;
        self.next_number += 1;
        self.by_key.insert(held.key, number);
        self.elsewhere.extend(elsewhere.map(|is_local| (number, is_local)));
        let entry = ObjectEntry {
            key: held.key,
            state: ObjectState::Held(Arc::new(held)),
            lookups: 1,
            was_used: false,
            idle_checks: 0,
            _permit: permit,
        };
        self.by_number.insert(number, entry);
        self.order.push_back(number);
        if self.order.len() > 2 * self.by_number.len() + 64 {
            let Self { by_number, order, .. } = self;
            order.retain(|number| by_number.contains_key(number));
        }
        Object(number)
    }

    /// Returns the forgotten object, to be dropped without the lock.
    fn forget(&mut self, number: u64) -> Option<ObjectEntry> {
        let entry = self.by_number.remove(&number)?;
        self.by_key.remove(&entry.key);
        self.elsewhere.remove(&number);
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(inode: u64) -> HeldObject {
        let fd = open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        HeldObject { fd, key: FileKey { volume: 1, device: 1, inode }, position: ExportPosition::Exported }
    }

    #[test]
    fn file_with_two_names_is_one_object() {
        let session = Session::new(&Export::default(), &FdBudget::new(10), Purpose::All).unwrap();
        let one = session.hold(held(7)).unwrap();
        assert_eq!(session.hold(held(7)).unwrap(), one);
        session.forget(one, 1);
        assert!(session.object(one).is_some());
        session.forget(one, 1);
        assert!(session.object(one).is_none());
        assert_ne!(session.hold(held(7)).unwrap(), one, "a number is never used again");
    }

    #[test]
    fn oldest_objects_are_evicted_but_never_the_root() {
        let session = Session::new(&Export::default(), &FdBudget::new(10), Purpose::All).unwrap();
        let all: Vec<_> = (0..1000).map(|n| session.hold(held(n)).unwrap()).collect();
        assert!(session.object(all[989]).is_none());
        assert!(all[990..].iter().all(|object| session.object(*object).is_some()));
        assert!(session.object(ROOT).is_some());
        session.forget(ROOT, 5);
        assert!(session.object(ROOT).is_some());
    }

    #[test]
    fn overflow_of_recalls_is_reported() {
        let session = Session::new(&Export::default(), &FdBudget::new(10), Purpose::Container).unwrap();
        let lease = |number| Lease {
            file: FileKey { volume: 1, device: 1, inode: number },
            number,
            is_after_change: true,
        };
        (0..5000).for_each(|number| session.recall(lease(number)));
        let (first, count) = session.next_recalls(Duration::ZERO).unwrap();
        assert_eq!(
            (first.len(), count, session.recall_count()),
            (MAX_RECALLS_PER_REPLY, MAX_RECALLS_PER_REPLY as u64, 5000)
        );
        assert_eq!(session.next_recalls(Duration::ZERO).unwrap().1, 5000);
        (0..=MAX_QUEUED_RECALLS as u64).for_each(|number| session.recall(lease(number)));
        assert_eq!(session.next_recalls(Duration::ZERO), None);
        assert_eq!(session.next_recalls(Duration::ZERO), Some((Vec::new(), session.recall_count())));
    }

    #[test]
    fn connections_are_limited_and_a_new_one_ends_the_old_one() {
        let session = Session::new(&Export::default(), &FdBudget::new(10), Purpose::All).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut first = connect();
        let cache = session.attach(MAX_CONNECTIONS_PER_SESSION - 1, first.try_clone().unwrap()).unwrap();
        lock(&cache).number = Some(7);
        let cache = session.attach(MAX_CONNECTIONS_PER_SESSION - 1, connect()).unwrap();
        assert_eq!(lock(&cache).number, Some(7));
        assert_eq!(std::io::Read::read(&mut first, &mut [0]).unwrap(), 0);
        assert!(session.attach(MAX_CONNECTIONS_PER_SESSION, connect()).is_none());
    }
}
