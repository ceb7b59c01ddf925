//! Restores a connection as a new socket, or into a placeholder.

use crate::announce::Injector;
use crate::connection::{Connection, State, Windows, length};
use crate::error::{InCall, RestoreError, SystemError};
use crate::repair::{self, Info, Queue};
use crate::settings::{grow_buffers, set_window_clamp};
use crate::syscalls::{IntIoctl, int_ioctl};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{
    AddressFamily, SendFlags, Shutdown, SocketFlags, SocketType, connect, getsockname, ipproto, send,
    shutdown, socket_with,
};
use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How long the kernel may take to deliver a packet through the loopback device.
const LOOPBACK_TIMEOUT: Duration = Duration::from_secs(2);

/// Largest value of `TCP_MAXSEG` (`MAX_TCP_WINDOW`, include/net/tcp.h).
const MAX_MSS_LIMIT: u16 = 32767;

/// Bytes that are added to a queue by one call. The kernel makes one buffer of them.
const CHUNK: usize = 64 << 10;

/// Restores a connection as a new socket in the calling thread's network namespace. The local address
/// must be one of the namespace, and the loopback device must be up. The descriptor has `FD_CLOEXEC`.
///
/// The connection goes on with [`resume`](crate::resume()). Until then the socket sends no data that
/// was not sent before, so that none is lost while its packets cannot pass yet.
///
/// # Errors
/// No socket is left. See [`RestoreError`].
pub fn restore(connection: &Connection) -> Result<OwnedFd, RestoreError> {
    connection.validate()?;
    let family = if connection.local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, Some(ipproto::TCP))
        .in_call("socket")?;
    // After an error the socket is in repair mode, so that it closes without a packet.
    rebuild(socket.as_fd(), connection)?;
    Ok(socket)
}

/// Builds a valid connection in a socket of the state CLOSE. After an error the socket is in repair
/// mode, or was never connected.
pub(crate) fn rebuild(socket: BorrowedFd<'_>, connection: &Connection) -> Result<(), RestoreError> {
    repair::begin(socket)?;
    connect_silently(socket, connection)?;
    let injector = Injector::open(socket, connection)?;
    fill(socket, Queue::Receive, &connection.receive.bytes)?;
    fill(socket, Queue::Send, &connection.send.sent)?;
    if int_ioctl(socket, IntIoctl::Unsent).in_call("SIOCOUTQNSD")? != 0 {
        return Err(RestoreError::Differs("data in the send queue does not count as sent"));
    }
    restore_fins(socket, connection, &injector)?;
    connection.settings.apply(socket)?;
    connection.settings.buffers.apply_receive(socket)?;
    restore_windows(socket, connection)?;
    check(socket, connection)?;
    repair::set_windows(socket, &window_of_sent(connection))?;
    repair::end(socket, connection.settings.reuse_address)?;
    queue_unsent(socket, connection).inspect_err(|_| {
        // The first error is the one to report.
        let _ = repair::begin(socket);
    })?;
    Ok(())
}

/// The peer's window, but only up to the end of the sent data. The peer's next acknowledgement opens it.
///
/// Not a window of 0 in any case: with that, kernels before 6.10 end a connection whose sent data is
/// not acknowledged in time (`tcp_retransmit_timer`, net/ipv4/tcp_timer.c).
fn window_of_sent(connection: &Connection) -> Windows {
    let Connection { send, windows, .. } = connection;
    let sent = length(&send.sent) + u32::from(send.fin_sent);
    Windows { snd_wnd: sent.min(windows.max_window), ..*windows }
}

/// Gives the socket its addresses, sequence numbers and negotiated options.
fn connect_silently(socket: BorrowedFd<'_>, connection: &Connection) -> Result<(), RestoreError> {
    let Connection { local, peer, send, receive, negotiated, settings, .. } = connection;
    settings.apply_before_bind(socket, local.is_ipv6())?;
    grow_buffers(socket, &settings.buffers, receive.bytes.len(), send.sent.len() + send.unsent.len())?;
    if negotiated.window_scale.is_none() {
        // The kernel chooses a shift by the largest window that it may offer
        // (`tcp_select_initial_window`, net/ipv4/tcp_output.c), and applies it even if the option
        // was not negotiated. Up to this value it is 0.
        set_window_clamp(socket, u16::MAX.into())?;
    }
    // The segment size in use is computed when the socket is connected, from this limit. The
    // repair option only stores the peer's limit for later.
    repair::limit_mss(socket, negotiated.mss.min(MAX_MSS_LIMIT))?;
    repair::bind_if_free(socket, *local)?;
    repair::begin_queue(socket, Queue::Receive, connection.first_unread())?;
    repair::begin_queue(socket, Queue::Send, connection.first_unacked())?;
    connect(socket, peer).in_call("connect")?;
    repair::limit_mss(socket, 0)?;
    if local_address(socket)? != *local {
        return Err(RestoreError::Differs("the kernel chose another local address"));
    }
    Ok(repair::set_negotiated(socket, negotiated)?)
}

fn local_address(socket: BorrowedFd<'_>) -> Result<SocketAddr, SystemError> {
    let local = getsockname(socket).in_call("getsockname")?;
    SocketAddr::try_from(local).in_call("getsockname")
}

/// Puts bytes into a queue.
fn fill(socket: BorrowedFd<'_>, queue: Queue, bytes: &[u8]) -> Result<(), SystemError> {
    repair::select(socket, queue)?;
    for chunk in bytes.chunks(CHUNK) {
        send_all(socket, chunk)?;
    }
    repair::select(socket, Queue::None)
}

