//! What this node holds for one mounted tree of another: the objects that its kernel knows, and its open files.
//!
//! An object is held by a descriptor of `O_PATH`, so that it stays the same whatever its names become. When the server has too
//! many, objects that are not open are forgotten ([`Budget`]): the client looks them up again. So are files that have no name any more.

use super::budget::{Budget, Slot};
use super::export::{Export, Place};
use super::stat::{self, attributes};
use crate::lock;
use crate::message::{Answer, FileKey, Lease, Object, Opened, Purpose, ROOT};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Open files of one session: as many as a process may have by default on most systems, times sixteen.
const MOST_FILES: usize = 16_384;

/// Leases that are asked back at once.
const MOST_RECALLED: usize = 4096;

/// Leases that are asked back and not heard of.
const MOST_UNHEARD: usize = 1 << 16;

/// Lanes of one session.
pub(crate) const MOST_LANES: u16 = 64;

/// One object.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) fd: OwnedFd,
    pub(crate) key: FileKey,
    pub(crate) place: Place,
}

/// One open file or directory.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) fd: OwnedFd,
    pub(crate) key: FileKey,
    pub(crate) place: Place,
    /// As opened.
    pub(crate) flags: OFlags,
    /// Reading a directory moves its place, so one at a time does.
    pub(crate) reading: Mutex<()>,
    /// What is behind it, if this node's kernel reads and writes it for a tree that is mounted here ([`super::passthrough`]).
    pub(crate) behind: OnceLock<OwnedFd>,
}

/// A lane, which the connection that has it holds.
pub(crate) type SharedLane = Arc<Mutex<Lane>>;

/// What one lane did last, for a client who did not hear of it.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    /// The highest number of an ask.
    pub(crate) newest: u64,
    /// The number of the last ask whose [`crate::message::Beside`] was heard.
    pub(crate) heard: u64,
    /// The number of the last ask that is not repeatable.
    pub(crate) last: Option<u64>,
    /// Its answer.
    pub(crate) answer: Vec<u8>,
}

impl Lane {
    /// Its asks up to this number are given up; the answer to that one, if there is one.
    ///
    /// A connection from before may still have them to be read, behind us: they are of long ago then.
    pub(crate) fn give_up(&mut self, number: u64) -> Option<Answer> {
        self.newest = self.newest.max(number.saturating_add(1));
        let last = self.last.take_if(|last| *last == number);
        last.and_then(|_| tern_wire::decode(&self.answer).ok())
    }
}

/// What is asked back of a session.
#[derive(Debug, Default)]
struct Ear {
    listeners: usize,
    recalled: Vec<Lease>,
    /// How many there were so far.
    told: u64,
    /// There were too many.
    lost: bool,
}

/// An object with how often it was looked up.
#[derive(Debug)]
struct Counted {
    held: Arc<Held>,
    count: u64,
    /// Something was done with it since room was last looked for.
    used: bool,
    _slot: Slot,
}

#[derive(Debug, Default)]
struct Objects {
    held: HashMap<u64, Counted>,
    known: HashMap<FileKey, u64>,
    /// How often each file is open: nobody can look it up again if it has no name any more.
    open: HashMap<FileKey, usize>,
    /// In the order in which they came; those that are gone are skipped.
    order: VecDeque<u64>,
    next: u64,
    /// Those that had no name any more when that was looked at last.
    removed: HashSet<u64>,
}

/// Open files by number.
type Files = HashMap<u64, (Arc<OpenFile>, Slot)>;

/// Descriptors by file and owner.
type Owners = HashMap<(FileKey, u64), (Arc<OwnedFd>, Slot)>;

/// One mounted tree's.
#[derive(Debug)]
pub(crate) struct Session {
    /// Chosen at random.
    pub(crate) number: u64,
    /// What the tree is for.
    pub(crate) purpose: Purpose,
    /// When it has renewed them last.
    renewed: Mutex<Option<Instant>>,
    root: Arc<Held>,
    pub(crate) budget: Arc<Budget>,
    objects: Mutex<Objects>,
    files: Mutex<(Files, u64)>,
    /// For each owner of record locks of a file, a descriptor whose open file description stands for him.
    pub(crate) owners: Mutex<Owners>,
    ear: Mutex<Ear>,
    heard: Condvar,
    /// Each with the connection that uses it.
    lanes: Mutex<HashMap<u16, (SharedLane, TcpStream)>>,
    /// How many connections it has, and since when that is none.
    pub(crate) connections: Mutex<(usize, Instant)>,
}

