//! Flags of the open file that refers to the socket (fcntl(2)).

use crate::error::{InCall, SystemError};
use crate::syscalls::{F_GETSIG, F_SETSIG, fcntl_int};
use rustix::fd::BorrowedFd;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use serde::{Deserialize, Serialize};

/// Largest signal number of Linux.
const MAX_SIGNAL: u8 = 64;

/// Flags of the open file. `FD_CLOEXEC` belongs to a descriptor, and is the caller's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFlags {
    /// `O_NONBLOCK`.
    pub nonblocking: bool,
    /// `O_ASYNC`. It has no effect without an owner.
    pub signals: bool,
    /// `F_GETSIG`: the signal for `O_ASYNC`; 0 is SIGIO.
    pub signal: u8,
    /// `F_GETOWN`: the process, or negative the process group, that receives SIGIO and SIGURG; 0 is
    /// none. The number is that of the pid namespace of the caller of `capture`. `restore` does not
    /// set it: the caller must, if it still means the program itself.
    pub owner: i32,
}

impl FileFlags {
    /// # Errors
    /// Those of fcntl(2).
    pub(super) fn read(file: BorrowedFd<'_>) -> Result<Self, SystemError> {
        let flags = fcntl_getfl(file).in_call("F_GETFL")?;
        let signal = fcntl_int(file, F_GETSIG, 0).in_call("F_GETSIG")?;
        Ok(Self {
            nonblocking: flags.contains(OFlags::NONBLOCK),
            signals: flags.bits() & libc::O_ASYNC.cast_unsigned() != 0,
            signal: u8::try_from(signal).unwrap_or(0),
            owner: fcntl_int(file, libc::F_GETOWN, 0).unwrap_or(0),
        })
    }

    pub(super) fn is_valid(&self) -> bool {
        self.signal <= MAX_SIGNAL
    }

    /// Sets all but the owner.
    ///
    /// # Errors
    /// Those of fcntl(2).
    pub(super) fn apply(&self, file: BorrowedFd<'_>) -> Result<(), SystemError> {
        let async_flag = OFlags::from_bits_retain(libc::O_ASYNC.cast_unsigned());
        let mut flags = fcntl_getfl(file).in_call("F_GETFL")?;
        flags.set(OFlags::NONBLOCK, self.nonblocking);
        flags.set(async_flag, self.signals);
        fcntl_setfl(file, flags).in_call("F_SETFL")?;
        if fcntl_int(file, F_GETSIG, 0).in_call("F_GETSIG")? != i32::from(self.signal) {
            fcntl_int(file, F_SETSIG, self.signal.into()).in_call("F_SETSIG")?;
        }
        Ok(())
    }
}
