//! Record locks of programs here, and those of flock. The server never waits for one; who must wait asks again, on a thread of his own, until he
//! has it or is interrupted.
//!
//! Who has a lock sees what others did under theirs. A lease does not see to that alone: a program on the file's node writes at once, and
//! the lease is asked back after that. So what is known here of a file goes when somebody gets a lock on it, and the kernel, which
//! cannot be told of each lock (it would throw away what others who have one are asking for), believes nothing of it from the first on.

use super::handle::Handle;
use super::interrupts::Waiter;
use super::peer::Peer;
use super::people::is_of_open_file;
use super::tree::Tree;
use crate::lock;
use crate::message::{Answer, Deed, LockKind};
use fuser::ReplyEmpty;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// How long who waits sleeps, at first and at most: it doubles.
const SLEEP: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

/// Who may have record locks on a file: for each of the kernel's numbers one that the server knows him by. The kernel uses its
/// numbers again, and that he has lost his locks may be said late; so each of ours is used once.
#[derive(Debug, Default)]
pub(crate) struct Owners(Mutex<HashMap<u64, Owner>>);

#[derive(Debug)]
struct Owner {
    number: u64,
    /// He has been told that he has a lock.
    has: bool,
}

impl Owners {
    /// The number of who wants a lock.
    fn add(&self, owner: u64, peer: &Peer) -> u64 {
        self.all().entry(owner).or_insert_with(|| Owner { number: peer.new_owner(), has: false }).number
    }

    /// The number of one who may have locks.
    fn get(&self, owner: u64) -> Option<u64> {
        self.all().get(&owner).map(|owner| owner.number)
    }

    /// Whether he is still known by that number; if so, and it `has` a lock now, that is noted.
    fn knows(&self, owner: u64, number: u64, has: bool) -> bool {
        let mut all = self.all();
        let known = all.get_mut(&owner).filter(|known| known.number == number);
        known.map(|known| known.has |= has).is_some()
    }

    /// He has none any more.
    pub(crate) fn remove(&self, owner: u64) -> Option<u64> {
        self.all().remove(&owner).map(|owner| owner.number)
    }

    /// Whether somebody has one.
    pub(crate) fn have_some(&self) -> bool {
        self.all().values().any(|owner| owner.has)
    }

    fn all(&self) -> MutexGuard<'_, HashMap<u64, Owner>> {
        lock(&self.0)
    }
}

fn kind(raw: i32) -> Result<LockKind, Errno> {
    match raw {
        libc::F_RDLCK => Ok(LockKind::Shared),
        libc::F_WRLCK => Ok(LockKind::Exclusive),
        libc::F_UNLCK => Ok(LockKind::Unlocked),
        _ => Err(Errno::INVAL),
    }
}

/// The lock that is in the way of this one: its first and last byte, and its kind.
pub(crate) fn test(
    tree: &Tree,
    handle: &Handle,
    owner: u64,
    (start, end): (u64, u64),
    raw: i32,
) -> Result<(u64, u64, i32), Errno> {
    let kind = kind(raw)?;
    // Nobody has 0: who has no number has no lock either.
    let owner = handle.inode.owners.get(owner).unwrap_or(0);
    let deed = |opened| Deed::TestLock { opened, owner, kind, start, end };
    match tree.with_open(handle, &handle.opener, &[], deed)?.answer {
        Answer::InTheWay { kind, start, end } => {
            let raw = match kind {
                LockKind::Shared => libc::F_RDLCK,
                LockKind::Exclusive => libc::F_WRLCK,
                LockKind::Unlocked => libc::F_UNLCK,
            };
            // The kernel has no byte beyond the largest offset.
            Ok((start, end.min(i64::MAX.cast_unsigned()), raw))
        }
        _ => Err(Errno::IO),
    }
}

/// What the kernel asks for.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// Its number for who is to have the lock.
    pub(crate) owner: u64,
    /// First and last byte.
    pub(crate) range: (u64, u64),
    /// `F_RDLCK` and so on.
    pub(crate) raw: i32,
    /// The thread that asks.
    pub(crate) asker: u32,
    /// It is of flock(2).
    pub(crate) flock: bool,
}

/// A record lock of a process or an open file.
#[derive(Debug)]
struct Record {
    owner: u64,
    /// His number for the server.
    number: u64,
    range: (u64, u64),
}

