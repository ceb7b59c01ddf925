//! Tracks which pages a running process writes (asynchronous userfaultfd write protection; Linux
//! 6.7).
//!
//! The userfaultfd acts on the memory of the process that creates it, so it is created inside the
//! process, and moved to the tracer at once. With `UFFD_USER_MODE_ONLY` it needs no privilege, and
//! still covers writes by the kernel, since asynchronous faults are resolved without a handler.
//! Closing it ends the tracking and removes all write protection. New mappings are not tracked
//! until [`WriteTracker::track`] is called for them.

use crate::error::{Error, Result};
use crate::pidfd::Pidfd;
use std::os::fd::{AsRawFd, OwnedFd};

/// `_IOWR(0xAA, 0x3F, struct uffdio_api)`
const UFFDIO_API: u64 = 0xc018_aa3f;
/// `_IOWR(0xAA, 0x00, struct uffdio_register)`
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFD_USER_MODE_ONLY: u64 = 1;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const MODE_WP: u64 = 2;

/// Tracks the writes of a process.
#[derive(Debug)]
pub struct WriteTracker {
    pid: i32,
    uffd: OwnedFd,
}

impl WriteTracker {
    /// Creates a tracker in a stopped process. `call` makes the process perform a system call.
    ///
    /// # Errors
    /// `Refused` if the kernel does not support it (before 6.7, or not configured). The process is
    /// unchanged then.
    pub fn begin(pid: i32, call: &mut dyn FnMut(i64, [u64; 6]) -> Result<i64>) -> Result<Self> {
        let flags = UFFD_USER_MODE_ONLY | (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
        let number = call(libc::SYS_userfaultfd, [flags, 0, 0, 0, 0, 0])?;
        if number < 0 {
            let source = std::io::Error::from_raw_os_error((-number) as i32);
            return Err(Error::Refused { operation: "create a userfaultfd", pid, source });
        }
        let uffd = Pidfd::open(pid).and_then(|p| p.descriptor(number as i32));
        call(libc::SYS_close, [number.cast_unsigned(), 0, 0, 0, 0, 0])?;
        let uffd = uffd?;
        let mut api = [0xAA, FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED, 0u64];
        // SAFETY: struct uffdio_api is three 64-bit words.
        if unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API as _, api.as_mut_ptr()) } != 0 {
            return Err(Error::last("track writes", pid));
        }
        Ok(Self { pid, uffd })
    }

    /// Starts to track `[start, end)`. All its pages count as written until the first
    /// [`crate::pagemap::Pagemap::written`] of the range, which write-protects it.
    ///
    /// # Errors
    /// If the range cannot be tracked (a special mapping, or one with a userfaultfd of the
    /// program).
    pub fn track(&self, start: u64, end: u64) -> Result<()> {
        let mut register = [start, end - start, MODE_WP, 0];
        // SAFETY: struct uffdio_register is four 64-bit words.
        if unsafe { libc::ioctl(self.uffd.as_raw_fd(), UFFDIO_REGISTER as _, register.as_mut_ptr()) } != 0 {
            return Err(Error::last("track writes", self.pid));
        }
        Ok(())
    }
}
