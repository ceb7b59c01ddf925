//! Lets a connection go on: a restored one, or a captured one whose move is cancelled.

use crate::announce::Injector;
use crate::error::SystemError;
use crate::{Connection, repair};
use rustix::fd::AsFd;

/// Ends the repair mode of a captured socket, and makes both sides send an acknowledgement; that of the
/// peer opens the window of a restored socket. The thread must be in the socket's network namespace.
/// Packets that were held back may be delivered before or after this call.
///
/// # Errors
/// If the error is of `TCP_REPAIR`, a captured socket is still captured. After any other error the
/// connection goes on, but may first wait for a retransmission timeout.
pub fn resume(socket: &impl AsFd, connection: &Connection) -> Result<(), SystemError> {
    let socket = socket.as_fd();
    repair::end(socket, connection.settings.reuse_address)?;
    let timestamp =
        if connection.negotiated.timestamp.is_some() { Some(repair::timestamp(socket)?) } else { None };
    Injector::open(socket, connection)?.announce(timestamp)
}
