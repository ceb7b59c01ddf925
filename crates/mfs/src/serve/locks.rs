//! Locks of other nodes' programs as locks of ours, so that they are in the way of this node's own programs too.
//!
//! A record lock belongs to a process, and each of them is one owner here: it gets an open file description of its own, whose
//! lock (`F_OFD_SETLK`) is in the way of all others. What flock locks belongs to the open file, which is one here as well. None of
//! them waits here: who waits, on the other node, asks again.

use super::session::{OpenFile, Session};
use crate::lock;
use crate::message::{Answer, LockKind};
use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// The most owners of locks of one session, one file at a time.
const MOST_OWNERS: usize = 16_384;

/// Sets or removes a record lock.
///
/// # Errors
/// `EAGAIN` if another one is in the way.
pub(crate) fn set(
    session: &Session,
    file: &OpenFile,
    owner: u64,
    kind: LockKind,
    (start, end): (u64, u64),
) -> Result<(), Errno> {
    let fd = description(session, file, owner)?;
    let record = record(kind, start, end)?;
    fcntl(&*fd, FcntlArg::F_OFD_SETLK(&record)).map(drop).map_err(errno)
}

/// The lock that is in the way of this one.
///
/// # Errors
/// Those of fcntl.
pub(crate) fn test(
    session: &Session,
    file: &OpenFile,
    owner: u64,
    kind: LockKind,
    (start, end): (u64, u64),
) -> Result<Answer, Errno> {
    let own = lock(&session.owners).get(&(file.key, owner)).map(|(fd, _)| fd.clone());
    let mut record = record(kind, start, end)?;
    // By the open file itself nothing is ever locked.
    let fd = own.as_deref().unwrap_or(&file.fd);
    fcntl(fd, FcntlArg::F_OFD_GETLK(&mut record)).map_err(errno)?;
    let kind = match libc::c_int::from(record.l_type) {
        libc::F_RDLCK => LockKind::Shared,
        libc::F_WRLCK => LockKind::Exclusive,
        _ => LockKind::Unlocked,
    };
    let start = u64::try_from(record.l_start).unwrap_or(0);
    let length = u64::try_from(record.l_len).unwrap_or(0);
    let end = if length == 0 { u64::MAX } else { start.saturating_add(length - 1) };
    Ok(Answer::InTheWay { kind, start, end })
}

/// Sets or removes flock's lock of an open file, which goes when that is closed.
///
/// # Errors
/// `EAGAIN` if another one is in the way; what it had is gone then, as on one machine.
pub(crate) fn flock(file: &OpenFile, kind: LockKind) -> Result<(), Errno> {
    let how = match kind {
        LockKind::Shared => FlockOperation::NonBlockingLockShared,
        LockKind::Exclusive => FlockOperation::NonBlockingLockExclusive,
        LockKind::Unlocked => FlockOperation::NonBlockingUnlock,
    };
    rustix::fs::flock(&file.fd, how)
}

/// The open file description that stands for this owner. It can be written to if he may write at all, since he may have
/// opened the file twice and locks by either.
fn description(session: &Session, file: &OpenFile, owner: u64) -> Result<Arc<OwnedFd>, Errno> {
    let mut owners = lock(&session.owners);
    if let Some((fd, _)) = owners.get(&(file.key, owner)) {
        return Ok(fd.clone());
    }
    if owners.len() >= MOST_OWNERS {
        return Err(Errno::NOLCK);
    }
    let slot = session.budget.slot()?;
    let again = format!("/proc/self/fd/{}", file.fd.as_raw_fd());
    let open = |mode| rustix::fs::open(&again, mode | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty());
    let fd = Arc::new(open(OFlags::RDWR).or_else(|_denied| open(file.flags & OFlags::ACCMODE))?);
    owners.insert((file.key, owner), (fd.clone(), slot));
    Ok(fd)
}

fn record(kind: LockKind, start: u64, end: u64) -> Result<libc::flock, Errno> {
    let to_end = end >= i64::MAX.cast_unsigned();
    let length = if to_end { 0 } else { end.checked_sub(start).ok_or(Errno::INVAL)? + 1 };
    let kind = match kind {
        LockKind::Shared => libc::F_RDLCK,
        LockKind::Exclusive => libc::F_WRLCK,
        LockKind::Unlocked => libc::F_UNLCK,
    };
    Ok(libc::flock {
        l_type: libc::c_short::try_from(kind).map_err(|_large| Errno::INVAL)?,
        l_whence: 0,
        l_start: i64::try_from(start).map_err(|_large| Errno::OVERFLOW)?,
        l_len: length.cast_signed(),
        l_pid: 0,
    })
}

fn errno(errno: nix::errno::Errno) -> Errno {
    Errno::from_raw_os_error(errno as i32)
}