impl Session {
    /// An empty one.
    ///
    /// # Errors
    /// If the root cannot be opened.
    pub(crate) fn new(export: &Export, budget: &Arc<Budget>, purpose: Purpose) -> Result<Arc<Self>, Errno> {
        // A client that asks a new server for what it had from an old one must not get something else.
        Self::counting_from(beginning(), export, budget, purpose)
    }

    /// The same, with objects and open files that are counted from here.
    pub(crate) fn counting_from(
        first: u64,
        export: &Export,
        budget: &Arc<Budget>,
        purpose: Purpose,
    ) -> Result<Arc<Self>, Errno> {
        let fd = open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let key = attributes(&fd)?.key;
        let session = Arc::new(Self {
            number: beginning(),
            purpose,
            renewed: Mutex::default(),
            root: Arc::new(Held { fd, key, place: export.root() }),
            budget: budget.clone(),
            objects: Mutex::new(Objects { next: first, ..Objects::default() }),
            files: Mutex::new((HashMap::new(), first)),
            owners: Mutex::default(),
            ear: Mutex::default(),
            heard: Condvar::new(),
            lanes: Mutex::default(),
            connections: Mutex::new((0, Instant::now())),
        });
        budget.add(&session);
        Ok(session)
    }

    /// Whether it goes by lasting leases.
    pub(crate) fn is_lasting(&self) -> bool {
        self.purpose == Purpose::Room
    }

    /// An object, if it is still held.
    pub(crate) fn object(&self, object: Object) -> Option<Arc<Held>> {
        if object == ROOT {
            return Some(self.root.clone());
        }
        lock(&self.objects).held.get_mut(&object.0).map(|counted| {
            counted.used = true;
            counted.held.clone()
        })
    }

    /// The object that is this file, if it holds that.
    pub(crate) fn held(&self, key: FileKey) -> Option<Arc<Held>> {
        let objects = lock(&self.objects);
        objects.held.get(objects.known.get(&key)?).map(|counted| counted.held.clone())
    }

    /// How many objects it holds.
    pub(crate) fn count(&self) -> usize {
        lock(&self.objects).held.len()
    }

    /// Holds what was looked up, and counts the look-up. What is held already keeps its number.
    ///
    /// # Errors
    /// `ENFILE` if there is no room for it.
    pub(crate) fn hold(&self, held: Held) -> Result<Object, Errno> {
        if let Some(object) = lock(&self.objects).count_again(held.key) {
            return Ok(object);
        }
        // Without the lock: room may be made here.
        let slot = self.budget.slot()?;
        let mut objects = lock(&self.objects);
        Ok(objects.count_again(held.key).unwrap_or_else(|| objects.add(held, slot)))
    }

    /// Forgets as many objects, the oldest first, of those that are not open; how many there were. With which something was done since it was
    /// looked at last is spared once: a directory is older than all that is made in it.
    pub(crate) fn evict(&self, most: usize) -> usize {
        let mut objects = lock(&self.objects);
        let mut gone = Vec::new();
        for _ in 0..2 * objects.order.len() {
            let Some(oldest) = objects.order.pop_front() else { break };
            let Objects { held, open, .. } = &mut *objects;
            let Some(counted) = held.get_mut(&oldest) else { continue };
            if open.contains_key(&counted.held.key) || std::mem::take(&mut counted.used) {
                objects.order.push_back(oldest);
                continue;
            }
            gone.extend(objects.forget(oldest));
            if gone.len() == most {
                break;
            }
        }
        drop(objects);
        gone.len()
    }

    /// Forgets the files that have been without a name since this was called last, if they are not open: their room on the disk is not to be
    /// taken for as long as another node's kernel happens to remember them.
    ///
    /// Twice, so that who has found one before it was removed, and is about to open it, has done so. Who has a directory that was removed as
    /// his own still finds it empty; it takes next to no room.
    ///
    /// Gives back what was forgotten: to drop the last of a large file takes the kernel long.
    #[must_use]
    pub(crate) fn let_go_of_removed(&self) -> Vec<Arc<Held>> {
        let all: Vec<_> = lock(&self.objects)
            .held
            .iter()
            .map(|(number, counted)| (*number, counted.held.clone()))
            .collect();
        let removed: HashSet<u64> = all
            .iter()
            .filter(|(_, held)| stat::is_removed_file(&held.fd))
            .map(|(number, _)| *number)
            .collect();
        let mut objects = lock(&self.objects);
        let before = std::mem::take(&mut objects.removed);
        let mut forgotten = Vec::new();
        for number in removed.intersection(&before) {
            let Some(counted) = objects.held.get(number) else { continue };
            if !objects.open.contains_key(&counted.held.key) {
                forgotten.extend(objects.forget(*number).map(|counted| counted.held));
            }
        }
        objects.removed = removed;
        forgotten
    }

