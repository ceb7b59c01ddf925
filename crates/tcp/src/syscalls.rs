//! System calls without a safe wrapper: options by number, and queue lengths.

use rustix::fd::{AsRawFd, BorrowedFd};
use std::io;

/// One socket option: its level and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SockOpt(pub(crate) i32, pub(crate) i32);

/// Reads an option into `value`. Returns the length that the kernel reports.
///
/// # Errors
/// Those of getsockopt(2).
#[allow(unsafe_code, reason = "getsockopt has no safe form for an option given by number")]
pub(crate) fn read_option(socket: BorrowedFd<'_>, option: SockOpt, value: &mut [u8]) -> io::Result<usize> {
    let mut length = libc::socklen_t::try_from(value.len()).unwrap_or(libc::socklen_t::MAX);
    // SAFETY: the pointers are to `value` and to its length; the kernel writes at most that length.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), option.0, option.1, value.as_mut_ptr().cast(), &raw mut length)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(length as usize) }
}

/// Sets an option to the bytes of `value`.
///
/// # Errors
/// Those of setsockopt(2).
#[allow(unsafe_code, reason = "setsockopt has no safe form for an option given by number")]
pub(crate) fn write_option(socket: BorrowedFd<'_>, option: SockOpt, value: &[u8]) -> io::Result<()> {
    let length = libc::socklen_t::try_from(value.len()).unwrap_or(libc::socklen_t::MAX);
    // SAFETY: the kernel reads at most `length` bytes of `value`.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), option.0, option.1, value.as_ptr().cast(), length) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Reads an option whose value is an int.
///
/// # Errors
/// Those of getsockopt(2).
pub(crate) fn int_option(socket: BorrowedFd<'_>, option: SockOpt) -> io::Result<i32> {
    let mut value = [0; 4];
    read_option(socket, option, &mut value)?;
    Ok(i32::from_ne_bytes(value))
}

/// Sets an option whose value is an int.
///
/// # Errors
/// Those of setsockopt(2).
pub(crate) fn set_int_option(socket: BorrowedFd<'_>, option: SockOpt, value: i32) -> io::Result<()> {
    write_option(socket, option, &value.to_ne_bytes())
}

/// An ioctl of include/uapi/linux/sockios.h that stores one int.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IntIoctl {
    /// `SIOCINQ`: bytes that can be read, without a received FIN; up to the urgent mark if there is
    /// one.
    Unread = 0x541b,
    /// `SIOCOUTQ`: sequence numbers that the peer has not acknowledged, an own FIN included.
    Unacked = 0x5411,
    /// `SIOCOUTQNSD`: those of `Unacked` that were not sent.
    Unsent = 0x894b,
    /// `SIOCATMARK`: 1 if the next byte to read is the urgent one.
    AtMark = 0x8905,
}

/// Makes an ioctl that stores one int.
///
/// # Errors
/// Those of ioctl(2).
#[allow(unsafe_code, reason = "these ioctls have no safe form")]
pub(crate) fn int_ioctl(socket: BorrowedFd<'_>, request: IntIoctl) -> io::Result<u32> {
    let mut value = 0_i32;
    // SAFETY: the requests of `IntIoctl` store one int, into `value`.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), request as libc::c_ulong as _, &raw mut value) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(u32::try_from(value).unwrap_or(0)) }
}

/// include/uapi/asm-generic/fcntl.h.
pub(crate) const F_SETSIG: i32 = 10;
/// include/uapi/asm-generic/fcntl.h.
pub(crate) const F_GETSIG: i32 = 11;

/// A request of fcntl(2) whose argument is an int, or that has none.
///
/// # Errors
/// Those of fcntl(2).
#[allow(unsafe_code, reason = "F_GETSIG, F_SETSIG and F_GETOWN have no safe form")]
pub(crate) fn fcntl_int(file: BorrowedFd<'_>, request: i32, argument: i32) -> io::Result<i32> {
    debug_assert!([libc::F_GETOWN, F_GETSIG, F_SETSIG].contains(&request));
    // SAFETY: the three requests take an int or nothing, and no pointer.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), request, argument) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
