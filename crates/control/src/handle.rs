//! What the kernel calls a file: name_to_handle_at(2), for comparing, and open_by_handle_at(2).
#![allow(unsafe_code, reason = "the call has no safe wrapper")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// The longest handle.
const MOST: usize = libc::MAX_HANDLE_SZ as usize;

/// As `struct file_handle` with its bytes.
#[repr(C)]
struct Room {
    head: libc::file_handle,
    bytes: [u8; MOST],
}

/// The kind and bytes of a file's handle. Two open files of one file system with the same ones are the same file, also on
/// different machines if the file system is a server's.
///
/// # Errors
/// If the file system has none.
pub fn of(fd: impl AsFd) -> io::Result<(i32, Vec<u8>)> {
    let fd = fd.as_fd().as_raw_fd();
    // One to compare is enough, which overlayfs has as well; before Linux 6.5 there is only the one to open by.
    let room = ask(fd, libc::AT_EMPTY_PATH | libc::AT_HANDLE_FID)
        .or_else(|_old_kernel| ask(fd, libc::AT_EMPTY_PATH))?;
    let length = usize::try_from(room.head.handle_bytes).unwrap_or(MOST);
    let bytes = room.bytes.get(..length).unwrap_or(&room.bytes).to_vec();
    Ok((room.head.handle_type, bytes))
}

/// Holds the file of this handle (`O_PATH`), of the file system that another one is of.
///
/// # Errors
/// If there is none, or without CAP_DAC_READ_SEARCH.
pub fn open(of: impl AsFd, kind: i32, bytes: &[u8]) -> io::Result<OwnedFd> {
    let length = bytes.len().min(MOST);
    let head = libc::file_handle { handle_bytes: length as u32, handle_type: kind, f_handle: [] };
    let mut room = Room { head, bytes: [0; MOST] };
    room.bytes[..length].copy_from_slice(&bytes[..length]);
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    // SAFETY: `room` has as many bytes behind its head as `handle_bytes` says, and is only read.
    let fd = unsafe { libc::open_by_handle_at(of.as_fd().as_raw_fd(), (&raw mut room).cast(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given it to us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn ask(fd: i32, flags: i32) -> io::Result<Room> {
    let head = libc::file_handle { handle_bytes: MOST as u32, handle_type: 0, f_handle: [] };
    let mut room = Room { head, bytes: [0; MOST] };
    let mut mount = 0;
    // SAFETY: `room` has as many bytes behind its head as `handle_bytes` says, and all three pointers are to what lives until the
    // call is over; the caller keeps `fd` open.
    let done =
        unsafe { libc::name_to_handle_at(fd, c"".as_ptr(), (&raw mut room).cast(), &raw mut mount, flags) };
    if done == 0 { Ok(room) } else { Err(io::Error::last_os_error()) }
}