    /// Takes look-ups back; nobody holds it after the last.
    pub(crate) fn forget(&self, object: Object, count: u64) {
        let mut objects = lock(&self.objects);
        let Some(counted) = objects.held.get_mut(&object.0) else { return };
        counted.count = counted.count.saturating_sub(count);
        let gone = if counted.count == 0 { objects.forget(object.0) } else { None };
        // The last of a large file that was removed takes the kernel long, and all who do something wait for the lock.
        drop(objects);
        drop(gone);
    }

    /// An open file, if it is one.
    pub(crate) fn file(&self, opened: Opened) -> Option<Arc<OpenFile>> {
        lock(&self.files).0.get(&opened.0).map(|(file, _)| file.clone())
    }

    /// Whether it has this file open.
    pub(crate) fn has_open(&self, key: FileKey) -> bool {
        lock(&self.objects).open.contains_key(&key)
    }

    /// Keeps an open file.
    ///
    /// # Errors
    /// `ENFILE` if there are too many.
    pub(crate) fn keep(&self, file: OpenFile) -> Result<Opened, Errno> {
        let (slot, key) = (self.budget.slot()?, file.key);
        let mut files = lock(&self.files);
        if files.0.len() >= MOST_FILES {
            return Err(Errno::NFILE);
        }
        *lock(&self.objects).open.entry(key).or_default() += 1;
        files.1 += 1;
        let number = files.1;
        files.0.insert(number, (Arc::new(file), slot));
        Ok(Opened(number))
    }

    /// Closes it, when all that use it now have done so.
    pub(crate) fn close(&self, opened: Opened) -> Option<Arc<OpenFile>> {
        let (file, _slot) = lock(&self.files).0.remove(&opened.0)?;
        let open = &mut lock(&self.objects).open;
        if let Some(count) = open.get_mut(&file.key) {
            *count -= 1;
            if *count == 0 {
                open.remove(&file.key);
            }
        }
        Some(file)
    }

    /// Whether somebody of it listens for what is asked back.
    pub(crate) fn listens(&self) -> bool {
        lock(&self.ear).listeners > 0
    }

    /// One more listens from now on, or one less: a new one may come before the old one is known to be gone.
    pub(crate) fn hears(&self, listens: bool) {
        let listeners = &mut lock(&self.ear).listeners;
        *listeners = if listens { *listeners + 1 } else { listeners.saturating_sub(1) };
    }

    /// Asks a lease back.
    pub(crate) fn recall(&self, lease: Lease) {
        let mut ear = lock(&self.ear);
        ear.told += 1;
        // Who hears nothing is waited for until the term is over anyway.
        if ear.recalled.len() < MOST_UNHEARD {
            ear.recalled.push(lease);
        } else {
            (ear.lost, ear.recalled) = (true, Vec::new());
        }
        drop(ear);
        self.heard.notify_one();
    }

    /// How many leases were asked back so far.
    pub(crate) fn told(&self) -> u64 {
        lock(&self.ear).told
    }

    /// Its lasting leases hold for another term.
    pub(crate) fn renews(&self) {
        *lock(&self.renewed) = Some(Instant::now());
    }

    /// When it has renewed them last.
    pub(crate) fn renewed(&self) -> Option<Instant> {
        *lock(&self.renewed)
    }

    /// What is asked back, as soon as there is something, or nothing after a while; and how many that makes so far. `None` if some
    /// cannot be said any more.
    pub(crate) fn recalled(&self, most: Duration) -> Option<(Vec<Lease>, u64)> {
        let ear = lock(&self.ear);
        let mut ear = self
            .heard
            .wait_timeout_while(ear, most, |ear| ear.recalled.is_empty() && !ear.lost)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        if std::mem::take(&mut ear.lost) {
            return None;
        }
        let rest = ear.recalled.len().min(MOST_RECALLED);
        let leases = ear.recalled.drain(..rest).collect();
        Some((leases, ear.told - ear.recalled.len() as u64))
    }

