//! Record locks (fcntl(2)) and flock(2). The server never blocks on a lock; a blocking request is
//! retried here, on a thread of its own, until it succeeds or is interrupted.
//!
//! A program that gets a lock must see what was written under the previous one. Leases do not
//! ensure that: a local program of the file's node writes at once, and the lease is recalled
//! afterwards. So everything cached here of a file is dropped when a lock on it is acquired. The
//! kernel cannot be notified of each lock, since it would ignore the replies for which other lock
//! holders wait; so from the first lock request on, the file's attributes get no TTL.

use crate::client::caller::is_ofd_lock;
use crate::client::connection::peer::Peer;
use crate::client::fuse::handle::Handle;
use crate::client::fuse::interrupts::Waiter;
use crate::client::tree::Tree;
use crate::lock;
use crate::message::{FileReply, LockKind, Op};
use fuser::ReplyEmpty;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Interval between attempts: the first, and the longest. It doubles each time.
const RETRY_INTERVAL: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

/// The owners of record locks on a file, by the kernel's lock owner, with the number under which
/// the server knows each. The kernel reuses its numbers, and the release of an owner's locks may
/// reach the server late; so numbers sent to the server are never reused.
#[derive(Debug, Default)]
pub(crate) struct LockOwners(Mutex<HashMap<u64, LockOwner>>);

#[derive(Debug)]
struct LockOwner {
    number: u64,
    /// Its lock request has succeeded.
    has_lock: bool,
}

impl LockOwners {
    /// The server's number of an owner that requests a lock.
    fn add(&self, owner: u64, peer: &Peer) -> u64 {
        self.all()
            .entry(owner)
            .or_insert_with(|| LockOwner { number: peer.new_lock_owner(), has_lock: false })
            .number
    }

    /// The server's number of an owner that may have locks.
    fn get(&self, owner: u64) -> Option<u64> {
        self.all().get(&owner).map(|owner| owner.number)
    }

    /// Whether the owner still has that number. If so, and if `has_lock` is set, records that it
    /// has a lock.
    fn confirm(&self, owner: u64, number: u64, has_lock: bool) -> bool {
        let mut all = self.all();
        let known = all.get_mut(&owner).filter(|known| known.number == number);
        known.map(|known| known.has_lock |= has_lock).is_some()
    }

    /// The owner has no lock any more.
    pub(crate) fn remove(&self, owner: u64) -> Option<u64> {
        self.all().remove(&owner).map(|owner| owner.number)
    }

    /// Whether any owner has a lock.
    pub(crate) fn any_has_lock(&self) -> bool {
        self.all().values().any(|owner| owner.has_lock)
    }

    fn all(&self) -> MutexGuard<'_, HashMap<u64, LockOwner>> {
        lock(&self.0)
    }
}

fn kind(raw_kind: i32) -> Result<LockKind, Errno> {
    match raw_kind {
        libc::F_RDLCK => Ok(LockKind::Shared),
        libc::F_WRLCK => Ok(LockKind::Exclusive),
        libc::F_UNLCK => Ok(LockKind::Unlocked),
        _ => Err(Errno::INVAL),
    }
}

/// The conflicting lock (F_GETLK): its first and last byte, and its kind.
pub(crate) fn test(
    tree: &Tree,
    handle: &Handle,
    owner: u64,
    (start, end): (u64, u64),
    raw_kind: i32,
) -> Result<(u64, u64, i32), Errno> {
    let kind = kind(raw_kind)?;
    // 0 is no owner's number; an owner without a number has no lock.
    let owner = handle.inode.lock_owners.get(owner).unwrap_or(0);
    let op = |opened| Op::GetLock { opened, owner, kind, start, end };
    match tree.call_on_open(handle, &handle.opener, &[], op)?.reply {
        FileReply::LockConflict { kind, start, end } => {
            let raw_kind = match kind {
                LockKind::Shared => libc::F_RDLCK,
                LockKind::Exclusive => libc::F_WRLCK,
                LockKind::Unlocked => libc::F_UNLCK,
            };
            // The kernel accepts no byte beyond the largest offset.
            Ok((start, end.min(i64::MAX.cast_unsigned()), raw_kind))
        }
        _ => Err(Errno::IO),
    }
}

/// A lock request of the kernel.
#[derive(Debug)]
pub(crate) struct LockRequest {
    /// The kernel's lock owner.
    pub(crate) owner: u64,
    /// First and last byte.
    pub(crate) range: (u64, u64),
    /// `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
    pub(crate) raw_kind: i32,
    /// The calling thread.
    pub(crate) tid: u32,
    /// It is a flock(2) lock.
    pub(crate) is_flock: bool,
}

/// A record lock of a process or of an open file description.
#[derive(Debug)]
struct RecordLock {
    owner: u64,
    /// The owner's number at the server.
    number: u64,
    range: (u64, u64),
}

/// A lock to acquire or to release.
#[derive(Debug)]
struct LockAttempt {
    handle: Arc<Handle>,
    kind: LockKind,
    /// None for flock(2).
    record: Option<RecordLock>,
}

