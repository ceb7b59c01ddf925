//! Access checks: the credentials with which a process looks up names, and the access they permit.

use super::scanner::ScanError;
use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags, open, openat, statx};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use tern_tracee::procfs;

/// Processes with more threads are not checked, since that takes too long.
const MAX_THREADS: usize = 64;
/// Rights to a directory: to look up names, and to list it as well.
pub(super) const SEARCH: u16 = 1;
pub(super) const LIST: u16 = 5;

/// From linux/capability.h.
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_DAC_READ_SEARCH: u32 = 2;

/// A directory on a path, or the object to which one component of the path leads. Only this
/// kernel's cached status is used, since a server may be unreachable.
pub(super) struct DirHandle {
    pub(super) fd: OwnedFd,
    pub(super) status: Statx,
}

impl DirHandle {
    fn of(fd: OwnedFd) -> io::Result<Self> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let status = statx(&fd, "", flags, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)?;
        Ok(Self { fd, status })
    }

    pub(super) fn open(path: &str) -> io::Result<Self> {
        Self::of(open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    }

    pub(super) fn lookup(&self, name: &[u8]) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Self::of(openat(&self.fd, CString::new(name)?, flags, Mode::empty())?)
    }

    pub(super) fn is_same_as(&self, other: &Self) -> bool {
        let identity = |of: &Statx| (of.stx_dev_major, of.stx_dev_minor, of.stx_ino, of.stx_mnt_id);
        identity(&self.status) == identity(&other.status)
    }

    pub(super) fn is_link(&self) -> bool {
        u32::from(self.status.stx_mode) & libc::S_IFMT == libc::S_IFLNK
    }

    /// Opens a directory for reading, without changing its access time if possible.
    pub(super) fn read(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let quiet = openat(&self.fd, ".", flags | OFlags::NOATIME, Mode::empty());
        Ok(quiet.or_else(|_not_ours| openat(&self.fd, ".", flags, Mode::empty()))?)
    }
}

/// The credentials with which a process looks up names.
pub(super) struct LookupCredentials {
    /// A capability overrides permission checks.
    overrides: bool,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

impl LookupCredentials {
    /// The credentials of a process. Fails unless all its threads have the same credentials, the
    /// mount namespace and root of the shim, and the working directory of `tid`.
    pub(super) fn of(pid: i32, tid: i32) -> Result<Self, ScanError> {
        let link = |of: i32, what: &str| std::fs::read_link(format!("/proc/{pid}/task/{of}/{what}"));
        let same = |[first, rest @ ..]: [u32; 4]| rest.iter().all(|id| *id == first);
        let own_ns = std::fs::read_link("/proc/self/ns/mnt")?;
        // A security module may restrict the process further.
        let label = |of: &str| std::fs::read(format!("/proc/{of}/attr/current")).ok();
        if label(&pid.to_string()) != label("self") {
            return Err(ScanError::Never);
        }
        let (place, mut credentials) = (link(tid, "cwd")?, None);
        let threads = procfs::threads(pid).map_err(|_gone| ScanError::Retry)?;
        if threads.len() > MAX_THREADS {
            return Err(ScanError::Retry);
        }
        for thread in threads {
            let status = procfs::status(thread).map_err(|_gone| ScanError::Retry)?;
            let this = (status.uid, status.gid, status.groups, status.effective);
            let first = credentials.get_or_insert_with(|| this.clone());
            let alike = *first == this && link(thread, "cwd")? == place;
            if !alike || !same(this.0) || !same(this.1) || link(thread, "ns/mnt")? != own_ns {
                return Err(ScanError::Never);
            }
        }
        let same_root = DirHandle::open(&format!("/proc/{pid}/root"))?.is_same_as(&DirHandle::open("/")?);
        let (uid, gid, groups, effective) = credentials.filter(|_| same_root).ok_or(ScanError::Never)?;
        let may = effective & (1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH) != 0;
        if may && uid[0] != 0 {
            // access(2) checks the rights without capabilities.
            return Err(ScanError::Never);
        }
        Ok(Self { overrides: may, uid: uid[0], gid: gid[0], groups })
    }

    /// Whether these credentials permit this access to a directory. Access to a directory with an
    /// access control list counts as not permitted, since the list is not evaluated.
    pub(super) fn permits(&self, of: &DirHandle, rights: u16) -> bool {
        let shift = match &of.status {
            _ if self.overrides => return true,
            status if status.stx_uid == self.uid => 6,
            status if status.stx_gid == self.gid || self.groups.contains(&status.stx_gid) => 3,
            _ => 0,
        };
        let open = format!("/proc/self/fd/{}", of.fd.as_raw_fd());
        let listed = rustix::fs::getxattr(&*open, "system.posix_acl_access", &mut [0u8; 0][..]);
        of.status.stx_mode >> shift & rights == rights && listed.is_err()
    }
}