fn send_all(socket: BorrowedFd<'_>, mut bytes: &[u8]) -> Result<(), SystemError> {
    while !bytes.is_empty() {
        let sent = send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).in_call("send")?;
        if sent == 0 {
            return Err(Error::from(ErrorKind::WriteZero)).in_call("send");
        }
        bytes = bytes.get(sent..).unwrap_or_default();
    }
    Ok(())
}

/// Brings the connection from ESTABLISHED to its state, in the order in which the FINs took effect.
/// An own FIN that was not sent is queued after the unsent bytes, in [`queue_unsent`].
fn restore_fins(
    socket: BorrowedFd<'_>,
    connection: &Connection,
    injector: &Injector<'_>,
) -> Result<(), RestoreError> {
    let Connection { state, send, .. } = connection;
    let receive_fin = || {
        // Kernels drop a FIN for a closed window, so that the window is opened by the FIN's number.
        repair::set_windows(socket, &window_for_fin(connection))?;
        injector.finish_receiving()
    };
    let shut_silently = || {
        // The FIN counts as sent in this mode, as data does.
        repair::select(socket, Queue::Send)?;
        shutdown(socket, Shutdown::Write).in_call("shutdown")?;
        repair::select(socket, Queue::None)
    };
    match state {
        State::Established => {}
        State::CloseWait => {
            receive_fin()?;
            wait_for(socket, State::CloseWait)?;
        }
        State::LastAck => {
            receive_fin()?;
            wait_for(socket, State::CloseWait)?;
            if send.fin_sent {
                shut_silently()?;
            }
        }
        State::FinWait1 => {
            if send.fin_sent {
                shut_silently()?;
            }
        }
        State::FinWait2 => {
            shut_silently()?;
            injector.acknowledge_fin()?;
            wait_for(socket, State::FinWait2)?;
        }
        State::Closing => {
            shut_silently()?;
            receive_fin()?;
            wait_for(socket, State::Closing)?;
        }
    }
    Ok(())
}

fn window_for_fin(connection: &Connection) -> Windows {
    let next = connection.receive.end;
    Windows { snd_wl1: next, rcv_wup: next, rcv_wnd: connection.windows.rcv_wnd.max(1), ..connection.windows }
}

/// Waits until a packet that was sent through the loopback device has taken effect. This is usually
/// so when the call that sends it returns.
fn wait_for(socket: BorrowedFd<'_>, state: State) -> Result<(), RestoreError> {
    let deadline = Instant::now() + LOOPBACK_TIMEOUT;
    while Info::of(socket)?.state != state.number() {
        if Instant::now() > deadline {
            return Err(RestoreError::Differs("no packet is delivered through the loopback device"));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Restores the windows, and with them the limit of the window that will be offered. Without this
/// limit a connection whose receive queue was full would offer a window of one segment at first.
fn restore_windows(socket: BorrowedFd<'_>, connection: &Connection) -> Result<(), SystemError> {
    let Connection { windows, settings, .. } = connection;
    let next = connection.next_received();
    if windows.rcv_ssthresh > 0 {
        // No option sets rcv_ssthresh. A smaller clamp lowers it to the clamp, and a larger one
        // raises it to the window that is offered at the time.
        let offered = Windows { snd_wl1: next, rcv_wup: next, rcv_wnd: windows.rcv_ssthresh, ..*windows };
        repair::set_windows(socket, &offered)?;
        set_window_clamp(socket, 1)?;
        set_window_clamp(socket, windows.rcv_ssthresh.max(settings.window_clamp))?;
    }
    if settings.window_clamp > 0 {
        set_window_clamp(socket, settings.window_clamp)?;
    }
    repair::set_windows(socket, windows)
}

/// Compares with the connection before anything is sent.
fn check(socket: BorrowedFd<'_>, connection: &Connection) -> Result<(), RestoreError> {
    let Connection { negotiated, state, send, receive, .. } = connection;
    let info = Info::of(socket)?;
    let agreed = |option: u8| info.options & option != 0;
    let scales = negotiated.window_scale.map_or((0, 0), |scale| (scale.peer, scale.own));
    // An own FIN that was not sent is still missing.
    let expected = match (state, send.fin_sent) {
        (State::FinWait1, false) => State::Established,
        (State::LastAck, false) => State::CloseWait,
        _ => *state,
    };
    if info.state != expected.number() {
        return Err(RestoreError::Differs("its state"));
    }
    if agreed(Info::SACK) != negotiated.sack
        || agreed(Info::TIMESTAMPS) != negotiated.timestamp.is_some()
        || agreed(Info::WINDOW_SCALE) != negotiated.window_scale.is_some()
        || (info.snd_wscale, info.rcv_wscale) != scales
    {
        return Err(RestoreError::Differs("its negotiated options"));
    }
    let sent_end = send.end.wrapping_sub(length(&send.unsent)).wrapping_add(send.fin_sent.into());
    let ends = (repair::end_of_queue(socket, Queue::Receive)?, repair::end_of_queue(socket, Queue::Send)?);
    repair::select(socket, Queue::None)?;
    let unread = int_ioctl(socket, IntIoctl::Unread).in_call("SIOCINQ")?;
    if ends != (connection.next_received(), sent_end) || unread != length(&receive.bytes) {
        return Err(RestoreError::Differs("its queues"));
    }
    Ok(())
}

/// Queues what was not sent. The window does not let it leave yet.
fn queue_unsent(socket: BorrowedFd<'_>, connection: &Connection) -> Result<(), SystemError> {
    let Connection { send, state, settings, .. } = connection;
    send_all(socket, &send.unsent)?;
    if state.send_shut() && !send.fin_sent {
        shutdown(socket, Shutdown::Write).in_call("shutdown")?;
    }
    if connection.receive_shut {
        shutdown(socket, Shutdown::Read).in_call("shutdown")?;
    }
    settings.buffers.apply_send(socket)
}