/// One who wants a lock, or wants it to go.
#[derive(Debug)]
struct Wish {
    handle: Arc<Handle>,
    kind: LockKind,
    /// flock's if none.
    record: Option<Record>,
}

/// Sets or removes a lock, and answers. `waiter` is who waits for it, if somebody does.
pub(crate) fn set(
    tree: &Arc<Tree>,
    handle: Arc<Handle>,
    wanted: &Wanted,
    waiter: Option<Waiter>,
    reply: ReplyEmpty,
) {
    let wish = match Wish::of(handle, wanted) {
        Ok(Some(wish)) => wish,
        Ok(None) => return answer(reply, Ok(())),
        Err(errno) => return answer(reply, Err(errno)),
    };
    if wish.kind != LockKind::Unlocked && wish.handle.inode.wants_lock() {
        tree.forgetting.forget_attributes(wish.handle.inode.number);
    }
    let done = wish.try_once(tree);
    let (Err(Errno::AGAIN), Some(waiter)) = (done, waiter) else { return answer(reply, done) };
    let tree = tree.clone();
    let wait = move || answer(reply, wish.wait(&tree, &waiter));
    // Without a thread the reply goes with it, which fails the call.
    if let Err(error) = std::thread::Builder::new().name("lock".into()).spawn(wait) {
        tracing::warn!(%error, "no thread for one who waits for a lock");
    }
}

impl Wish {
    /// None if there is no lock that could go.
    fn of(handle: Arc<Handle>, wanted: &Wanted) -> Result<Option<Self>, Errno> {
        let (kind, owner) = (kind(wanted.raw)?, wanted.owner);
        if wanted.flock {
            return Ok(Some(Self { handle, kind, record: None }));
        }
        // The kernel says it of processes that close a file, and not of the file.
        if handle.is_unflushed || is_of_open_file(wanted.asker) {
            lock(&handle.owners).insert(owner);
        }
        let owners = &handle.inode.owners;
        let number = match kind {
            LockKind::Unlocked => owners.get(owner),
            _ => Some(owners.add(owner, &handle.inode.peer)),
        };
        let record = number.map(|number| Record { owner, number, range: wanted.range });
        Ok(record.map(|record| Self { handle, kind, record: Some(record) }))
    }

    fn wait(&self, tree: &Tree, waiter: &Waiter) -> Result<(), Errno> {
        let mut sleep = SLEEP.0;
        loop {
            if waiter.sleep(sleep) {
                return Err(Errno::INTR);
            }
            sleep = (sleep * 2).min(SLEEP.1);
            match self.try_once(tree) {
                Err(Errno::AGAIN) => {}
                done => return done,
            }
        }
    }

    fn try_once(&self, tree: &Tree) -> Result<(), Errno> {
        let (Self { handle, kind, record }, inode) = (self, &self.handle.inode);
        let Some(Record { owner, number, range: (start, end) }) = record else { return self.flock(tree) };
        let deed = |opened| Deed::Lock { opened, owner: *number, kind: *kind, start: *start, end: *end };
        let done = tree.with_open(handle, &handle.opener, &[], deed).map(drop);
        // Another thread of his may have closed the file meanwhile, and said so to the server before this lock was there.
        let has = done.is_ok() && *kind != LockKind::Unlocked;
        if !inode.owners.knows(*owner, *number, has) {
            inode.release_owner(*number);
            return Err(Errno::INTR);
        }
        if has {
            inode.has_lock();
        }
        done
    }

    fn flock(&self, tree: &Tree) -> Result<(), Errno> {
        let Self { handle, kind, .. } = self;
        tree.have_own(handle)?;
        let deed = |opened| Deed::Flock { opened, kind: *kind };
        let done = tree.with_open(handle, &handle.opener, &[], deed).map(drop);
        // Who is refused another kind of lock has lost the one that he had.
        if matches!(done, Ok(()) | Err(Errno::AGAIN)) {
            let has = done.is_ok() && *kind != LockKind::Unlocked;
            handle.is_locked.store(has, Ordering::Release);
            if has {
                handle.inode.has_lock();
            }
        }
        done
    }
}

fn answer(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(fuser::Errno::from_i32(errno.raw_os_error())),
    }
}
