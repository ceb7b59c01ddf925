//! What the kernel calls a file, for comparing: name_to_handle_at(2).
#![allow(unsafe_code, reason = "the call has no safe wrapper")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

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
