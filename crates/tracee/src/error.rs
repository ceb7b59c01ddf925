//! Errors of operations on other processes.

use std::io;

/// The result of an operation on another process.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed operation on a process.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process exited or was killed.
    #[error("process {pid} is gone")]
    Gone {
        /// Its pid.
        pid: i32,
    },
    /// The kernel refused an operation.
    #[error("{operation} of process {pid}: {source}")]
    Refused {
        /// The operation.
        operation: &'static str,
        /// The process.
        pid: i32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The content of a file in /proc was not understood.
    #[error("cannot parse {what} of process {pid}")]
    Unreadable {
        /// The file or line.
        what: &'static str,
        /// The process.
        pid: i32,
    },
    /// The process was in an unexpected state.
    #[error("process {pid} is in an unexpected state: {what}")]
    Inconsistent {
        /// The state found.
        what: String,
        /// The process.
        pid: i32,
    },
}

impl Error {
    /// The last OS error, as a failure of `operation` on `pid`. ESRCH counts as
    /// [`Gone`](Self::Gone). ptrace also returns it for a tracee that is not stopped, but requests
    /// that need a stopped tracee are made only on a [`Stopped`](crate::Stopped).
    pub(crate) fn last(operation: &'static str, pid: i32) -> Self {
        Self::from_io(operation, pid, io::Error::last_os_error())
    }

    pub(crate) fn from_io(operation: &'static str, pid: i32, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::ESRCH) => Self::Gone { pid },
            _ => Self::Refused { operation, pid, source },
        }
    }

    /// Whether the process is gone.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }
}
