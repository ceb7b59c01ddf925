//! Processes and their descriptors by pidfd instead of by number.

use crate::error::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A handle of a process. Unlike a pid it never refers to another process.
#[derive(Debug)]
pub struct Pidfd {
    pid: i32,
    fd: OwnedFd,
}

impl Pidfd {
    /// Opens a process, which must not have been reaped.
    ///
    /// # Errors
    /// If it is gone.
    pub fn open(pid: i32) -> Result<Self> {
        // SAFETY: integers only.
        let open = |flags: i32| unsafe { libc::syscall(libc::SYS_pidfd_open, pid, flags) };
        // A thread other than the first needs PIDFD_THREAD (6.9), which has the value of O_EXCL.
        let fd = Some(open(0)).filter(|fd| *fd >= 0).unwrap_or_else(|| open(libc::O_EXCL));
        if fd < 0 {
            return Err(Error::last("open a handle", pid));
        }
        // SAFETY: the kernel has just returned this new descriptor.
        Ok(Self { pid, fd: unsafe { OwnedFd::from_raw_fd(fd as i32) } })
    }

    /// Duplicates a descriptor of the process into this process (pidfd_getfd, 5.6).
    ///
    /// # Errors
    /// If it has no such descriptor, or may not be traced.
    pub fn descriptor(&self, number: i32) -> Result<OwnedFd> {
        // SAFETY: integers only.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_getfd, self.fd.as_raw_fd(), number, 0) };
        if fd < 0 {
            return Err(Error::last("copy a descriptor", self.pid));
        }
        // SAFETY: the kernel has just returned this new descriptor.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }
}

/// Sends a signal to one thread.
///
/// # Errors
/// If it is gone, or may not be signalled.
pub fn signal_thread(process: i32, thread: i32, signal: i32) -> Result<()> {
    // SAFETY: integers only.
    match unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) } {
        0 => Ok(()),
        _ => Err(Error::last("signal", thread)),
    }
}

/// Kills a process. It is no error if it is already gone.
pub fn kill(pid: i32) {
    // SAFETY: integers only.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}
