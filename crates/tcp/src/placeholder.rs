//! Placeholders: sockets that keep a descriptor and a port taken while their connection is on
//! another node.
//!
//! A placeholder is in the state CLOSE and bound to the connection's local address. It sends
//! nothing and matches no packet. For a program that looks at it, it is a socket that is not
//! connected: poll(2) reports POLLOUT and POLLHUP. Another socket can be bound to the port only if
//! it could before, by `SO_REUSEADDR` of both.

use crate::error::{InCall, RestoreError, SystemError};
use crate::repair::{self, Info};
use crate::syscalls::{SockOpt, int_option};
use crate::{Connection, restore, resume};
use libc::SOL_SOCKET;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::{connect_unspec, getsockname};
use std::io::{Error, ErrorKind};
use std::net::SocketAddr;

const SO_ERROR: SockOpt = SockOpt(SOL_SOCKET, libc::SO_ERROR);

/// The state CLOSE (include/net/tcp_states.h).
const CLOSED: u8 = 7;

/// Makes a captured socket a placeholder, after its connection was restored elsewhere. No packet is
/// sent. The descriptor stays open.
///
/// # Errors
/// The socket is not in repair mode, and is unchanged; or the kernel did not bind it again. Then it
/// is closed in the sense of TCP, without a packet, and its port may be free.
pub fn discard(socket: &impl AsFd, connection: &Connection) -> Result<(), SystemError> {
    let socket = socket.as_fd();
    if !repair::is_on(socket)? {
        return Err(Error::new(ErrorKind::InvalidInput, "the socket is not captured")).in_call("TCP_REPAIR");
    }
    disconnect(socket, connection)
}

/// Restores a connection into the placeholder that it left behind, and lets it go on. The thread must
/// be in the socket's network namespace. See [`restore`](crate::restore()) and
/// [`resume`](crate::resume()).
///
/// # Errors
/// The socket is still, or again, a placeholder.
pub fn restore_into(socket: &impl AsFd, connection: &Connection) -> Result<(), RestoreError> {
    let socket = socket.as_fd();
    connection.validate()?;
    let local = SocketAddr::try_from(getsockname(socket).in_call("getsockname")?).in_call("getsockname")?;
    let is_placeholder =
        local.port() == connection.local.port() && local.is_ipv4() == connection.local.is_ipv4();
    if !is_placeholder || Info::of(socket)?.state != CLOSED {
        return Err(RestoreError::NotPlaceholder);
    }
    restore::rebuild(socket, connection).and_then(|()| Ok(resume(&socket, connection)?)).inspect_err(|_| {
        // The first error is the one to report.
        let _ = repair::begin(socket).and_then(|()| disconnect(socket, connection));
    })
}

/// Disconnects a socket in repair mode, binds it, and ends repair mode.
fn disconnect(socket: BorrowedFd<'_>, connection: &Connection) -> Result<(), SystemError> {
    connect_unspec(socket).in_call("connect to AF_UNSPEC")?;
    // The kernel leaves ECONNABORTED; reading it clears it.
    int_option(socket, SO_ERROR).in_call("SO_ERROR")?;
    repair::bind_if_free(socket, connection.local)?;
    repair::end(socket, connection.settings.reuse_address)
}