/// Acquires or releases a lock, and replies. `waiter` is present if the call may block.
pub(crate) fn set(
    tree: &Arc<Tree>,
    handle: Arc<Handle>,
    request: &LockRequest,
    waiter: Option<Waiter>,
    reply: ReplyEmpty,
) {
    let attempt = match LockAttempt::of(handle, request) {
        Ok(Some(attempt)) => attempt,
        Ok(None) => return send_result(reply, Ok(())),
        Err(errno) => return send_result(reply, Err(errno)),
    };
    if attempt.kind != LockKind::Unlocked && attempt.handle.inode.note_lock_request() {
        tree.invalidator.invalidate_attributes(attempt.handle.inode.number);
    }
    if attempt.kind != LockKind::Unlocked && attempt.handle.inode.is_being_notified() {
        // A notification waits for reads in progress, to which this thread may have to reply.
        let tree = tree.clone();
        return in_thread(move || {
            attempt.handle.inode.wait_for_notices();
            acquire(&tree, attempt, waiter, reply);
        });
    }
    acquire(tree, attempt, waiter, reply);
}

fn acquire(tree: &Arc<Tree>, attempt: LockAttempt, waiter: Option<Waiter>, reply: ReplyEmpty) {
    let done = attempt.try_once(tree);
    let (Err(Errno::AGAIN), Some(waiter)) = (done, waiter) else { return send_result(reply, done) };
    let tree = tree.clone();
    in_thread(move || send_result(reply, attempt.wait(&tree, &waiter)));
}

/// Waits for a lock in a thread of its own. If there is no thread the reply is dropped, which fails
/// the call.
fn in_thread(wait: impl FnOnce() + Send + 'static) {
    if let Err(error) = std::thread::Builder::new().name("lock".into()).spawn(wait) {
        tracing::warn!(%error, "cannot start a thread to wait for a lock; the call fails");
    }
}

impl LockAttempt {
    /// None if it releases a lock of an owner that has none.
    fn of(handle: Arc<Handle>, request: &LockRequest) -> Result<Option<Self>, Errno> {
        let (kind, owner) = (kind(request.raw_kind)?, request.owner);
        if request.is_flock {
            return Ok(Some(Self { handle, kind, record: None }));
        }
        // FUSE_FLUSH comes when a process closes the file, not when an open file description ends.
        if handle.skips_flush || is_ofd_lock(request.tid) {
            lock(&handle.lock_owners).insert(owner);
        }
        let owners = &handle.inode.lock_owners;
        let number = match kind {
            LockKind::Unlocked => owners.get(owner),
            _ => Some(owners.add(owner, &handle.inode.peer)),
        };
        let record = number.map(|number| RecordLock { owner, number, range: request.range });
        Ok(record.map(|record| Self { handle, kind, record: Some(record) }))
    }

    fn wait(&self, tree: &Tree, waiter: &Waiter) -> Result<(), Errno> {
        let mut sleep = RETRY_INTERVAL.0;
        loop {
            if waiter.sleep(sleep) {
                return Err(Errno::INTR);
            }
            sleep = (sleep * 2).min(RETRY_INTERVAL.1);
            match self.try_once(tree) {
                Err(Errno::AGAIN) => {}
                done => return done,
            }
        }
    }

    fn try_once(&self, tree: &Tree) -> Result<(), Errno> {
        let (Self { handle, kind, record }, inode) = (self, &self.handle.inode);
        let Some(RecordLock { owner, number, range: (start, end) }) = record else { return self.flock(tree) };
        let op = |opened| Op::SetLock { opened, owner: *number, kind: *kind, start: *start, end: *end };
        let done = tree.call_on_open(handle, &handle.opener, &[], op).map(drop);
        // Another thread of the process may have closed the file meanwhile, and its release may
        // have reached the server before this lock was acquired.
        let has_lock = done.is_ok() && *kind != LockKind::Unlocked;
        if !inode.lock_owners.confirm(*owner, *number, has_lock) {
            inode.release_owner(*number);
            return Err(Errno::INTR);
        }
        if has_lock {
            inode.note_lock_acquired();
        }
        done
    }

    fn flock(&self, tree: &Tree) -> Result<(), Errno> {
        let Self { handle, kind, .. } = self;
        tree.open_privately(handle)?;
        let op = |opened| Op::Flock { opened, kind: *kind };
        let done = tree.call_on_open(handle, &handle.opener, &[], op).map(drop);
        // A failed conversion of a flock(2) lock has released the old one.
        if matches!(done, Ok(()) | Err(Errno::AGAIN)) {
            let has_lock = done.is_ok() && *kind != LockKind::Unlocked;
            handle.has_flock.store(has_lock, Ordering::Release);
            if has_lock {
                handle.inode.note_lock_acquired();
            }
        }
        done
    }
}

fn send_result(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(fuser::Errno::from_i32(errno.raw_os_error())),
    }
}
