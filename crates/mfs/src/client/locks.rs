//! Record locks of programs here. The server never waits for one; who must wait asks again, on a thread of his own, until he
//! has it or is interrupted.

use super::handle::Handle;
use super::people::is_interrupted;
use super::tree::Tree;
use crate::message::{Answer, Deed, LockKind};
use fuser::ReplyEmpty;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long who waits sleeps, at first and at most: it doubles.
const SLEEP: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

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

/// Sets or removes a lock, and answers. `waiter` is the thread that waits for it, if it does.
pub(crate) fn set(
    tree: &Arc<Tree>,
    handle: Arc<Handle>,
    owner: u64,
    range: (u64, u64),
    raw: i32,
    waiter: Option<u32>,
    reply: ReplyEmpty,
) {
    let kind = match kind(raw) {
        Ok(kind) => kind,
        Err(errno) => return answer(reply, Err(errno)),
    };
    let done = try_once(tree, &handle, owner, range, kind);
    let (Err(Errno::AGAIN), Some(waiter)) = (done, waiter) else { return answer(reply, done) };
    let tree = tree.clone();
    let wait = move || answer(reply, wait(&tree, &handle, owner, range, kind, waiter));
    // Without a thread the reply goes with it, which fails the call.
    if let Err(error) = std::thread::Builder::new().name("lock".into()).spawn(wait) {
        tracing::warn!(%error, "no thread for one who waits for a lock");
    }
}

fn wait(
    tree: &Tree,
    handle: &Handle,
    owner: u64,
    range: (u64, u64),
    kind: LockKind,
    waiter: u32,
) -> Result<(), Errno> {
    let mut sleep = SLEEP.0;
    loop {
        if is_interrupted(waiter) {
            return Err(Errno::INTR);
        }
        std::thread::sleep(sleep);
        sleep = (sleep * 2).min(SLEEP.1);
        match try_once(tree, handle, owner, range, kind) {
            Err(Errno::AGAIN) => {}
            done => return done,
        }
    }
}

fn try_once(
    tree: &Tree,
    handle: &Handle,
    owner: u64,
    (start, end): (u64, u64),
    kind: LockKind,
) -> Result<(), Errno> {
    // Before it is there: who closes the file meanwhile must ask for it to go.
    if kind != LockKind::Unlocked {
        handle.inode.locked.store(true, Ordering::Release);
    }
    let deed = |opened| Deed::Lock { opened, owner, kind, start, end };
    tree.with_open(handle, &handle.opener, &[], deed).map(drop)
}

fn answer(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(fuser::Errno::from_i32(errno.raw_os_error())),
    }
}
