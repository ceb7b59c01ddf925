//! What can go wrong with a process that is not ours.

use std::io;

/// The result of an operation on another process.
pub type Result<T> = std::result::Result<T, Error>;

/// An operation on a process failed. An errno without the operation and the process is useless.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process ended, or was killed, in our hands.
    #[error("process {pid} is gone")]
    Gone {
        /// Which.
        pid: i32,
    },
    /// The kernel refused.
    #[error("{operation} of process {pid}: {source}")]
    Refused {
        /// What was tried.
        operation: &'static str,
        /// On whom.
        pid: i32,
        /// What the kernel said.
        source: io::Error,
    },
    /// /proc said something that we do not understand.
    #[error("cannot understand {what} of process {pid}")]
    Unreadable {
        /// Which file or line.
        what: &'static str,
        /// Whose.
        pid: i32,
    },
    /// The process did something else than was expected of it.
    #[error("process {pid} did not behave: {what}")]
    Astray {
        /// What was seen.
        what: String,
        /// Who.
        pid: i32,
    },
}

impl Error {
    /// The last OS error as a failure of `operation` on `pid`. ESRCH can only mean that it is gone: we ask
    /// about processes that we hold.
    pub(crate) fn last(operation: &'static str, pid: i32) -> Self {
        Self::from_io(operation, pid, io::Error::last_os_error())
    }

    pub(crate) fn from_io(operation: &'static str, pid: i32, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::ESRCH) => Self::Gone { pid },
            _ => Self::Refused { operation, pid, source },
        }
    }

    /// Whether the process has ended.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }
}
