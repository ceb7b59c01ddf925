//! As whom a process looks for names, and where it may.

use super::look::Why;
use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags, open, openat, statx};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use tern_tracee::procfs;

/// To compare more threads takes too long.
const MOST_THREADS: usize = 64;
/// Rights to a directory: to look names up, and to list it as well.
pub(super) const SEARCH: u16 = 1;
pub(super) const LIST: u16 = 5;

/// From linux/capability.h.
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_DAC_READ_SEARCH: u32 = 2;

/// A directory on the way, or what a step leads to. Nobody is asked for it but our own kernel: a server may be gone.
pub(super) struct Place {
    pub(super) fd: OwnedFd,
    pub(super) said: Statx,
}

impl Place {
    fn of(fd: OwnedFd) -> io::Result<Self> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let said = statx(&fd, "", flags, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)?;
        Ok(Self { fd, said })
    }

    pub(super) fn open(path: &str) -> io::Result<Self> {
        Self::of(open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    }

    pub(super) fn step(&self, name: &[u8]) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Self::of(openat(&self.fd, CString::new(name)?, flags, Mode::empty())?)
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        let identity = |of: &Statx| (of.stx_dev_major, of.stx_dev_minor, of.stx_ino, of.stx_mnt_id);
        identity(&self.said) == identity(&other.said)
    }

    pub(super) fn is_link(&self) -> bool {
        u32::from(self.said.stx_mode) & libc::S_IFMT == libc::S_IFLNK
    }

    /// Opens a directory to be read, which leaves its time of access if that can be.
    pub(super) fn read(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let quiet = openat(&self.fd, ".", flags | OFlags::NOATIME, Mode::empty());
        Ok(quiet.or_else(|_not_ours| openat(&self.fd, ".", flags, Mode::empty()))?)
    }
}

/// As whom a process looks for names.
pub(super) struct Who {
    /// They may look everywhere.
    may: bool,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

impl Who {
    /// All threads of a process, if they are the same, with the same root as we and where one of them is.
    pub(super) fn of(pid: i32, tid: i32) -> Result<Self, Why> {
        let link = |of: i32, what: &str| std::fs::read_link(format!("/proc/{pid}/task/{of}/{what}"));
        let same = |[first, rest @ ..]: [u32; 4]| rest.iter().all(|id| *id == first);
        let ours = std::fs::read_link("/proc/self/ns/mnt")?;
        // A security module may let them see less.
        let label = |of: &str| std::fs::read(format!("/proc/{of}/attr/current")).ok();
        if label(&pid.to_string()) != label("self") {
            return Err(Why::Never);
        }
        let (place, mut who) = (link(tid, "cwd")?, None);
        let threads = procfs::threads(pid).map_err(|_gone| Why::Now)?;
        if threads.len() > MOST_THREADS {
            return Err(Why::Now);
        }
        for thread in threads {
            let status = procfs::status(thread).map_err(|_gone| Why::Now)?;
            let this = (status.uid, status.gid, status.groups, status.effective);
            let first = who.get_or_insert_with(|| this.clone());
            let alike = *first == this && link(thread, "cwd")? == place;
            if !alike || !same(this.0) || !same(this.1) || link(thread, "ns/mnt")? != ours {
                return Err(Why::Never);
            }
        }
        let same_root = Place::open(&format!("/proc/{pid}/root"))?.is(&Place::open("/")?);
        let (uid, gid, groups, effective) = who.filter(|_| same_root).ok_or(Why::Never)?;
        let may = effective & (1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH) != 0;
        if may && uid[0] != 0 {
            // access(2) asks what they may without their capabilities.
            return Err(Why::Never);
        }
        Ok(Self { may, uid: uid[0], gid: gid[0], groups })
    }

    /// Whether they have these rights (4 to list it, 1 to look names up) to a directory. What they may do by an access list is not looked at.
    pub(super) fn may(&self, of: &Place, rights: u16) -> bool {
        let shift = match &of.said {
            _ if self.may => return true,
            said if said.stx_uid == self.uid => 6,
            said if said.stx_gid == self.gid || self.groups.contains(&said.stx_gid) => 3,
            _ => 0,
        };
        let open = format!("/proc/self/fd/{}", of.fd.as_raw_fd());
        let listed = rustix::fs::getxattr(&*open, "system.posix_acl_access", &mut [0u8; 0][..]);
        of.said.stx_mode >> shift & rights == rights && listed.is_err()
    }
}