    /// A lane, which one connection at a time uses: this one now. The one that had it is ended.
    pub(crate) fn lane(&self, number: u16, socket: TcpStream) -> Option<SharedLane> {
        if number >= MOST_LANES {
            return None;
        }
        let mut lanes = lock(&self.lanes);
        let last = lanes.remove(&number);
        if let Some((_, last)) = &last {
            let _ended_already = last.shutdown(Shutdown::Both);
        }
        let lane = last.map_or_else(Arc::default, |(lane, _)| lane);
        lanes.insert(number, (lane.clone(), socket));
        Some(lane)
    }
}

/// A number from which to count on, far from where others did.
fn beginning() -> u64 {
    (rand::random::<u64>() >> 2) | 1
}

impl Objects {
    /// Counts one more look-up of what is held already.
    fn count_again(&mut self, key: FileKey) -> Option<Object> {
        let number = *self.known.get(&key)?;
        self.held.get_mut(&number)?.count += 1;
        Some(Object(number))
    }

    fn add(&mut self, held: Held, slot: Slot) -> Object {
        let number = self.next;
        self.next += 1;
        self.known.insert(held.key, number);
        self.held.insert(number, Counted { held: Arc::new(held), count: 1, used: false, _slot: slot });
        self.order.push_back(number);
        if self.order.len() > 2 * self.held.len() + 64 {
            let Self { held, order, .. } = self;
            order.retain(|number| held.contains_key(number));
        }
        Object(number)
    }

    /// Gives back what was forgotten, to be dropped without the lock.
    fn forget(&mut self, number: u64) -> Option<Counted> {
        let counted = self.held.remove(&number)?;
        self.known.remove(&counted.held.key);
        Some(counted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(inode: u64) -> Held {
        let fd = open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        Held { fd, key: FileKey { volume: 1, device: 1, inode }, place: Place::Inside }
    }

    #[test]
    fn a_file_of_two_names_is_one_object() {
        let session = Session::new(&Export::default(), &Budget::new(10), Purpose::All).unwrap();
        let one = session.hold(held(7)).unwrap();
        assert_eq!(session.hold(held(7)).unwrap(), one);
        session.forget(one, 1);
        assert!(session.object(one).is_some());
        session.forget(one, 1);
        assert!(session.object(one).is_none());
        assert_ne!(session.hold(held(7)).unwrap(), one, "a number is never used again");
    }

    #[test]
    fn the_oldest_are_forgotten_when_there_are_too_many_and_the_root_never() {
        let session = Session::new(&Export::default(), &Budget::new(10), Purpose::All).unwrap();
        let all: Vec<_> = (0..1000).map(|n| session.hold(held(n)).unwrap()).collect();
        assert!(session.object(all[989]).is_none());
        assert!(all[990..].iter().all(|object| session.object(*object).is_some()));
        assert!(session.object(ROOT).is_some());
        session.forget(ROOT, 5);
        assert!(session.object(ROOT).is_some());
    }

    #[test]
    fn who_cannot_be_told_all_is_told_that() {
        let session = Session::new(&Export::default(), &Budget::new(10), Purpose::Room).unwrap();
        let lease =
            |number| Lease { of: FileKey { volume: 1, device: 1, inode: number }, number, is_late: true };
        (0..5000).for_each(|number| session.recall(lease(number)));
        let (first, told) = session.recalled(Duration::ZERO).unwrap();
        assert_eq!((first.len(), told, session.told()), (MOST_RECALLED, MOST_RECALLED as u64, 5000));
        assert_eq!(session.recalled(Duration::ZERO).unwrap().1, 5000);
        (0..=MOST_UNHEARD as u64).for_each(|number| session.recall(lease(number)));
        assert_eq!(session.recalled(Duration::ZERO), None);
        assert_eq!(session.recalled(Duration::ZERO), Some((Vec::new(), session.told())));
    }

    #[test]
    fn lanes_are_few_and_a_new_connection_ends_the_old_one() {
        let session = Session::new(&Export::default(), &Budget::new(10), Purpose::All).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut first = connect();
        let lane = session.lane(MOST_LANES - 1, first.try_clone().unwrap()).unwrap();
        lock(&lane).last = Some(7);
        let lane = session.lane(MOST_LANES - 1, connect()).unwrap();
        assert_eq!(lock(&lane).last, Some(7));
        assert_eq!(std::io::Read::read(&mut first, &mut [0]).unwrap(), 0);
        assert!(session.lane(MOST_LANES, connect()).is_none());
    }
}
