//! Errors of the operations, each with the state of the socket after it.

use crate::Refused;
use std::io;
use thiserror::Error;

/// A system call failed.
#[derive(Debug, Error)]
#[error("{call}: {source}")]
pub struct SystemError {
    /// The call, or the socket option.
    pub call: &'static str,
    /// Its error.
    pub source: io::Error,
}

/// Why [`capture`](crate::capture()) failed. The socket is as before, not in repair mode.
#[derive(Debug, Error)]
pub enum CaptureError {
    /// The connection cannot move now.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The queues changed during each attempt to read them.
    #[error("packets of the connection keep arriving; they must be held back while it moves")]
    Changing,
    /// The kernel lacks an interface, the caller lacks CAP_NET_ADMIN, or memory is short.
    #[error(transparent)]
    System(#[from] SystemError),
}

/// Data that no capture produces. It comes from a faulty or hostile node.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Invalid {
    /// Addresses of two families, a port of 0, or an address that is not of one host.
    #[error("the connection's addresses are not those of a TCP connection")]
    Addresses,
    /// More than [`MAX_QUEUED`](crate::connection::MAX_QUEUED) bytes.
    #[error("the connection's queues are too long")]
    Queues,
    /// Bytes in the send queue behind an acknowledged FIN, or the like.
    #[error("the connection's queues do not match its state")]
    State,
    /// A segment size or a window scale outside the range of RFC 9293 and RFC 7323.
    #[error("the connection's negotiated options are out of range")]
    Negotiated,
    /// A window that the kernel would not accept.
    #[error("the connection's windows are out of range")]
    Windows,
    /// An option that is not in the table, is there twice, or has a value out of range.
    #[error("a socket option is unknown or out of range")]
    Options,
}

/// Why [`restore`](crate::restore()) or [`restore_into`](crate::restore_into) failed. No packet left
/// except acknowledgements, or bytes that the captured socket still has. The captured socket can
/// still be resumed. A new socket is closed; a placeholder is a placeholder again.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// The data is not that of a connection.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The kernel did not reach the connection's state, or not with the connection's addresses.
    #[error("the restored socket differs from the connection: {0}")]
    Differs(&'static str),
    /// The socket for `restore_into` is connected, or is of another address family or port.
    #[error("the socket is not a placeholder of this connection")]
    NotPlaceholder,
    /// The kernel lacks an interface, the caller lacks a capability, or memory is short.
    #[error(transparent)]
    System(#[from] SystemError),
}

/// Names the call in an error.
pub(crate) trait InCall<T> {
    /// # Errors
    /// The error, with the name of the call.
    fn in_call(self, call: &'static str) -> Result<T, SystemError>;
}

impl<T, E: Into<io::Error>> InCall<T> for Result<T, E> {
    fn in_call(self, call: &'static str) -> Result<T, SystemError> {
        self.map_err(|error| SystemError { call, source: error.into() })
    }
}
