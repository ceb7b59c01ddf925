//! Sizes of the two buffers, and whether the program has fixed them.

use crate::connection::MAX_QUEUED;
use crate::error::{InCall, SystemError};
use crate::syscalls::{SockOpt, int_option, set_int_option};
use libc::SOL_SOCKET;
use rustix::fd::BorrowedFd;
use serde::{Deserialize, Serialize};

const SO_SNDBUF: SockOpt = SockOpt(SOL_SOCKET, libc::SO_SNDBUF);
const SO_RCVBUF: SockOpt = SockOpt(SOL_SOCKET, libc::SO_RCVBUF);
const SO_SNDBUFFORCE: SockOpt = SockOpt(SOL_SOCKET, libc::SO_SNDBUFFORCE);
const SO_RCVBUFFORCE: SockOpt = SockOpt(SOL_SOCKET, libc::SO_RCVBUFFORCE);
/// include/uapi/asm-generic/socket.h, Linux 5.14.
const SO_BUF_LOCK: SockOpt = SockOpt(SOL_SOCKET, 72);

/// Bits of `SO_BUF_LOCK` (include/uapi/linux/socket.h).
const SEND_LOCK: i32 = 1;
const RECEIVE_LOCK: i32 = 2;

/// Largest buffer that is carried over. Buffers that the kernel has grown further shrink to it.
const MAX_BUFFER: u32 = 1 << 28;

/// Space for the kernel's own structures while queues are filled, in bytes.
const SLACK: usize = 1 << 20;

/// Buffer sizes, in bytes as getsockopt(2) reports them: twice what a program sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffers {
    /// `SO_RCVBUF`.
    pub receive: u32,
    /// `SO_SNDBUF`.
    pub send: u32,
    /// Whether the program has set `SO_RCVBUF`, so that the kernel does not adapt it.
    pub receive_locked: bool,
    /// Whether the program has set `SO_SNDBUF`, so that the kernel does not adapt it.
    pub send_locked: bool,
}

impl Buffers {
    /// # Errors
    /// The kernel is older than 5.14.
    pub(super) fn read(socket: BorrowedFd<'_>) -> Result<Self, SystemError> {
        let size = |option, name| {
            let size = int_option(socket, option).in_call(name)?;
            Ok(size.cast_unsigned().min(MAX_BUFFER))
        };
        let locks = int_option(socket, SO_BUF_LOCK).in_call("SO_BUF_LOCK")?;
        Ok(Self {
            receive: size(SO_RCVBUF, "SO_RCVBUF")?,
            send: size(SO_SNDBUF, "SO_SNDBUF")?,
            receive_locked: locks & RECEIVE_LOCK != 0,
            send_locked: locks & SEND_LOCK != 0,
        })
    }

    pub(super) fn is_valid(&self) -> bool {
        self.receive.max(self.send) <= MAX_BUFFER
    }

    /// Sets the size of the receive buffer.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN.
    pub(crate) fn apply_receive(&self, socket: BorrowedFd<'_>) -> Result<(), SystemError> {
        set_int_option(socket, SO_RCVBUFFORCE, half(self.receive)).in_call("SO_RCVBUFFORCE")
    }

    /// Sets the size of the send buffer, and whether the sizes are fixed.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN.
    pub(crate) fn apply_send(&self, socket: BorrowedFd<'_>) -> Result<(), SystemError> {
        set_int_option(socket, SO_SNDBUFFORCE, half(self.send)).in_call("SO_SNDBUFFORCE")?;
        let lock = |locked: bool, bit: i32| if locked { bit } else { 0 };
        let locks = lock(self.receive_locked, RECEIVE_LOCK) | lock(self.send_locked, SEND_LOCK);
        set_int_option(socket, SO_BUF_LOCK, locks).in_call("SO_BUF_LOCK")
    }
}

/// The value to set for a size: the kernel doubles it.
fn half(size: u32) -> i32 {
    size.min(MAX_BUFFER).div_ceil(2).cast_signed()
}

/// Makes room for queues of the given lengths in bytes. The buffers are at least as large as the
/// connection's own, so that the kernel chooses its initial window as it did before.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN.
pub(crate) fn grow_buffers(
    socket: BorrowedFd<'_>,
    buffers: &Buffers,
    receive: usize,
    send: usize,
) -> Result<(), SystemError> {
    let room = |queued: usize, own: u32| {
        let half = queued.min(MAX_QUEUED) + SLACK;
        i32::try_from(half.max(own.div_ceil(2) as usize)).unwrap_or(i32::MAX)
    };
    set_int_option(socket, SO_RCVBUFFORCE, room(receive, buffers.receive)).in_call("SO_RCVBUFFORCE")?;
    set_int_option(socket, SO_SNDBUFFORCE, room(send, buffers.send)).in_call("SO_SNDBUFFORCE")
}
