//! Locks of other nodes' programs, held as locks of this node's kernel, so that they also conflict
//! with locks of local programs.
//!
//! A record lock belongs to a process. The server has a lock owner for each such process, with an
//! open file description of its own: locks of a description (`F_OFD_SETLK`) conflict with those of
//! every other description. A lock of flock belongs to the open file, which the server has open as
//! well. No lock call blocks in the server: the client repeats the request until the lock is free.

use super::session::{OpenFile, Session};
use crate::lock;
use crate::message::{FileReply, LockKind};
use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// Maximum number of lock owners per session. An owner counts once for each file.
const MAX_LOCK_OWNERS: usize = 16_384;

/// Sets or removes a record lock.
///
/// # Errors
/// `EAGAIN` if another lock conflicts.
pub(crate) fn set(
    session: &Session,
    file: &OpenFile,
    owner: u64,
    kind: LockKind,
    (start, end): (u64, u64),
) -> Result<(), Errno> {
    let fd = owner_fd(session, file, owner)?;
    let record = flock_record(kind, start, end)?;
    fcntl(&*fd, FcntlArg::F_OFD_SETLK(&record)).map(drop).map_err(errno)
}

/// The lock that conflicts with this one.
///
/// # Errors
/// Those of fcntl.
pub(crate) fn test(
    session: &Session,
    file: &OpenFile,
    owner: u64,
    kind: LockKind,
    (start, end): (u64, u64),
) -> Result<FileReply, Errno> {
    let own_fd = lock(&session.owners).get(&(file.key, owner)).map(|(fd, _)| fd.clone());
    let mut record = flock_record(kind, start, end)?;
    // No record lock is taken through the open file itself, so the kernel reports any conflicting
    // lock.
    let fd = own_fd.as_deref().unwrap_or(&file.fd);
    fcntl(fd, FcntlArg::F_OFD_GETLK(&mut record)).map_err(errno)?;
    let kind = match libc::c_int::from(record.l_type) {
        libc::F_RDLCK => LockKind::Shared,
        libc::F_WRLCK => LockKind::Exclusive,
        _ => LockKind::Unlocked,
    };
    let start = u64::try_from(record.l_start).unwrap_or(0);
    let length = u64::try_from(record.l_len).unwrap_or(0);
    let end = if length == 0 { u64::MAX } else { start.saturating_add(length - 1) };
    Ok(FileReply::LockConflict { kind, start, end })
}

/// Sets or removes flock's lock of an open file. The lock is dropped when the file is closed.
///
/// # Errors
/// `EAGAIN` if another lock conflicts; a lock that the open file had before is lost then, as on a
/// single machine.
pub(crate) fn flock(file: &OpenFile, kind: LockKind) -> Result<(), Errno> {
    let operation = match kind {
        LockKind::Shared => FlockOperation::NonBlockingLockShared,
        LockKind::Exclusive => FlockOperation::NonBlockingLockExclusive,
        LockKind::Unlocked => FlockOperation::NonBlockingUnlock,
    };
    rustix::fs::flock(&file.fd, operation)
}

/// The open file description of this lock owner. It is writable if the caller may write the file at
/// all, since the owner may have opened the file twice and may lock through either descriptor.
fn owner_fd(session: &Session, file: &OpenFile, owner: u64) -> Result<Arc<OwnedFd>, Errno> {
    let mut owners = lock(&session.owners);
    if let Some((fd, _)) = owners.get(&(file.key, owner)) {
        return Ok(fd.clone());
    }
    if owners.len() >= MAX_LOCK_OWNERS {
        return Err(Errno::NOLCK);
    }
    let permit = session.budget.acquire()?;
    let path = format!("/proc/self/fd/{}", file.fd.as_raw_fd());
    let open = |mode| rustix::fs::open(&path, mode | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty());
    let fd = Arc::new(open(OFlags::RDWR).or_else(|_denied| open(file.flags & OFlags::ACCMODE))?);
    owners.insert((file.key, owner), (fd.clone(), permit));
    Ok(fd)
}

fn flock_record(kind: LockKind, start: u64, end: u64) -> Result<libc::flock, Errno> {
    let is_to_end = end >= i64::MAX.cast_unsigned();
    let length = if is_to_end { 0 } else { end.checked_sub(start).ok_or(Errno::INVAL)? + 1 };
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
